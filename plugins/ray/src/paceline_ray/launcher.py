"""A job on a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.core.environment import parse_endpoint, variables_of_another_job
from paceline.core.errors import ConfigError
from paceline.core.options import at_least
from paceline.launch.launcher import (
    Command,
    LaunchSpec,
    RenderedJob,
    fixed_nodes,
    option,
    refuse_unsupported,
)
from paceline.launch.node import node_command
from paceline.launch.rank_variables import interface_variables
from paceline.launch.submit import ForegroundLauncher
from paceline.launch.supervisor import RankStarter
from paceline_ray.actor_nodes import PATIENCE_S, ActorCommand, ActorJob, ActorJobController, ActorNode
from paceline_ray.cluster import connect, import_ray
from paceline_ray.node import cluster_command, ray_node_command

# --- A job for the machines of a Ray cluster, as a file ---


@dataclass(frozen=True, kw_only=True)
class RayJob(ActorJob):
    """The job for the nodes of a cluster; the content of ``ray-job.json``.

    Attributes:
        cpus: CPUs of each node to reserve.
        gpus: GPUs of each node to reserve; None: all, in a cluster of the job's own, else none.
        placement: Ray's name for the distance of the nodes.
        own_cluster: no other job uses the cluster.
    """

    cpus: tuple[int, ...]
    gpus: int | None
    placement: str
    own_cluster: bool = False

    @property
    def machines(self) -> int:
        return len(self.cpus)


# --- One machine's part of a job in a Ray cluster: an actor that runs one command. Ray sends only its name
#     here
#
# The actor ends with the process that asked for it, whatever happens to that one.


class NodeActor(ActorCommand):
    """Runs a node's command; its methods run in threads."""

    def address(self) -> tuple[str, str]:
        """Return the name of this node, and its address in the cluster."""
        import ray

        return os.uname().nodename, ray.util.get_node_ip_address()

    def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
        """Start the command; ``env`` is added to this machine's variables."""
        super().start(argv, {**variables_of_another_job(own_variables()), **env}, cwd)


def own_variables() -> dict[str, str]:
    """Return this process's variables, without Ray's number of threads for each actor, which decides bits."""
    variables = dict(os.environ)
    try:
        parents = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return variables
    if not any(entry.startswith(b"OMP_NUM_THREADS=") for entry in parents):
        variables.pop("OMP_NUM_THREADS", None)
    return variables


# --- Starts a job's machines in a Ray cluster, and follows them to their end ---


class RayJobController(ActorJobController):
    """Starts a job's machines, and follows them to their end."""

    def __init__(self, ray: ModuleType, job: RayJob) -> None:
        super().__init__("the Ray cluster", job, job.machines)
        self.errors = (ray.exceptions.RayError, OSError)
        self.transient_errors = (ray.exceptions.ActorUnavailableError,)
        self._ray = ray
        self._variables["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        self._ray_job = job
        self._group: Any = None
        self._bundles: list[dict[str, int]] = []

    def _make_actors(self) -> None:
        self._group = self._reserve()
        for node in self._nodes:
            node.actor = self._actor(node.rank)
        for node in self._nodes:
            node.host, node.address = self._ray.get(node.actor.address.remote())

    def _reserve(self) -> Any:
        """Make a placement group with a bundle for each node; waits until the cluster has room."""
        ray, job = self._ray, self._ray_job
        resources = ray.cluster_resources()
        gpus = job.gpus
        if gpus is None:
            gpus = int(resources.get("GPU", 0)) // job.machines if job.own_cluster else 0
        self._bundles = [{"CPU": cpus, **({"GPU": gpus} if gpus else {})} for cpus in job.cpus]
        group = ray.util.placement_group(self._bundles, strategy=job.placement.upper().replace("-", "_"))
        ready = group.ready()
        if not ray.wait([ready], timeout=PATIENCE_S)[0]:
            has = {name: resources.get(name, 0) for name in ("CPU", "GPU")}
            self._say(
                f"waiting for {job.machines} x {self._bundles[0]} with --placement {job.placement}; the "
                f"whole cluster has {has} on {len(ray.nodes())} machines."
            )
            while not ray.wait([ready], timeout=PATIENCE_S)[0]:
                pass
        return group

    def _actor(self, rank: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = self._bundles[rank]
        strategy = PlacementGroupSchedulingStrategy(placement_group=self._group, placement_group_bundle_index=rank)
        actor = self._ray.remote(NodeActor).options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            max_concurrency=4,
            max_restarts=0,
            scheduling_strategy=strategy,
        )
        return actor.remote()

    def _call(self, node: ActorNode, method: str, *arguments: Any) -> Future[Any]:
        answer: Future[Any] = getattr(node.actor, method).remote(*arguments).future()
        return answer

    def _restart(self, node: ActorNode) -> Future[Any]:
        self._ray.kill(node.actor)
        node.actor = self._actor(node.rank)
        return self._start(node)

    def _release(self) -> None:
        ray = self._ray
        with suppress(ray.exceptions.RayError):
            for node in self._nodes:
                if node.actor is not None:
                    ray.kill(node.actor)
            if self._group is not None:
                ray.util.remove_placement_group(self._group)


def run_job(file: Path) -> int:
    """Run the job of a file in the cluster of RAY_ADDRESS, and return its exit code; Ray ends its actors with it."""
    job = RayJob.read(file)
    # It tells why each attempt to connect has failed, and would try twenty times.
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "5")
    ray = import_ray()
    connect(ray, os.environ["RAY_ADDRESS"])
    try:
        return RayJobController(ray, job).run()
    finally:
        ray.shutdown()


