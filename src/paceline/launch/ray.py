"""A job on a Ray cluster."""

from __future__ import annotations

import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import IO, Any

import psutil

from paceline.core.environment import HOSTS, JOB_ID, NODE_RANK, NODES, parse_endpoint
from paceline.core.errors import ConfigError, LaunchError
from paceline.core.parent_death import kill_with_parent_command
from paceline.core.signals import STOP_SIGNALS, StopRequests, forwarded_signal, handle_signals
from paceline.core.sockets import bound_socket, job_port
from paceline.launch.launcher import (
    Command,
    JobHandle,
    LaunchSpec,
    RenderedJob,
    option,
    refuse_restarts,
    refuse_walltime,
)
from paceline.launch.node import node_command
from paceline.launch.rank import interface_variables
from paceline.launch.ray_node import cluster_command, ray_node_command
from paceline.launch.supervisor import ForegroundJob, ForegroundLauncher, RankStarter, SupervisedJob
from paceline.runs.failures import STOPPED

# --- A job for the machines of a Ray cluster, as a file ---


@dataclass(frozen=True, kw_only=True)
class RayJob:
    """The job for the nodes of a cluster; the content of ``ray-job.json``.

    Attributes:
        command: the command of each node.
        cpus: CPUs of each node to reserve.
        gpus: GPUs of each node to reserve; None: all, in a cluster of the job's own, else none.
        placement: Ray's name for the distance of the nodes.
        workdir: the command's working directory.
        env: variables for it.
        recovers: the rest of the job continues when a node is lost, and accepts a replacement.
        replacements: number of lost nodes to replace.
        own_cluster: no other job uses the cluster.
    """

    command: tuple[str, ...]
    cpus: tuple[int, ...]
    gpus: int | None
    placement: str
    workdir: str
    env: Mapping[str, str]
    recovers: bool = False
    replacements: int = 0
    own_cluster: bool = False

    @property
    def machines(self) -> int:
        """How many there are."""
        return len(self.cpus)

    @property
    def text(self) -> str:
        """The job as JSON, a line for each attribute."""
        lines = (f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in asdict(self).items())
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def read(cls, path: Path) -> RayJob:
        """Read a job that :attr:`text` has described."""
        values = json.loads(path.read_text(encoding="utf-8"))
        values |= {name: tuple(values[name]) for name in ("command", "cpus")}
        return cls(**values)


# --- One machine's part of a job in a Ray cluster: an actor that runs one command. Ray sends only its name
#     here
#
# The actor ends with the process that asked for it, whatever happens to that one; and the command is killed
# by the kernel when its actor ends.


_LINES_KEPT = 10_000
_LINES_AT_ONCE = 1_000


class NodeActor:
    """Runs a command, and keeps what it prints until that is fetched; its methods run in threads."""

    def __init__(self) -> None:
        # Bounded: a command that prints faster than the terminal shows waits, as at any pipe.
        self._lines: queue.Queue[tuple[int, bytes] | None] = queue.Queue(_LINES_KEPT)
        self._popen: subprocess.Popen[bytes] | None = None
        self._code: int | None = None

    def address(self) -> tuple[str, str]:
        """Return the name of this node, and its address in the cluster."""
        import ray

        return os.uname().nodename, ray.util.get_node_ip_address()

    def can_listen(self, port: int) -> bool:
        """Return whether no process listens at this port."""
        import ray

        try:
            bound_socket(ray.util.get_node_ip_address(), port).close()
        except OSError:
            return False
        return True

    def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
        """Start the command; ``env`` is added to this machine's variables.

        Raises:
            OSError: it cannot be started.
        """
        started: Future[None] = Future()
        threading.Thread(target=self._run, args=(argv, env, cwd, started), daemon=True).start()
        started.result()

    def read(self, timeout_s: float) -> tuple[list[tuple[int, bytes]], int | None]:
        """Return the output since the last call: (1 or 2, line) for stdout or stderr.

        Args:
            timeout_s: how long to wait for a line.

        Returns:
            The lines, and the exit code after the last of them; minus the signal's number where one killed
            the command.
        """
        lines = []
        with suppress(queue.Empty):
            line = self._lines.get(timeout=timeout_s)
            while line is not None:
                lines.append(line)
                if len(lines) == _LINES_AT_ONCE:
                    return lines, None
                line = self._lines.get_nowait()
            return lines, self._code
        return lines, None

    def send_signal(self, number: int) -> None:
        """Signal the command, and not its children."""
        if self._popen is not None:
            self._popen.send_signal(number)

    def end(self) -> None:
        """Kill the command and all that it has started."""
        if self._popen is None:
            return
        with suppress(psutil.NoSuchProcess):
            tree = psutil.Process(self._popen.pid).children(recursive=True)
            self._popen.kill()
            for process in tree:
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    def _run(self, argv: Sequence[str], env: Mapping[str, str], cwd: str, started: Future[None]) -> None:
        # This thread lives as long as the command: when the thread that started it ends, the kernel ends the
        # command too.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        try:
            popen = subprocess.Popen(
                kill_with_parent_command(argv),
                env={**own_variables(), **env},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            started.set_exception(error)
            return
        self._popen = popen
        started.set_result(None)
        readers = [
            threading.Thread(target=self._keep, args=(number, pipe), daemon=True)
            for number, pipe in ((1, popen.stdout), (2, popen.stderr))
        ]
        for reader in readers:
            reader.start()
        # Not reaped yet, a dead leader still holds its group's number: no stranger can be hit.
        os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOWAIT)
        with suppress(ProcessLookupError):
            os.killpg(popen.pid, signal.SIGKILL)
        for reader in readers:
            reader.join()
        self._code = popen.wait()
        self._lines.put(None)

    def _keep(self, number: int, pipe: IO[bytes] | None) -> None:
        assert pipe is not None
        with pipe:
            for line in pipe:
                self._lines.put((number, line))


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


