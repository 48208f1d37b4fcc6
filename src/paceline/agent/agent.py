"""The agent: starts a job's workers on this machine, never kills survivors, replaces who is lost. No torch.

One thread and one selector: workers' channels and pidfds, the zygote, the store host, and an eventfd for
signals. Who belongs to which view is decided by :class:`~paceline.membership.coordinator.Coordinator`;
here its actions are carried out, and what happens is reported to it.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from types import FrameType

from paceline.agent.control_socket import ControlSocket, Status, WorkerStatus
from paceline.agent.forking import STORE_HOST, Exited, Forked, NotForked, StoreHost, Zygote
from paceline.agent.policy import Budget, describe_code, meaning
from paceline.agent.workers import Worker
from paceline.data.ledger import generations
from paceline.distributed.process import STOP_SIGNALS, read_failure, signals_handled
from paceline.errors import ConfigError, LaunchError
from paceline.launchers.base import Rendered
from paceline.launchers.failures import Exit, conclude
from paceline.membership.channel import Beat, Broken, ChannelError, Joined, Leave, Place, Reform, Waits
from paceline.membership.coordinator import Action, AskToReform, Break, Coordinator, Form, Retire, Start, View

_REPORT_S = 1.0  # how long the zygote may take to report an end that its pidfd shows already
_LEAVE_S = 60.0  # how long a member may take to leave a broken view: a step's computation, at most
_ZYGOTES = 1  # how many may end one after another without having forked anything


class Agent:
    """A job whose workers are replaced when they die; see :class:`~paceline.launchers.base.JobHandle`.

    Args:
        rendered: one process, the zygote; the last word of its spec's command is the job's file.
    """

    def __init__(self, rendered: Rendered) -> None:
        spec = rendered.spec
        assert spec.directory is not None
        if shutil.which(spec.python) is None:
            raise LaunchError(f"{spec.python} is no program that can be run.")
        self._spec, self._directory, self._job = spec, spec.directory, spec.command[-1]
        self._rendered = rendered.processes[0]
        self._heartbeat_s = spec.heartbeat_s
        self._budget = Budget(spec.max_restarts)
        self._workers: dict[int, Worker] = {}
        self._exits: list[Exit] = []  # those that decide the job's exit code
        self._lost: list[Exit] = []  # faults after which nobody was started
        self._verdict = ""
        self._asked: int | None = None  # the first signal
        self._signals: list[int] = []  # not handled yet
        self._stopping = False
        self._deadline: float | None = None
        self._lost_at: float | None = None  # when the view was hit, or left, that is being replaced
        self._why = ""  # what the first member that left the current view said
        self._recoveries = 0
        self._joined: set[int] = set()  # those of the current view's members that hold its state
        self._host: StoreHost | None = None
        self._zygotes = 0  # those that ended without having forked anything
        self._stack = ExitStack()
        try:
            self._directory.create()
            self._lock = self._stack.enter_context(self._directory.locked())
            for old in self._directory.logs.glob("rank-*.error.json"):
                old.unlink(missing_ok=True)
            first = max(generations(self._directory.ledger), default=-1)
            self._coordinator = Coordinator(target=spec.nproc, most=spec.nproc, generation=first)
            self._first = first + 1
            self._selector = self._stack.enter_context(selectors.DefaultSelector())
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._stack.callback(os.close, self._wake)
            self._watch(self._wake, self._on_wake)
            self._start_zygote()
            self._do(self._coordinator.begin())
            self._stack.enter_context(ControlSocket(self._directory, self._selector, self))
        except BaseException as error:
            self._end()
            if isinstance(error, OSError):
                raise LaunchError(f"a process could not be started: {error}.") from error
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """The workers that run."""
        return tuple(w.pid for w in self._workers.values() if w.pid is not None)

    def wait(self) -> int:
        """Watch the job to its end; print one message if it failed; return its exit code."""
        try:
            with signals_handled(STOP_SIGNALS, self._on_signal):
                while self._workers:
                    self._turn()
        finally:
            self._end()
        return conclude(self._directory, self._exits or self._lost, self._asked, self._verdict)

    def cancel(self) -> None:
        """Ask the workers to stop; may be called from another thread than :meth:`wait`."""
        self._deadline = time.monotonic() + self._spec.grace_s
        self._signals.append(signal.SIGTERM)
        os.eventfd_write(self._wake, 1)

    # One turn: what has happened, then what has not happened in time.

    def _turn(self) -> None:
        now = time.monotonic()
        due = [self._deadline or now + 60.0, *(w.deadline for w in self._workers.values())]
        due += [self._host.deadline] if self._host is not None else []
        for key, _ in self._selector.select(max(0.0, min(due) - now)):
            key.data()
        now = time.monotonic()
        for worker in [w for w in self._workers.values() if w.deadline <= now]:
            self._overdue(worker)
        if self._host is not None and now >= self._host.deadline:
            self._end_host()
        if self._deadline is not None and now >= self._deadline:
            self._deadline = None
            self._kill_all()

    def _overdue(self, worker: Worker) -> None:
        if worker.ending:
            self._ended(worker, -signal.SIGKILL)  # the zygote does not say how
        else:
            self._kill(worker, worker.failing)

    def _watch(self, file: int | Zygote | StoreHost | Worker, handler: Callable[[], None]) -> None:
        self._selector.register(file, selectors.EVENT_READ, handler)

    # Signals.

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)
        os.eventfd_write(self._wake, 1)

    def _on_wake(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._signals:
            number = self._signals.pop(0)
            if self._asked is None:
                self._asked = number
                self._stop(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
            else:
                self._kill_all()

    def _stop(self, number: int) -> None:
        """Have all workers finish their step, save, and end; nobody is started any more."""
        self._stopping = True
        self._coordinator.hiring = False
        for worker in self._workers.values():
            worker.signal(number)

    def _kill_all(self) -> None:
        self._stopping = True
        self._coordinator.hiring = False
        for worker in list(self._workers.values()):
            self._kill(worker, "was told to end")

    def _kill(self, worker: Worker, why: str) -> None:
        """Fence a worker: nothing of it acts any more once its end has been noticed."""
        worker.killed = worker.killed or why
        if worker.pid is None:
            self._ended(worker, -signal.SIGKILL)
        else:
            worker.signal(signal.SIGKILL)
            worker.expect("end", _REPORT_S * 10)

    # The zygote and the store host.

    def _start_zygote(self) -> None:
        self._zygote = Zygote(self._rendered, (self._lock,))
        self._watch(self._zygote, partial(self._on_report, self._zygote))

    def _on_report(self, zygote: Zygote) -> None:
        match zygote.report():
            case None:
                self._zygote_ended(zygote)
            case Forked(number, pid, pidfd):
                self._zygotes = 0
                if number != STORE_HOST:
                    self._forked(number, pid, pidfd)
                elif self._host is not None:
                    self._host.runs(pidfd)
                else:
                    os.close(pidfd)
            case NotForked(number, error):
                if number in self._workers:
                    self._workers[number].killed = f"could not be started: {error}"
                    self._ended(self._workers[number], -signal.SIGKILL)
            case Exited(pid, code):
                for worker in [w for w in self._workers.values() if w.pid == pid]:
                    self._ended(worker, code)

    def _zygote_ended(self, zygote: Zygote) -> None:
        self._selector.unregister(zygote)
        code = zygote.end()
        self._zygotes += 1
        if self._zygotes > _ZYGOTES:
            raise LaunchError(
                f"the process that forks workers ended with status {code}, twice; what it printed is above. "
                "Use --recover none to start workers without it."
            )
        self._start_zygote()
        for worker in list(self._workers.values()):
            if worker.pid is None:
                self._zygote.fork(worker.number, worker.slot, self._job, worker.descriptors)
            elif worker.ending:
                self._ended(worker, -signal.SIGKILL)

    def _stores(self) -> StoreHost:
        if self._host is None:
            self._host = StoreHost(self._zygote)
            self._watch(self._host, partial(self._on_host, self._host))
        return self._host

    def _on_host(self, host: StoreHost) -> None:
        if host is self._host and not host.report():
            self._end_host()

    def _end_host(self) -> None:
        """Its clients lose it, ask for another view, and meet in a store of the next host."""
        assert self._host is not None
        self._selector.unregister(self._host)
        self._host.end()
        self._host = None

    # Workers: started, heard, ended.

    def _start(self, number: int, slot: int) -> None:
        self._directory.error_of(slot).unlink(missing_ok=True)
        log = self._directory.log_of(slot) if slot > 0 else None
        worker = self._workers[number] = Worker(number, slot, log)
        self._watch(worker, partial(self._on_message, worker))
        self._zygote.fork(number, slot, self._job, worker.descriptors)

    def _forked(self, number: int, pid: int, pidfd: int) -> None:
        if number not in self._workers:
            # Given up before it was there.
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
            return
        worker = self._workers[number]
        worker.runs(pid, pidfd)
        self._watch(pidfd, partial(self._on_end, worker))
        if self._stopping:
            worker.signal(signal.SIGINT if self._asked == signal.SIGINT else signal.SIGTERM)

    def _on_end(self, worker: Worker) -> None:
        """A pidfd says that its process has ended; how, the zygote says, if it lives."""
        if worker.number not in self._workers:
            return
        assert worker.pidfd is not None
        self._selector.unregister(worker.pidfd)
        worker.ending = True
        worker.expect("be reported", _REPORT_S)

    def _on_message(self, worker: Worker) -> None:
        while worker.number in self._workers:
            try:
                message = worker.channel.receive()
            except BlockingIOError:
                return
            except ChannelError as error:
                self._kill(worker, str(error))
                return
            if message is None:
                # It is on its way out, and beats no more.
                self._selector.unregister(worker)
                worker.beats = False
                worker.expect("end", self._spec.grace_s)
                return
            worker.heard(self._heartbeat_s)
            match message:
                case Beat(step, _, phase):
                    self._budget.stands_at(step)
                    worker.step, worker.phase = step, phase
                case Waits(_, why):
                    if worker.number in self._coordinator.members():
                        self._lost_at = self._lost_at or time.monotonic()
                    self._why = self._why or why
                    worker.left()
                    self._do(self._coordinator.waits(worker.number))
                case Joined(generation):
                    self._has_joined(worker, generation)
                case _:
                    self._kill(worker, f"sent a message that is the agent's: {message}")

    def _has_joined(self, worker: Worker, generation: int) -> None:
        view = self._coordinator.view
        if view is None or view.generation != generation:
            return
        self._joined.add(worker.number)
        if self._joined >= set(view.members) and generation > self._first:
            self._record("joined", generation=generation, step=worker.step, seconds=self._since_loss())
            self._lost_at = None

    def _ended(self, worker: Worker, code: int) -> None:
        self._release(worker)
        now = time.time()
        failure = read_failure(self._directory.error_of(worker.slot))
        what = meaning(
            code,
            failure,
            finished=self._directory.result.is_file(),
            stopping=self._stopping,
            progressed=self._budget.progressed,
        )
        end = Exit(worker.slot, code, now)
        if worker.retired and code == 0:
            self._record("retired", slot=worker.slot, pid=worker.pid, step=worker.step)
            self._do(self._coordinator.exited(worker.number))
            return
        if what == "done":
            self._exits.append(end if code >= 0 else Exit(worker.slot, 0, now))
            self._do(self._coordinator.done(worker.number))
            if not self._coordinator.members():
                # Only spares are left, and nothing is left for them to do.
                self._kill_all()
            return
        if what == "fault" and not (self._stopping and worker.killed):
            self._fault(worker, end)
        else:
            self._exits.append(Exit(worker.slot, code, now, stopped=what != "fatal"))
            if what == "fatal" and not self._stopping:
                self._stop_within_grace()
        self._do(self._coordinator.exited(worker.number))

    def _fault(self, worker: Worker, end: Exit) -> None:
        how = worker.killed or describe_code(end.code)
        # A silent member was lost when it was last heard, not when the agent lost patience.
        lost = worker.heard_at if worker.killed else time.monotonic()
        if worker.number in self._coordinator.members():
            self._lost_at = min(lost, self._lost_at or lost)
        self._recoveries += 1
        self._record("fault", slot=worker.slot, pid=worker.pid, how=how, step=worker.step)
        if not self._coordinator.hiring:
            self._lost.append(end)
        elif not worker.retired and not self._budget.spend():
            self._exits.append(end)
            where = f"at step {self._budget.step}" if self._budget.step >= 0 else "before its first step"
            self._verdict = (
                f"The run is still {where} after {self._budget.most} replacements, the last of which {how}: "
                "it would happen again."
            )
            self._stop_within_grace()

    def _stop_within_grace(self) -> None:
        self._deadline = time.monotonic() + self._spec.grace_s
        self._stop(signal.SIGTERM)

    def _release(self, worker: Worker) -> None:
        del self._workers[worker.number]
        for file in (worker.channel.fileno(), worker.pidfd):
            if file is not None:
                with suppress(KeyError):
                    self._selector.unregister(file)
        worker.close()

    # What other commands ask for; see ControlSocket.

    def status(self) -> Status:
        """Where the job stands."""
        coordinator = self._coordinator
        members = coordinator.members()
        others = [number for number in self._workers if number not in members]
        return Status(
            generation=-1 if coordinator.view is None else coordinator.generation,
            target=coordinator.target,
            whole=coordinator.view is not None and self._joined >= set(coordinator.view.members),
            stopping=self._stopping or not coordinator.hiring,
            recoveries=self._recoveries,
            step=max((self._workers[w].step for w in members), default=-1),
            workers=tuple(
                WorkerStatus(
                    members.index(w.number) if w.number in members else None, w.slot, w.pid, w.step, w.phase
                )
                for w in (self._workers[number] for number in (*members, *others))
            ),
        )

    def scale(self, nproc: int) -> None:
        """Want another number of workers; who joins or leaves does so after a step.

        Raises:
            ConfigError: there cannot be so many, or the job is ending.
        """
        if self._stopping or not self._coordinator.hiring:
            raise ConfigError("the run is ending, so nobody joins or leaves it any more.")
        if nproc < 1:
            raise ConfigError(f"--nproc must be at least 1, but is {nproc}.")
        self._coordinator.most = self._most()
        if nproc > self._coordinator.most:
            raise ConfigError(
                f"{nproc} processes cannot share {self._coordinator.most} shards: each needs at least one. "
                f"Use --nproc {self._coordinator.most} or fewer. "
                "A run's number of shards is fixed when it is created."
            )
        self._record("scale", before=self._coordinator.target, target=nproc, step=self._budget.step)
        self._do(self._coordinator.resize(nproc))

    def gather(self) -> None:
        """Train on only once all that there should be take part."""
        self._record("gather", step=self._budget.step)
        self._do(self._coordinator.gather())

    def _most(self) -> int:
        """How many workers can share the run's shards."""
        if not self._directory.exists():
            return self._coordinator.most
        shards = self._directory.read_manifest().get("config", {}).get("shards")
        return shards if isinstance(shards, int) else self._coordinator.most

    # What the coordinator decides.

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Start(worker, slot):
                    self._start(worker, slot)
                case Form(view):
                    self._form(view)
                case AskToReform(view):
                    self._tell(view.members, Reform(view.generation))
                case Break(generation, members):
                    self._lost_at = self._lost_at or time.monotonic()
                    # Those who wait in the store for one who is gone are freed by its end.
                    self._stores().close(generation)
                    self._tell(members, Broken(generation))
                    for worker in members:
                        if worker in self._workers:
                            self._workers[worker].owes_leave(_LEAVE_S)
                case Retire(worker):
                    self._workers[worker].retired = True
                    self._tell((worker,), Leave())

    def _form(self, view: View) -> None:
        if view.generation > self._first:
            self._stores().close(view.generation - 1)
            self._record(
                "view",
                generation=view.generation,
                members=[self._coordinator.slot(w) for w in view.members],
                world_size=len(view.members),
                why=self._why,
                step=max(self._workers[w].step for w in view.members),
                seconds=self._since_loss(),
            )
        self._joined.clear()
        self._why = ""
        port = self._stores().open(view.generation)
        for rank, number in enumerate(view.members):
            self._workers[number].enters(self._heartbeat_s)
            self._tell((number,), Place(view.generation, rank, len(view.members), port))

    def _tell(self, workers: Sequence[int], message: Place | Reform | Broken | Leave) -> None:
        for number in workers:
            # One that has ended may be in the view still.
            if number in self._workers:
                self._workers[number].channel.send(message)

    def _since_loss(self) -> float | None:
        return None if self._lost_at is None else round(time.monotonic() - self._lost_at, 4)

    def _record(self, kind: str, **fields: object) -> None:
        # A full disk is no reason to give up the workers.
        with suppress(OSError):
            self._directory.append_event(kind, **fields)

    def _end(self) -> None:
        """Leave nothing behind, whatever happened."""
        for worker in list(self._workers.values()):
            worker.signal(signal.SIGKILL)
        if self._host is not None:
            self._host.end()
        if "_zygote" in vars(self):
            self._zygote.end()
        for worker in list(self._workers.values()):
            worker.wait_gone(_REPORT_S * 5)
            worker.close()
        self._workers.clear()
        self._stack.close()
