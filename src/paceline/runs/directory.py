"""The layout of a run directory, and its lock.

::

    run.toml          resolved options, task and fields, data, versions, numerics fingerprint
    events.jsonl      created, started, checkpoint, stopped, failed, finished; of other nodes: events-HOST-BOOT.jsonl
    code.jsonl        commit, digests of modules, versions of packages; code/: uncommitted changes
    metrics.jsonl     one record every --log-every steps, and one for each evaluation
    ledger/           the samples of each committed step
    initial.safetensors  with --init-from, the initial weights
    checkpoints/      step-00000469-v00000471/ ...
    tensorboard/  profile/
    logs/rank-N.log   the output of each rank
    heartbeats/       the progress of each active rank, every two seconds
    hangs/TIME/       the stacks of all ranks when a step hung
    result.json       written when the run has finished
    agent.json        the address of an active agent
    backup.id         with --backup-to ADDRESS, distinguishes this directory from copies of the run elsewhere
"""

from __future__ import annotations

import errno
import fnmatch
import functools
import heapq
import json
import os
import re
import secrets
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import tomli_w

from paceline.core.errors import CheckpointError, PacelineError, RunDirectoryError, RunInUseError
from paceline.core.files import (
    append_lines,
    check_path,
    open_regular,
    parse_json,
    parse_json_records,
    parse_toml,
    read_document,
    read_json_lines,
    write_atomically,
)
from paceline.core.ownership import BRIEF_S, FileLock, boot_id, describe_holder, is_locked

# --- The files of a run's events: one for each node, since clients of NFS overwrite each other's appended lines ---
#
# The node that creates ``events.jsonl`` appends to it; its first record names it. Another node appends to
# ``events-HOST-BOOT.jsonl``.


_LONGEST_RECORD = 2**16


def event_line(kind: str, **fields: Any) -> str:
    """Return the line of one event of this node, now."""
    return json.dumps({**stamp(), "host": socket.gethostname(), "event": kind, **fields}) + "\n"


def event_files(events: Path) -> list[Path]:
    """Return ``events``, which may not exist, and the files of other nodes."""
    try:
        names = os.listdir(events.parent)
    except OSError:  # which reading ``events`` reports
        names = []
    return [events, *(events.with_name(name) for name in sorted(names) if is_event_file(name) and name != events.name)]


def is_event_file(name: str) -> bool:
    """Return whether a node has its events in a file of this name."""
    return name == "events.jsonl" or fnmatch.fnmatchcase(name, "events-*.jsonl")