_TURN_S = 0.5
_READ_S = 10.0
_GRACE_S = 10.0
_PATIENCE_S = 10.0


class _RankPlace:
    """A machine's place in the job, and what fills it now."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.host = ""
        self.address = ""
        self.actor: Any = None
        self.pending: Any = None  # what was asked of the actor last: to start, then to read
        self.started = False
        self.replaced = False
        self.code: int | None = None

    @property
    def running(self) -> bool:
        """Whether its command was started, and has not ended."""
        return self.started and self.code is None


class RayJobController:
    """Starts a job's machines, and follows them to their end."""

    def __init__(self, ray: ModuleType, job: RayJob) -> None:
        self._ray = ray
        self._job = job
        self._places = [_RankPlace(rank) for rank in range(job.machines)]
        self._ended: list[_RankPlace] = []
        self._group: Any = None
        self._bundles: list[dict[str, int]] = []
        self._variables: Mapping[str, str] = {}
        self._lost = 0
        self._requests = StopRequests()
        self._asked: int | None = None
        self._told = False
        self._hurried = False
        self._begun = False
        self._deadline: float | None = None

    def run(self) -> int:
        """Follow the job to its end; nothing of it is left then."""
        with handle_signals(STOP_SIGNALS, self._on_signal):
            try:
                self._begin()
                while any(place.running for place in self._places) and not self._overdue():
                    self._turn()
            finally:
                self._end_all()
        return self._conclude()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        match self._requests.hear(number):
            case "first":
                self._asked = number
                if not self._begun:
                    raise SystemExit(128 + number)
            case "end":
                self._hurried = True

    # Begin

    def _begin(self) -> None:
        ray, job = self._ray, self._job
        self._group = self._reserve()
        for place in self._places:
            place.actor = self._actor(place.rank)
        try:
            for place in self._places:
                place.host, place.address = ray.get(place.actor.address.remote())
            hosts = ",".join(place.address for place in self._places)
            job_id = self._job_id()
            self._begun = True
            self._variables = {NODES: str(job.machines), HOSTS: hosts, JOB_ID: job_id}
            for place in self._places:
                ray.get(self._start(place))
                place.started = True
        except (ray.exceptions.RayError, OSError) as error:
            raise LaunchError(
                f"a machine of the Ray cluster could not start its part: {_reason(error)}. Paceline must "
                f"be installed there as it is here, and {job.workdir} must exist."
            ) from error

    def _reserve(self) -> Any:
        """Make a placement group with a bundle for each node; waits until the cluster has room."""
        ray, job = self._ray, self._job
        resources = ray.cluster_resources()
        gpus = job.gpus
        if gpus is None:
            gpus = int(resources.get("GPU", 0)) // job.machines if job.own_cluster else 0
        self._bundles = [{"CPU": cpus, **({"GPU": gpus} if gpus else {})} for cpus in job.cpus]
        group = ray.util.placement_group(self._bundles, strategy=job.placement.upper().replace("-", "_"))
        ready = group.ready()
        if not ray.wait([ready], timeout=_PATIENCE_S)[0]:
            has = {name: resources.get(name, 0) for name in ("CPU", "GPU")}
            self._say(
                f"waiting for {job.machines} x {self._bundles[0]} with --placement {job.placement}; the "
                f"whole cluster has {has} on {len(ray.nodes())} machines."
            )
            while not ray.wait([ready], timeout=_PATIENCE_S)[0]:
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

    def _job_id(self) -> str:
        """Return a name from which all nodes derive the same port, which is free on the first one."""
        while True:
            job_id = f"ray-{secrets.token_hex(4)}"
            if self._ray.get(self._places[0].actor.can_listen.remote(job_port(job_id))):
                return job_id

    def _start(self, place: _RankPlace) -> Any:
        """Start a node's command; the agent of a replacement finds the active ones."""
        cluster = self._ray.get_runtime_context().gcs_address
        env = {**self._job.env, "RAY_ADDRESS": cluster, NODE_RANK: str(place.rank), **self._variables}
        place.pending = place.actor.start.remote(self._job.command, env, self._job.workdir)
        return place.pending

    # Follow

    def _turn(self) -> None:
        """Pass on what signals ask for, then take what machines have to say, if any has."""
        if self._hurried:
            raise SystemExit(128 + (self._asked or signal.SIGINT))
        if self._asked is not None and not self._told:
            self._told = True
            self._send(forwarded_signal(self._asked))
        waiting = {place.pending: place for place in self._places if place.pending is not None}
        if not self._ray.wait(list(waiting), timeout=_TURN_S)[0]:
            return
        ready, _ = self._ray.wait(list(waiting), num_returns=len(waiting), timeout=0)
        for answer in ready:
            self._take(waiting[answer])

    def _overdue(self) -> bool:
        """Return whether the processes that must end after a failure are over their time limit."""
        return self._deadline is not None and time.monotonic() > self._deadline

    def _take(self, place: _RankPlace) -> None:
        try:
            said = self._ray.get(place.pending)
        except self._ray.exceptions.ActorUnavailableError:
            said = [], None  # a link that broke; the machine may be back
        except (self._ray.exceptions.RayError, OSError) as error:
            self._lose(place, _reason(error))
            return
        if said is None:
            place.started = True
            said = [], None
        lines, code = said
        self._show(place, lines)
        if code is None:
            place.pending = place.actor.read.remote(_READ_S)
        elif code < 0 and self._job.recovers and not self._stopping:
            self._lose(place, f"its agent was killed by {signal.Signals(-code).name}")
        else:
            self._end(place, code)

    def _show(self, place: _RankPlace, lines: Sequence[tuple[int, bytes]]) -> None:
        prefix = f"machine {place.rank} | ".encode() if self._job.machines > 1 else b""
        for number, line in lines:
            stream = sys.stdout if number == 1 else sys.stderr
            stream.buffer.write(prefix + line)
        if lines:
            sys.stdout.flush()
            sys.stderr.flush()

    @property
    def _stopping(self) -> bool:
        return self._asked is not None or self._deadline is not None

    def _end(self, place: _RankPlace, code: int) -> None:
        if code == 0 or code in STOPPED or self._stopping:
            place.code, place.pending = code, None
            self._ended.append(place)
            return
        if self._job.machines > 1:
            self._say(f"machine {place.rank} ({place.host}) ended with exit code {code}.")
        self._fail(place, code)

    def _fail(self, place: _RankPlace, code: int) -> None:
        place.code, place.pending = code, None
        self._ended.append(place)
        if not self._job.recovers and not self._stopping:
            self._deadline = time.monotonic() + _GRACE_S
            self._send(signal.SIGTERM)

    def _lose(self, place: _RankPlace, why: str) -> None:
        """Replace a lost node, if the job can accept another one."""
        where = f"machine {place.rank} ({place.host or 'not placed yet'}) was lost: {why}."
        if self._job.recovers and any(other.code == 0 for other in self._ended):
            place.replaced, place.code, place.pending = True, 0, None  # the run had ended before
            return
        why_not = self._why_not_replaced(place)
        if self._stopping or why_not:
            if not self._stopping:
                self._say(f"{where} {why_not}")
            self._fail(place, 1)
            return
        self._lost += 1
        alone = self._job.machines == 1
        self._ray.kill(place.actor)
        then = "it continues from its last checkpoint" if alone else "another joins the others, which continue"
        self._say(f"{where} As soon as the cluster has room, {then}.")
        place.started, place.replaced = alone, True
        place.actor = self._actor(place.rank)
        self._start(place)

    def _why_not_replaced(self, place: _RankPlace) -> str:
        if not self._job.recovers:
            return "Only tasks under --rank-launcher agent recover from that; this job ends."
        if self._lost >= self._job.replacements:
            return f"No more than --machine-restarts {self._job.replacements} are replaced."
        others = any(other.running for other in self._places if other is not place)
        return "" if others or self._job.machines == 1 else "No other is left; continue with paceline resume."

    def _say(self, text: str) -> None:
        print(f"paceline: {text}", file=sys.stderr, flush=True)

    def _send(self, number: int) -> None:
        for place in self._places:
            if place.running:
                place.actor.send_signal.remote(int(number))

    # End

    def _end_all(self) -> None:
        """Kill what runs, remove the actors, and give the machines back."""
        ray = self._ray
        with suppress(ray.exceptions.RayError):
            actors = [place.actor for place in self._places if place.actor is not None]
            running = [p.actor.end.remote() for p in self._places if p.running]
            if running:
                ray.wait(running, num_returns=len(running), timeout=_PATIENCE_S)
            for actor in actors:
                ray.kill(actor)
            if self._group is not None:
                ray.util.remove_placement_group(self._group)

    def _conclude(self) -> int:
        """Return the first failure's exit code; for a job that outlives nodes, that of the last one to end."""
        codes = [place.code or 0 for place in self._ended]
        own = [place.code or 0 for place in self._ended if not place.replaced]
        if self._asked is not None and any(codes):
            stopped = [code for code in codes if code in STOPPED]
            return stopped[0] if stopped else 128 + self._asked
        code = (own or codes)[-1] if self._job.recovers else next((code for code in codes if code), 0)
        return code if code >= 0 else 128 - code


