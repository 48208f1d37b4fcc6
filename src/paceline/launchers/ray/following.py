"""Starts a job's machines in a Ray cluster, and follows them to their end."""

from __future__ import annotations

import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType, ModuleType
from typing import Any

from paceline.distributed.environment import JOB_ID
from paceline.distributed.machine_place import HOSTS, NODE_RANK, NODES
from paceline.distributed.process import STOP_SIGNALS, StopRequests, passed_on, signals_handled
from paceline.distributed.sockets import job_port
from paceline.errors import LaunchError
from paceline.launchers.local.failures import STOPPED
from paceline.launchers.ray.machine import Machine
from paceline.launchers.ray.ray_job import RayJob

_TURN_S = 0.5
_READ_S = 10.0
_GRACE_S = 10.0
_PATIENCE_S = 10.0


class _Place:
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


class Following:
    """Starts a job's machines, and follows them to their end."""

    def __init__(self, ray: ModuleType, job: RayJob) -> None:
        self._ray = ray
        self._job = job
        self._places = [_Place(rank) for rank in range(job.machines)]
        self._ended: list[_Place] = []
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
        with signals_handled(STOP_SIGNALS, self._on_signal):
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
        """A placement group with a bundle for each machine; waits until the cluster has room."""
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
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=rank
        )
        actor = self._ray.remote(Machine).options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            max_concurrency=4,
            max_restarts=0,
            scheduling_strategy=strategy,
        )
        return actor.remote()

    def _job_id(self) -> str:
        """A name of which all machines make the same port, and that is free on the first one."""
        while True:
            job_id = f"ray-{secrets.token_hex(4)}"
            if self._ray.get(self._places[0].actor.can_listen.remote(job_port(job_id))):
                return job_id

    def _start(self, place: _Place) -> Any:
        """Start a machine's command; the agent of one that replaces another finds the others at work."""
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
            self._send(passed_on(self._asked))
        waiting = {place.pending: place for place in self._places if place.pending is not None}
        if not self._ray.wait(list(waiting), timeout=_TURN_S)[0]:
            return
        ready, _ = self._ray.wait(list(waiting), num_returns=len(waiting), timeout=0)
        for answer in ready:
            self._take(waiting[answer])

    def _overdue(self) -> bool:
        """Whether those that are to end because one has failed have had their time."""
        return self._deadline is not None and time.monotonic() > self._deadline

    def _take(self, place: _Place) -> None:
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

    def _show(self, place: _Place, lines: Sequence[tuple[int, bytes]]) -> None:
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

    def _end(self, place: _Place, code: int) -> None:
        if code == 0 or code in STOPPED or self._stopping:
            place.code, place.pending = code, None
            self._ended.append(place)
            return
        if self._job.machines > 1:
            self._say(f"machine {place.rank} ({place.host}) ended with exit code {code}.")
        self._fail(place, code)

    def _fail(self, place: _Place, code: int) -> None:
        place.code, place.pending = code, None
        self._ended.append(place)
        if not self._job.recovers and not self._stopping:
            self._deadline = time.monotonic() + _GRACE_S
            self._send(signal.SIGTERM)

    def _lose(self, place: _Place, why: str) -> None:
        """A machine is gone: let another one take its place, where the job can take one in."""
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
        then = "it goes on from its last checkpoint" if alone else "another joins the others, which go on"
        self._say(f"{where} As soon as the cluster has room, {then}.")
        place.started, place.replaced = alone, True
        place.actor = self._actor(place.rank)
        self._start(place)

    def _why_not_replaced(self, place: _Place) -> str:
        if not self._job.recovers:
            return "Only tasks under --inner agent recover from that; this job ends."
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
        """The first failure's exit code; of a job that outlives machines, that of the last one to end."""
        codes = [place.code or 0 for place in self._ended]
        own = [place.code or 0 for place in self._ended if not place.replaced]
        if self._asked is not None and any(codes):
            stopped = [code for code in codes if code in STOPPED]
            return stopped[0] if stopped else 128 + self._asked
        code = (own or codes)[-1] if self._job.recovers else next((code for code in codes if code), 0)
        return code if code >= 0 else 128 - code


def _reason(error: BaseException) -> str:
    """The first sentence of the last line: Ray goes on with what may have been the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__).partition(". ")[0].rstrip(".")