@functools.cache
def own_event_file(events: Path) -> Path:
    """Return the file to which this node appends; create ``events`` if there is none.

    Raises:
        OSError: the disk does not answer.
    """
    host, boot = socket.gethostname(), boot_id()
    try:
        # The server decides, also where this node has cached an absence.
        os.close(os.open(events, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        return events
    except FileExistsError:
        pass
    if _writer(events) == (host, boot):
        return events
    return events.with_name(f"{events.stem}-{re.sub(r'[^A-Za-z0-9.-]', '_', host)}-{boot}{events.suffix}")


def _writer(events: Path) -> tuple[str, str] | None:
    """Return the host and the boot of the first record; None if this node cannot see it."""
    try:
        with open_regular(events) as file:
            records = parse_json_records([file.readline(_LONGEST_RECORD).decode(errors="replace")])
    except FileNotFoundError:
        return None
    return (str(records[0].get("host")), str(records[0].get("boot"))) if records else None


# --- The times of events, by a clock that no change of the system time moves ---


_STEP_S = 1.0  # differences below it are the clock's drift


def stamp() -> dict[str, Any]:
    """Return the Unix time, and the seconds since this boot of the machine, which count no sleep."""
    return {"time": round(time.time(), 3), "up": round(time.monotonic(), 3), "boot": boot_id()}


def without_steps(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return events whose times differ by the seconds that passed.

    The last event of each boot keeps its time, since a clock that was wrong is right later; earlier ones are moved by
    each step of that machine's clock. The stamps are removed.
    """
    moved: list[dict[str, Any]] = []
    later: dict[str, tuple[float, float, float]] = {}  # of each boot: Unix time and seconds of the next event, offset
    for event in reversed(events):
        kept = {name: value for name, value in event.items() if name not in ("up", "boot", "host")}
        at, up, boot = event["time"], event.get("up"), event.get("boot")
        if isinstance(up, int | float) and isinstance(boot, str):
            next_at, next_up, offset = later.get(boot, (at, up, 0.0))
            step = (next_at - at) - (next_up - up)
            offset += step if abs(step) > _STEP_S else 0.0
            later[boot] = at, up, offset
            kept["time"] = round(at + offset, 3) if offset else at
        moved.append(kept)
    return moved[::-1]


RUN_FORMAT = 1
"""The format of a run's directory; docs/reference/compatibility.md says when it becomes another."""

OWN_LOOP = "paceline.own_loop:OwnLoop"
"""The task of a script that has a loop of its own, as ``run.toml`` names it."""

_MOST_EVENTS = 1000
_YEAR_9999 = 253_402_300_799  # the last one of a calendar
_unwritten: dict[Path, list[str]] = {}
_queueing, _appending = threading.Lock(), threading.Lock()


class RelativePath:
    """The path of a file or folder in the directory of an object, as its attribute."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, directory: RunDirectory, owner: type[RunDirectory]) -> Path:
        return directory.path / self._name


@dataclass(frozen=True)
class RunDirectory:
    """The paths inside a run directory; constructing one touches nothing."""

    path: Path

    def __post_init__(self) -> None:
        check_path(self.path, "the run directory")

    manifest = RelativePath("run.toml")
    events = RelativePath("events.jsonl")
    """The events of the node that began the run; see :meth:`event_files`."""
    code = RelativePath("code.jsonl")
    metrics = RelativePath("metrics.jsonl")
    ledger = RelativePath("ledger")
    sample_lengths = RelativePath("sample-sizes.npy")
    """The lengths by which micro-batches are balanced, if the task returns any."""
    sample_weights = RelativePath("sample-weights.npy")
    """The weights by which samples are drawn, if the task returns any."""
    checkpoints = RelativePath("checkpoints")
    initial = RelativePath("initial.safetensors")
    """The initial weights of a fine-tuned run."""
    tensorboard = RelativePath("tensorboard")
    media = RelativePath("media")
    """Images, texts and histograms that the user's code logs."""
    profile = RelativePath("profile")
    logs = RelativePath("logs")
    heartbeats = RelativePath("heartbeats")
    hangs = RelativePath("hangs")
    result = RelativePath("result.json")
    agents = RelativePath("agents.json")
    """The addresses of the agents of a job on several nodes."""
    lock = RelativePath("run.lock")
    """The lock of an active run, held by rank 0 or by the leading agent."""
    agent = RelativePath("agent.json")
    """The address of an active run's agent."""

    def event_files(self) -> list[Path]:
        """Return the files of events, one for each node; the first one may not exist."""
        return event_files(self.events)

    def log_of(self, rank: int) -> Path:
        """Return the path of a rank's log."""
        return self.logs / f"rank-{rank}.log"

    def error_of(self, rank: int) -> Path:
        """Return the path at which a rank records its error."""
        return self.logs / f"rank-{rank}.error.json"

    def exists(self) -> bool:
        """Return whether a run was created here.

        Raises:
            OSError: the disk does not answer.
        """
        return _is_regular(self.manifest)

    def has_result(self) -> bool:
        """Return whether the run has finished, as far as the disk shows it."""
        try:
            return _is_regular(self.result)
        except OSError:
            return False

    def wait_for_disk(self) -> None:
        """Wait until the directory of a run that has begun can be read; return after ten minutes in any case."""
        for _ in range(1200):
            try:
                self.exists()
                return
            except OSError:
                time.sleep(0.5)

    def check_resume(self, resume: str) -> None:
        """Check ``--resume`` against the directory.

        Raises:
            RunDirectoryError: a required run is missing, or a forbidden one exists.
        """
        if resume == "must" and not self.exists():
            raise RunDirectoryError(f"--resume must: {self.path} holds no run (no run.toml). Check --run-dir DIR.")
        if resume == "never" and self.exists():
            raise RunDirectoryError(
                f"--resume never: {self.path} holds a run already. Choose another --run-dir DIR, or leave --resume out."
            )

    def create(self) -> None:
        """Make the directory and its parents.

        Raises:
            RunDirectoryError: it cannot be created or written.
        """
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".probe-{secrets.token_hex(4)}"
            probe.write_bytes(b"")
            probe.unlink(missing_ok=True)
            self._require_regular_files()
        except OSError as error:
            raise self.unwritable(error) from error

    def reserve(self) -> bool:
        """Make the directory; return whether it is this call that made it, and no other command at the same time.

        Raises:
            RunDirectoryError: it cannot be created.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir()
        except FileExistsError:
            return False
        except OSError as error:
            raise self.unwritable(error) from error
        return True

    def _require_regular_files(self) -> None:
        """Refuse a directory in which another kind of file has a name of the run's: opening a pipe would hang."""
        files = (self.manifest, self.metrics, self.result, self.lock, self.agent, self.agents)
        names = {path.name for path in (*files, self.sample_lengths, self.sample_weights, self.initial)}
        # Listed, because a network file system takes a moment for each name that is looked up.
        with os.scandir(self.path) as entries:
            found = [entry for entry in entries if entry.name in names or is_event_file(entry.name)]
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.ledger) as entries:
            found += entries
        for entry in found:
            if not entry.is_file():
                raise RunDirectoryError(
                    f"{entry.path} is not a regular file. Remove it, or choose another --run-dir DIR."
                )
            if not os.access(entry.path, os.W_OK, effective_ids=True):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), entry.path)

    def unwritable(self, error: OSError) -> RunDirectoryError:
        """Return the error for a directory that cannot be written."""
        return RunDirectoryError(
            f"cannot write to the run directory {self.path}: {error.strerror}{_other_file(error, self.path)}. "
            "Make it writable and free space, or choose another with --run-dir DIR."
        )

    def read_manifest(self) -> dict[str, Any]:
        """Read ``run.toml``.

        Raises:
            RunDirectoryError: it is missing or damaged.
        """
        try:
            document = parse_toml(read_document(self.manifest))
        except (FileNotFoundError, NotADirectoryError):
            raise RunDirectoryError(f"{self.path} is not a run directory: it has no run.toml.") from None
        except (OSError, ValueError) as error:
            raise RunDirectoryError(
                f"{self.manifest} cannot be read: {error}. Restore it from a copy, or choose another --run-dir DIR."
            ) from error
        if document.get("format", RUN_FORMAT) != RUN_FORMAT:
            raise RunDirectoryError(
                f"{self.manifest} has format {document['format']}, and this version of Paceline reads {RUN_FORMAT}: a "
                "newer one wrote it. Install that version."
            )
        return document

    def continuation(self) -> str:
        """Return what continues the run: a command, or the script whose own loop it is."""
        with suppress(PacelineError):
            task = self.read_manifest().get("task", {})
            if isinstance(task, dict) and task.get("spec") == OWN_LOOP:
                return f"the same start of {task.get('fields', {}).get('script', 'its script')}"
        return f"paceline resume {self.path}"

    def read_complete_manifest(self) -> dict[str, Any]:
        """Read ``run.toml``, and require everything that resuming needs.

        Raises:
            RunDirectoryError: it is missing or incomplete.
        """
        manifest = self.read_manifest()
        task, config = manifest.get("task"), manifest.get("config")
        if not (
            isinstance(manifest.get("id"), str)
            and isinstance(config, dict)
            and isinstance(task, dict)
            and {"spec", "name", "fields"} <= task.keys()
        ):
            raise RunDirectoryError(
                f"{self.manifest} is incomplete: it must contain an id and the tables task and config. "
                "Restore it from a copy, or choose another --run-dir DIR."
            )
        return manifest

    def write_manifest(self, document: Mapping[str, Any]) -> None:
        """Write ``run.toml`` atomically."""
        write_atomically(self.manifest, tomli_w.dumps(_without_none({"format": RUN_FORMAT, **document})).encode())

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write ``result.json`` atomically."""
        write_atomically(self.result, (json.dumps(result, indent=2) + "\n").encode())

    def read_result(self) -> dict[str, Any] | None:
        """Read ``result.json``; None for an unfinished run.

        Raises:
            RunDirectoryError: it is damaged.
        """
        try:
            result = parse_json(read_document(self.result))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            problem = str(error)
        else:
            if isinstance(result, dict):
                return result
            problem = "it is not an object"
        raise RunDirectoryError(
            f"{self.result} is damaged: {problem}. Remove it, then resume the run to write it again."
        )

    def append_event(self, kind: str, **fields: Any) -> None:
        """Append one record to this node's file of events; queue records while the disk fails."""
        self.queue_event(kind, **fields)
        self.append_queued_events()

    def queue_event(self, kind: str, **fields: Any) -> None:
        """Queue a record, which gets the time of now, for :meth:`append_queued_events`; this touches no disk."""
        with _queueing:
            waiting = _unwritten.setdefault(self.events.absolute(), [])
            waiting.append(event_line(kind, **fields))
            del waiting[:-_MOST_EVENTS]

    @property
    def has_queued_events(self) -> bool:
        """Whether a record was not written yet."""
        return bool(_unwritten.get(self.events.absolute()))

    def append_queued_events(self) -> None:
        """Append the records that the disk has not taken yet, if it takes them now."""
        events = self.events.absolute()
        with _appending:
            with _queueing:
                lines = _unwritten.pop(events, [])
            try:
                if lines:
                    append_lines(own_event_file(events), "".join(lines).encode())
            except OSError:
                with _queueing:
                    _unwritten[events] = [*lines, *_unwritten.get(events, [])]

    def read_events(self) -> list[dict[str, Any]]:
        """Return the records of all nodes that are not damaged: a run must not stop for the others.

        Those of a node are in the order in which it wrote them, and their times differ by the seconds that passed,
        also where the clock was set in between. Those of several nodes are in the order of their times.

        Raises:
            RunDirectoryError: they cannot be read.
        """
        return list(heapq.merge(*map(_read_events, self.event_files()), key=lambda event: float(event["time"])))

    def is_running(self) -> bool:
        """Return whether a process holds the run's lock, on this node or, by its recent heartbeat, on another."""
        return is_locked(self.lock)

    def require_unused(self) -> None:
        """Wait for the lock of a process that is ending.

        Raises:
            RunInUseError: another process holds it.
        """
        if self.is_running():
            with closing(RunLock(self)) as lock:
                lock.take()

    def in_use(self) -> RunInUseError:
        """Return the error for a directory that another process is using."""
        return in_use(self.lock)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run's lock, so that no second run writes here.

        Raises:
            RunInUseError: another process holds it.
        """
        with closing(RunLock(self)) as lock:
            lock.take()
            yield


@dataclass(frozen=True)
class Fork:
    """Where a run was forked from another one.

    Attributes:
        run: the id of the other run.
        step: the steps that both have in common.
        version: the state version of the checkpoint.
        changed: the other run's values of the fields that differ, by name.
        options: the other run's values of the options that differ, by name; None in an old record.
    """

    run: str
    path: str
    step: int
    version: int
    changed: Mapping[str, Any]
    options: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> Self | None:
        """Return the fork that ``run.toml`` records; None if the run began at step 0.

        Raises:
            RunDirectoryError: the record is damaged.
        """
        record = manifest.get("forked")
        if record is None:
            return None
        try:
            fork = cls(**record)
            are_mappings = all(isinstance(it, Mapping) for it in (fork.changed, fork.options or {}))
            if type(fork.step) is int and type(fork.version) is int and are_mappings:
                return fork
        except TypeError:
            pass
        raise RunDirectoryError("the table [forked] of run.toml is damaged. Restore the file from a copy.")

    @classmethod
    def require_no_earlier(cls, manifest: Mapping[str, Any], path: Path, version: int) -> None:
        """Reject a checkpoint from before the fork, such as the best one, of which a fork has a copy.

        Raises:
            CheckpointError: the steps after it would have the options of the fork.
        """
        fork = cls.of(manifest)
        if fork is not None and version < fork.version:
            raise CheckpointError(
                f"{path} is from before step {fork.step}, at which this run was forked. Choose a later checkpoint, or "
                f"fork {fork.path} again."
            )


def in_use(lock: Path) -> RunInUseError:
    """Return the error for the directory of a run or a search whose lock another process holds."""
    return RunInUseError(
        f"{lock.parent} is in use by {describe_holder(lock)}. Wait for it to end, or choose another --run-dir DIR."
    )


# Names of earlier versions: of the event of a new group of workers, and of keys.
_OLD_EVENTS = {"view": "group"}
_OLD_KEYS = {"slot": "local_index", "culprits": "root_causes", "victims": "blocked"}


def _read_events(path: Path) -> list[dict[str, Any]]:
    try:
        records = read_json_lines(path, errors="replace")
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error}. Move it away.") from error
    intact = [
        {_OLD_KEYS.get(key, key): value for key, value in event.items()}
        | {"event": _OLD_EVENTS.get(event["event"], event["event"])}
        for event in records
        if isinstance(event.get("event"), str)
        and isinstance(event.get("time"), int | float)
        and 0 <= event["time"] <= _YEAR_9999
    ]
    return without_steps(intact)


def starts(events: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Count the restarts of a run, and the groups that formed after a fault."""
    groups = {event.get("generation"): bool(event.get("recovery")) for event in events if event["event"] == "group"}
    # Without survivors, a group starts from a checkpoint: that is a recovery, not a restart.
    started = [e for e in events if e["event"] == "started" and e.get("generation") not in groups]
    return {"restarts": max(0, len(started) - 1), "recoveries": sum(groups.values())}


