"""Processes under torchrun's agent: ``python -m torch.distributed.run``."""

from __future__ import annotations

import itertools
import sys
import time
from functools import partial

from paceline.distributed.environment import parse_endpoint
from paceline.distributed.process import read_failure
from paceline.launchers.local.base import LocalLauncher, LocalSpec, RenderedProcess, RenderedProcesses
from paceline.launchers.local.supervision import Starter, SupervisedJob
from paceline.run_directory import RunDirectory

_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


class TorchrunLauncher(LocalLauncher):
    """Starts torchrun's agent here; on several machines it is run on each.

    The agent serves its store on every interface, as torchrun always does; the workers' own sockets
    are on loopback where they share a machine.
    """

    def render(self, spec: LocalSpec) -> RenderedProcesses:
        """Render torchrun's command."""
        module = "torch.distributed.launch" if spec.local_rank_argument else "torch.distributed.run"
        restarts = [f"--max-restarts={spec.max_restarts}"] if spec.recover == "restart" else []
        # A store that agents share with their workers is made once: its address is not told to an agent that
        # comes later, in place of a dead one, and it would wait for ever (torch 2.13).
        several = spec.recover == "restart" and spec.nodes > 1
        own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if several else {}
        process = RenderedProcess(
            title=f"torchrun, {spec.nproc} processes",
            argv=(
                *(spec.python or sys.executable, "-m", module),
                *(*_meeting(spec), f"--nproc-per-node={spec.nproc}"),
                # Its default lacks Slurm's warning, of which it would die, and its workers with it.
                f"--signals-to-handle={_SIGNALS}",
                *(*restarts, *([] if spec.python else ["--no-python"]), *spec.command),
            ),
            env={**spec.thread_variables(), **own_store, **spec.env},
        )
        return RenderedProcesses(spec=spec, processes=(process,))

    def submit(self, rendered: RenderedProcesses) -> SupervisedJob:
        """Start the agent."""
        directory = rendered.spec.directory
        verdict = None if directory is None else partial(_verdict, directory, time.time())
        return SupervisedJob(rendered, starter=Starter(name="torchrun", verdict=verdict))


def _meeting(spec: LocalSpec) -> list[str]:
    """How the agents of the machines find each other."""
    most = spec.most_nodes or spec.nodes
    if most == 1:
        if spec.master_port is None:
            return ["--standalone"]
        return ["--nnodes=1", "--master-addr=127.0.0.1", f"--master-port={spec.master_port}"]
    if spec.rdzv_backend == "static":
        assert spec.rdzv_endpoint is not None
        host, port = parse_endpoint(spec.rdzv_endpoint, "--rdzv-endpoint")
        return [
            f"--nnodes={spec.nodes}",
            f"--node-rank={spec.node_rank}",
            f"--master-addr={host}",
            f"--master-port={port}",
        ]
    is_host, local_addr = [], []
    if spec.node_rank is not None:
        is_host = [f"--rdzv-conf=is_host={int(spec.node_rank == 0)}"]
        # Workers meet at the address of one of the agents, which by itself says its own name for its machine.
        local_addr = [f"--local-addr={host}" for host in spec.hosts[spec.node_rank : spec.node_rank + 1]]
    return [
        f"--nnodes={spec.nodes}:{most}" if most > spec.nodes else f"--nnodes={spec.nodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={spec.rdzv_endpoint}",
        f"--rdzv-id={spec.rdzv_id}",
        *(*is_host, *local_addr),
    ]


def _verdict(directory: RunDirectory, began: float) -> str:
    """Where the workers stood when the last of torchrun's restarts failed; "" where there was none."""
    events = directory.read_events()
    starts = [event["step"] for event in events if event["event"] == "started" and event["time"] >= began]
    if len(starts) < 2:
        return ""
    step = starts[-1]
    same = len(list(itertools.takewhile(lambda start: start == step, reversed(starts))))
    lines = []
    if same > 1:
        lines.append(
            f"torchrun started the workers {len(starts)} times; the last {same} times they went on after "
            f"step {step}, and none came to the next checkpoint."
        )
    failures = [read_failure(path) for path in sorted(directory.logs.glob("rank-*.error.json"))]
    victims = [failure for failure in failures if failure is not None and failure.victim]
    lines += [f"rank {failure.rank}: {failure.message}" for failure in victims[:1]]
    return "\n  ".join(lines)