# --- ``--on ray``: a job in an existing Ray cluster, or in one of its own on this machine ---


PLACEMENTS = ("spread", "pack", "strict-spread", "strict-pack")
JOB_FILE = "ray-job.json"


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """Where in Ray a job runs."""

    address: str | None = option(
        "HOST:PORT of a Ray cluster. Default: RAY_ADDRESS; without it, a new cluster on this machine."
    )
    placement: str = option("How to place processes on machines: spread, pack, strict-spread or strict-pack.", "spread")
    machine_restarts: int = option("Number of lost nodes of a task to replace.", 3)


class Ray(ForegroundLauncher):
    """Programs that use Ray, and jobs whose machines Ray finds."""

    name = "ray"
    rank_launchers = ("ray", "torchrun", "spawn", "agent")
    env_styles = ("none", "torch", "tensorflow")
    extra = "ray"
    starter = RankStarter(name="Ray's driver", says_why=True)

    def render(self, spec: LaunchSpec, options: RayOptions | None = None) -> RenderedJob:
        """Render one command; it starts a cluster first where none is named."""
        options = options or RayOptions()
        refuse_unsupported(spec, self.name, walltime=True)
        address = options.address or os.environ.get("RAY_ADDRESS")
        if address not in (None, "auto"):
            parse_endpoint(address.removeprefix("ray://"), "--address")
        if options.placement not in PLACEMENTS:
            raise ConfigError(f"--placement must be one of {', '.join(PLACEMENTS)}, but is {options.placement!r}.")
        at_least("machine_restarts", options.machine_restarts, 0)
        if spec.rank_launcher == "ray":
            return self._program(spec, options, address)
        return self._machines(spec, options, address)

    def _program(self, spec: LaunchSpec, options: RayOptions, address: str | None) -> RenderedJob:
        """Render a program that starts once, here, and gives the cluster its work by itself."""
        if spec.nodes != (1, 1):
            raise ConfigError(
                f"--nodes {spec.nodes[0]}: a program that uses Ray starts once. Use --rank-launcher torchrun to "
                "start its processes on several nodes."
            )
        if spec.preflight and address is not None:
            raise ConfigError(
                f"--preflight: the nodes of the Ray cluster at {address} that the program will use are unknown "
                "before it starts. Leave it out; or use --rank-launcher torchrun, which starts its processes."
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
        return RenderedJob(spec=spec, options=options, commands=(command,))

    def _machines(self, spec: LaunchSpec, options: RayOptions, address: str | None) -> RenderedJob:
        nodes = fixed_nodes(spec, "--on ray", "paceline join RUN adds others to a run.")
        counts = [spec.processes_on(rank) for rank in range(nodes)]
        cpus = tuple(count * (spec.cpus_per_task or 1) for count in counts)
        job = RayJob(
            command=node_command(spec),
            cpus=cpus,
            gpus=spec.gpus_per_node,
            placement=options.placement,
            workdir=str(spec.workdir),
            env=spec.env,
            recovers=spec.rank_launcher == "agent",
            replacements=options.machine_restarts,
            own_cluster=address is None,
        )
        argv: tuple[str, ...]
        argv = (spec.python, "-P", "-m", "paceline_ray.job", __name__, str(spec.directory / JOB_FILE))
        if address is None:
            gpus = None if spec.gpus_per_node is None else nodes * spec.gpus_per_node
            argv = cluster_command(spec, argv, cpus=sum(cpus), gpus=gpus)
            command = Command(title="a Ray cluster on this machine, and the job in it", argv=argv)
        else:
            command = Command(
                title=f"the job, in the Ray cluster at {address}", argv=argv, env={"RAY_ADDRESS": address}
            )
        return RenderedJob(spec=spec, options=options, files={JOB_FILE: job.text}, commands=(command,))
