"""``--on inprocess``, ``spawn`` and ``torchrun``: processes here; other machines give the same command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.core.environment import parse_endpoint
from paceline.core.errors import ConfigError
from paceline.core.process_group import ProcessGroupSpec, RenderedProcessGroup, check_node_rank
from paceline.launch.launcher import (
    Command,
    JobHandle,
    LaunchSpec,
    RenderedJob,
    refuse_restarts,
    refuse_walltime,
    refuse_what_is_for_clusters,
)
from paceline.launch.local_processes import free_master_port, get_local_launcher
from paceline.launch.node import interface_variables, split_python
from paceline.launch.options import MeetingOptions, TorchrunOptions
from paceline.launch.rank_env import expand_placeholders, has_placeholders
from paceline.launch.supervisor import ForegroundJob, ForegroundLauncher


@dataclass(frozen=True, kw_only=True)
class RenderedLocal(RenderedJob):
    """Processes of this machine."""

    processes: RenderedProcessGroup


class _LocalAdapter(ForegroundLauncher):
    """Starts processes on this machine."""

    preallocated = True

    def render(self, spec: LaunchSpec, options: MeetingOptions | None = None) -> RenderedLocal:
        """Render the processes."""
        options = options or MeetingOptions()
        refuse_what_is_for_clusters(spec, self.name)
        refuse_walltime(spec, self.name)
        refuse_restarts(spec, self.name)
        processes = get_local_launcher(self.name).render(self._local(spec, options))
        commands = tuple(Command(title=p.title, argv=p.argv, env=p.env) for p in processes.processes)
        return RenderedLocal(spec=spec, options=options, commands=commands, processes=processes)

    def submit(self, rendered: RenderedJob) -> JobHandle:
        """Start them."""
        assert isinstance(rendered, RenderedLocal)
        job = get_local_launcher(self.name).submit(rendered.processes)
        return ForegroundJob(job, rendered.spec.directory)

    def _local(self, spec: LaunchSpec, options: MeetingOptions) -> ProcessGroupSpec:
        least, most = spec.nodes
        endpoint, node_rank = options.rdzv_endpoint, options.node_rank
        if most > least and self.name != "torchrun":
            raise ConfigError(
                f"--nodes {least}:{most}: the number of machines is fixed here. Give one number, or use --on torchrun."
            )
        if most > 1 and endpoint is None:
            raise ConfigError("--nodes above 1 needs --rdzv-endpoint HOST:PORT, the address of machine 0.")
        if len(spec.nproc) > 1 and node_rank is None:
            raise ConfigError("--nproc with a list needs --node-rank, which says which machine this is.")
        check_node_rank(node_rank, most)
        host, port = parse_endpoint(endpoint, "--rdzv-endpoint") if endpoint else ("127.0.0.1", 0)
        master_port = spec.master_port
        if endpoint is None and has_placeholders(spec.command):
            master_port = port = spec.master_port or free_master_port(spec.env_style, spec.nproc[0])
        command = expand_placeholders(
            spec.command, master_addr=host, master_port=port, node_rank=node_rank or 0, nodes=least
        )
        python, arguments = split_python(command)
        return ProcessGroupSpec(
            command=arguments,
            python=python,
            nproc=spec.processes_on(node_rank or 0),
            counts=spec.nproc if len(spec.nproc) > 1 else (),
            nodes=least,
            most_nodes=most,
            node_rank=node_rank,
            rdzv_endpoint=endpoint,
            rdzv_id=options.rdzv_id,
            **_of_torchrun(options),
            master_port=master_port,
            threads=spec.threads,
            env={**interface_variables(spec.interface), **spec.env},
            recover="restart" if spec.max_restarts and self.name == "torchrun" else "none",
            max_restarts=spec.max_restarts,
            env_style=spec.env_style,
            roles=spec.roles,
        )


class InProcess(_LocalAdapter):
    """One process: this one."""

    name = "inprocess"
    rank_launchers = ("spawn",)
    env_styles = ("none",)


class Spawn(_LocalAdapter):
    """Plain processes."""

    name = "spawn"
    rank_launchers = ("spawn",)


class Torchrun(_LocalAdapter):
    """torchrun's agent."""

    name = "torchrun"
    rank_launchers = ("torchrun",)
    env_styles = ("torch",)


def _of_torchrun(options: MeetingOptions) -> dict[str, Any]:
    if not isinstance(options, TorchrunOptions):
        return {}
    if options.rdzv_backend not in ("c10d", "static"):
        raise ConfigError(f"--rdzv-backend must be c10d or static, but is {options.rdzv_backend!r}.")
    if options.rdzv_backend == "static" and options.node_rank is None:
        raise ConfigError("--rdzv-backend static needs --node-rank: this machine's number is fixed.")
    return {"rdzv_backend": options.rdzv_backend, "local_rank_argument": options.local_rank_argument}
