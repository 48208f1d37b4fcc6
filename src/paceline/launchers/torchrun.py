"""Processes under torchrun's agent: ``python -m torch.distributed.run``."""

from __future__ import annotations

import signal

from paceline.launchers.base import JobSpec, Launcher, Rendered, RenderedProcess
from paceline.launchers.supervision import SupervisedJob


class TorchrunLauncher(Launcher):
    """Starts torchrun's agent here; on several machines it is run on each.

    The agent serves its store on every interface, as torchrun always does; the workers' own sockets
    are on loopback where they share a machine.
    """

    def render(self, spec: JobSpec) -> Rendered:
        """Render torchrun's command."""
        if spec.nodes == 1:
            meeting = ["--standalone"]
        else:
            meeting = [
                f"--nnodes={spec.nodes}",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={spec.rdzv_endpoint}",
                f"--rdzv-id={spec.rdzv_id}",
                *([] if spec.node_rank is None else [f"--rdzv-conf=is_host={int(spec.node_rank == 0)}"]),
            ]
        agent = [spec.python, "-m", "torch.distributed.run", *meeting, f"--nproc-per-node={spec.nproc}"]
        process = RenderedProcess(
            title=f"torchrun, {spec.nproc} processes",
            argv=(*agent, *spec.command),
            env={**spec.thread_variables(), **spec.env},
        )
        return Rendered(spec=spec, processes=(process,))

    def submit(self, rendered: Rendered) -> SupervisedJob:
        """Start the agent. If this launcher dies, SIGTERM lets the agent end its workers."""
        return SupervisedJob(rendered, death_signal=signal.SIGTERM)