def _reason(error: BaseException) -> str:
    """Return the first sentence of the last line: Ray continues with possible causes."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__).partition(". ")[0].rstrip(".")


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

    def render(self, spec: LaunchSpec, options: RayOptions | None = None) -> RenderedJob:
        """Render one command; it starts a cluster first where none is named."""
        options = options or RayOptions()
        refuse_walltime(spec, self.name)
        refuse_restarts(spec, self.name)
        address = options.address or os.environ.get("RAY_ADDRESS")
        if address not in (None, "auto"):
            parse_endpoint(address.removeprefix("ray://"), "--address")
        if options.placement not in PLACEMENTS:
            raise ConfigError(f"--placement must be one of {', '.join(PLACEMENTS)}, but is {options.placement!r}.")
        if options.machine_restarts < 0:
            raise ConfigError(f"--machine-restarts must be 0 or more, but is {options.machine_restarts}.")
        if spec.rank_launcher == "ray":
            return self._program(spec, options, address)
        return self._machines(spec, options, address)

    def submit(self, rendered: RenderedJob) -> JobHandle:
        """Start the command."""
        starter = RankStarter(name="Ray's driver", says_why=True)
        return ForegroundJob(SupervisedJob(rendered.commands, starter=starter), rendered.spec.directory)

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
        """Render a job whose nodes are actors."""
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
            recovers=spec.rank_launcher == "agent",
            replacements=options.machine_restarts,
            own_cluster=address is None,
        )
        argv: tuple[str, ...]
        argv = (spec.python, "-m", "paceline.launch.ray_job", str(spec.directory / JOB_FILE))
        if address is None:
            gpus = None if spec.gpus_per_node is None else least * spec.gpus_per_node
            argv = cluster_command(spec, argv, cpus=sum(cpus), gpus=gpus)
            command = Command(title="a Ray cluster on this machine, and the job in it", argv=argv)
        else:
            command = Command(
                title=f"the job, in the Ray cluster at {address}", argv=argv, env={"RAY_ADDRESS": address}
            )
        return RenderedJob(spec=spec, options=options, files={JOB_FILE: job.text}, commands=(command,))
