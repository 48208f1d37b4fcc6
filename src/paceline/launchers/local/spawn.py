"""Processes on this machine, each a subprocess with torchrun's variables."""

from __future__ import annotations

from dataclasses import replace

from paceline.distributed.environment import JOB_ID, LISTEN_FD, Environment, parse_endpoint
from paceline.errors import ConfigError
from paceline.launchers.base import Contract
from paceline.launchers.contracts import contract_variables
from paceline.launchers.local.base import (
    LocalJob,
    LocalLauncher,
    LocalSpec,
    RenderedProcess,
    RenderedProcesses,
    bound_loopback_socket,
)
from paceline.launchers.local.supervision import SupervisedJob
from paceline.launchers.local.tensorflow import free_ports, role_serves, start_tensorflow


class SpawnLauncher(LocalLauncher):
    """Starts ``nproc`` subprocesses here; on several machines it is run on each."""

    def render(self, spec: LocalSpec) -> RenderedProcesses:
        """Render one command a rank. A free port is looked up where the spec names none.

        Where ranks that die are recovered, there is one command only: the agent's zygote, which forks them.
        """
        if spec.recover != "none":
            return RenderedProcesses(spec=spec, processes=(_render_zygote(spec),))
        if spec.nodes > 1:
            if spec.node_rank is None:
                raise ConfigError(
                    f"--on spawn with --nodes {spec.nodes} needs --node-rank: 0 on the machine of "
                    f"--rdzv-endpoint, 1 to {spec.nodes - 1} on the others."
                )
            assert spec.rdzv_endpoint is not None
            host, port = parse_endpoint(spec.rdzv_endpoint, "--rdzv-endpoint")
        else:
            host, port = "127.0.0.1", spec.master_port or free_master_port(spec.contract, spec.nproc)
        return RenderedProcesses(
            spec=spec,
            processes=tuple(_render_rank(spec, i, host, port) for i in range(spec.nproc)),
        )

    def submit(self, rendered: RenderedProcesses) -> LocalJob:
        """Start the ranks. Where another process took the port since, the job gets a new one."""
        spec = rendered.spec
        if spec.recover != "none":
            from paceline.agent.agent import Agent

            return Agent(rendered)
        if spec.contract == "tensorflow":
            return start_tensorflow(rendered)
        if spec.nodes > 1 or spec.contract != "torch":
            return SupervisedJob(rendered)
        port = int(rendered.processes[0].env["MASTER_PORT"])
        try:
            listener = bound_loopback_socket(port)
        except OSError as error:
            if spec.master_port is not None:
                raise ConfigError(
                    f"port {port} is taken ({error.strerror}). Give another, or none for a free one."
                ) from error
            listener = bound_loopback_socket()
            port = listener.getsockname()[1]
        with listener:
            processes = tuple(
                replace(process, env={**process.env, "MASTER_PORT": str(port)})
                for process in rendered.processes
            )
            # Rank 0 inherits the bound socket: nobody can take the port in between.
            inherited = {LISTEN_FD: str(listener.fileno())}
            processes = (replace(processes[0], env={**processes[0].env, **inherited}), *processes[1:])
            return SupervisedJob(replace(rendered, processes=processes), rank_0_fds=(listener.fileno(),))


def _render_rank(spec: LocalSpec, local_rank: int, host: str, port: int) -> RenderedProcess:
    rank = spec.first_rank + local_rank
    place = Environment(
        source="variables",
        rank=rank,
        world_size=spec.world_size,
        local_rank=local_rank,
        local_world_size=spec.nproc,
        node_rank=spec.node_rank or 0,
        nodes=spec.nodes,
        master_addr=host,
        master_port=port,
    )
    env = {
        **contract_variables(spec.contract, place, hosts=spec.hosts, counts=spec.counts, roles=spec.roles),
        **({JOB_ID: spec.rdzv_id} if spec.nodes > 1 and spec.contract == "torch" else {}),
        **spec.thread_variables(),
        **spec.env,
    }
    log = spec.directory.log_of(rank) if spec.directory is not None and rank > 0 else None
    serves = spec.contract == "tensorflow" and role_serves(rank, spec.roles)
    return RenderedProcess(title=f"rank {rank}", argv=spec.argv, env=env, rank=rank, log=log, serves=serves)


def _render_zygote(spec: LocalSpec) -> RenderedProcess:
    return RenderedProcess(
        title=f"forks {spec.nproc} workers of {spec.command[-1]}, and replaces those that die",
        argv=(spec.python, "-m", "paceline.agent.zygote"),
        env={**spec.thread_variables(), **spec.env},
    )


def free_master_port(contract: Contract, nproc: int) -> int:
    """A free port here, or the first of ``nproc`` in a row: TensorFlow's processes each listen on one."""
    if contract == "tensorflow":
        return free_ports(nproc)
    with bound_loopback_socket() as bound:
        port: int = bound.getsockname()[1]
    return port