def _is_regular(path: Path) -> bool:
    # Path.is_file() calls a disk that does not answer an absent file, in some versions of Python.
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _other_file(error: OSError, directory: Path) -> str:
    """Return the file of an error in parentheses, if it is not the directory."""
    file = None if error.filename is None else os.fsdecode(error.filename)
    return f" ({file})" if file is not None and Path(file) != directory else ""


class RunLock(FileLock):
    """A run's lock, held from :meth:`take` until :meth:`close`."""

    def __init__(self, directory: RunDirectory) -> None:
        super().__init__(directory.lock)
        self._directory = directory

    def take(self) -> None:
        """Take the lock; wait for it while its holder is ending, as after ``kill -9`` on a busy machine.

        A node that may be down is given up once it has been silent for :data:`paceline.core.ownership.SILENT_S`.

        Raises:
            RunInUseError: another process holds it.
        """
        began, has_told = time.monotonic(), False
        while not self.try_to_take():
            waited_s = time.monotonic() - began
            if self.is_certain and waited_s > BRIEF_S:
                if waited_s > _ENDING_S or not self._is_rival_ending():
                    if self.try_to_take():  # it has ended meanwhile
                        return
                    raise self._directory.in_use()
                if waited_s > 1 and not has_told:
                    has_told = True
                    path = self._directory.path
                    print(f"paceline: waiting for the processes that used {path} to end.", file=sys.stderr, flush=True)
            self.pause()

    def _is_rival_ending(self) -> bool:
        """Return whether the holder is a process of this machine that has ended, or has been killed."""
        if self.rival is None:
            return _is_holder_ending(self.fileno())
        return self.rival.is_here(os.fstat(self.fileno())) and _is_ending(self.rival.owner.pid)


