"""``--on ray``: a job in a Ray cluster that is there, or in one of its own on this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass

from paceline.distributed.environment import parse_endpoint
from paceline.errors import ConfigError
from paceline.launchers.attached import AttachedJob, AttachedLauncher, start_commands
from paceline.launchers.base import Command, JobHandle, JobSpec, Rendered, option
from paceline.launchers.local.supervision import Starter
from paceline.launchers.node import interface_variables, node_command
from paceline.launchers.ray.node import cluster_command, ray_node_command
from paceline.launchers.ray.ray_job import RayJob
from paceline.launchers.refusals import refuse_restarts, refuse_walltime

PLACEMENTS = ("spread", "pack", "strict-spread", "strict-pack")
JOB_FILE = "ray-job.json"


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """Where in Ray a job runs."""

    address: str | None = option(
        "HOST:PORT of a Ray cluster. Default: RAY_ADDRESS; without it, a cluster of the job's own, here."
    )
    placement: str = option("How machines are chosen: spread, pack, strict-spread or strict-pack.", "spread")
    machine_restarts: int = option("How many lost machines of a task are replaced.", 3)


class Ray(AttachedLauncher):
    """Programs that use Ray, and jobs whose machines Ray finds."""

    name = "ray"
    inners = ("ray", "torchrun", "spawn", "agent")
    contracts = ("none", "torch", "tensorflow")
    extra = "ray"

    def render(self, spec: JobSpec, options: RayOptions | None = None) -> Rendered:
        """Render one command; it starts a cluster first where none is named."""
        options = options or RayOptions()
        refuse_walltime(spec, self.name)
        refuse_restarts(spec, self.name)
        address = options.address or os.environ.get("RAY_ADDRESS")
        if address not in (None, "auto"):
            parse_endpoint(address.removeprefix("ray://"), "--address")
        if options.placement not in PLACEMENTS:
            raise ConfigError(
                f"--placement must be one of {', '.join(PLACEMENTS)}, but is {options.placement!r}."
            )
        if options.machine_restarts < 0:
            raise ConfigError(f"--machine-restarts must be 0 or more, but is {options.machine_restarts}.")
        if spec.inner == "ray":
            return self._program(spec, options, address)
        return self._machines(spec, options, address)

    def submit(self, rendered: Rendered) -> JobHandle:
        """Start the command."""
        starter = Starter(name="Ray's driver", says_why=True)
        return AttachedJob(start_commands(rendered, starter), rendered.spec.directory)

    def _program(self, spec: JobSpec, options: RayOptions, address: str | None) -> Rendered:
        """A program that is started once, here, and gives the cluster its work by itself."""
        if spec.nodes != (1, 1):
            raise ConfigError(
                f"--nodes {spec.nodes[0]}: a program that uses Ray is started once. Say --inner torchrun to "
                "have its processes started on so many machines."
            )
        if spec.preflight and address is not None:
            raise ConfigError(
                f"--preflight: which machines of the Ray cluster at {address} the program is going to use, "
                "nobody knows before it. Leave it out; or say --inner torchrun to have its processes started."
            )
        argv = ray_node_command(spec)
        env = {**interface_variables(spec.interface), **spec.env}
        if spec.threads is not None:
            env["OMP_NUM_THREADS"] = str(spec.threads)
        if address is None:
            title = "a Ray cluster on this machine, and the program in it"
        else:
            title, argv = f"the program, with the Ray cluster at {address}", spec.command
            env["RAY_ADDRESS"] = address
        command = Command(title=title, argv=argv, env=env)
        return Rendered(spec=spec, options=options, commands=(command,))

    def _machines(self, spec: JobSpec, options: RayOptions, address: str | None) -> Rendered:
        """A job whose machines are actors."""
        least, most = spec.nodes
        if least != most:
            raise ConfigError(
                f"--nodes {least}:{most}: --on ray reserves a fixed number of machines. "
                "paceline join RUN adds others to a run."
            )
        counts = [spec.processes_on(rank) for rank in range(least)]
        cpus = tuple(count * (spec.cpus_per_task or 1) for count in counts)
        job = RayJob(
            command=node_command(spec),
            cpus=cpus,
            gpus=spec.gpus_per_node,
            placement=options.placement,
            workdir=str(spec.workdir),
            env=spec.env,
            recovers=spec.inner == "agent",
            replacements=options.machine_restarts,
            own_cluster=address is None,
        )
        argv: tuple[str, ...]
        argv = (spec.python, "-m", "paceline.launchers.ray.job", str(spec.directory / JOB_FILE))
        if address is None:
            gpus = None if spec.gpus_per_node is None else least * spec.gpus_per_node
            argv = cluster_command(spec, argv, cpus=sum(cpus), gpus=gpus)
            command = Command(title="a Ray cluster on this machine, and the job in it", argv=argv)
        else:
            command = Command(
                title=f"the job, in the Ray cluster at {address}", argv=argv, env={"RAY_ADDRESS": address}
            )
        return Rendered(spec=spec, options=options, files={JOB_FILE: job.text}, commands=(command,))