_ENDING_S = 20.0  # a killed process frees its memory first, and then its files
_PF_EXITING = 0x4  # Linux, include/linux/sched.h


def _is_holder_ending(descriptor: int) -> bool:
    """Return whether a lock belongs to a process of this machine that has ended, or has been killed.

    Processes that inherited the lock, such as its workers, hold it until they have noticed.
    """
    inode = os.fstat(descriptor).st_ino
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            # "12: FLOCK  ADVISORY  WRITE 29770 fe:00:3023868 0 EOF"; a waiting one has an arrow after its number.
            words = line.split()
            if words[1] == "FLOCK" and words[5].rpartition(":")[2] == str(inode):
                return _is_ending(int(words[4]))
    # In a container the kernel does not list the lock of a process that has ended, nor that of one elsewhere.
    return any(_has_open(process, descriptor) for process in Path("/proc").glob("[0-9]*"))


def _is_ending(pid: int) -> bool:
    try:
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    except OSError:
        return True
    pending = int(status["SigPnd"], 16) | int(status["ShdPnd"], 16)
    return state in "ZX" or bool(int(numbers[5]) & _PF_EXITING) or bool(pending >> (signal.SIGKILL - 1) & 1)


def _has_open(process: Path, descriptor: int) -> bool:
    """Return whether another process has the file of a descriptor open."""
    if process.name == str(os.getpid()):
        return False
    file = os.fstat(descriptor)
    with suppress(OSError):
        for link in (process / "fd").iterdir():
            with suppress(OSError):
                if os.path.samestat(link.stat(), file):
                    return True
    return False


def backup_path(backup_to: str, run_id: str) -> Path:
    """Return the backup directory of a run; several runs may share one ``--backup-to``."""
    return Path(backup_to) / f"run-{run_id}"


def _without_none(value: Any) -> Any:
    """Remove keys with None, because TOML has no null."""
    if isinstance(value, Mapping):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_without_none(v) for v in value]
    return value


# --- The steps at which a run's epochs begin ---


@dataclass(frozen=True)
class EpochSteps:
    """Where the epochs of a run begin: a fork may have other batches than the run from which it continues.

    Attributes:
        per_epoch: steps of an epoch, from ``first_epoch`` on.
        first_epoch, first_step: the epoch with which these batches began, and its first step.
    """

    per_epoch: int
    first_epoch: int = 0
    first_step: int = 0

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> Self | None:
        """Return those that ``run.toml`` records; None for streams."""
        data = manifest.get("data", {})
        steps = data.get("steps_per_epoch")
        return None if steps is None else cls(steps, data.get("first_epoch", 0), data.get("first_step", 0))

    def begin(self, epoch: int) -> int:
        """Return the steps before an epoch, which is not before ``first_epoch``."""
        return self.first_step + (epoch - self.first_epoch) * self.per_epoch

    def position(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step, and its number in that epoch, both from 0."""
        epochs, step_in_epoch = divmod(step - self.first_step, self.per_epoch)
        return self.first_epoch + epochs, step_in_epoch

    def number(self, total_steps: int | None) -> int | None:
        """Return the epochs that a run of so many steps begins; None if its length is unknown."""
        return self.position(total_steps - 1)[0] + 1 if total_steps else None
