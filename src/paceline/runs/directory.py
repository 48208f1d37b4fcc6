"""A run is a directory; this file knows its names and who may write in it.

::

    run.toml          everything resolved: options, task and fields, data, versions, pins
    events.jsonl      created, started, checkpoint, stopped, failed, finished
    metrics.jsonl     one record every --log-every steps, and one for each evaluation
    ledger/           which samples each committed step saw
    initial.safetensors  with --init-from, the weights that the run began with
    checkpoints/      step-00000469-v00000471/ ...
    tensorboard/  profile/
    logs/rank-N.log   what each rank printed
    heartbeats/       while ranks are at work: where each is, every two seconds
    hangs/TIME/       where each rank was when a step did not end
    result.json       written when the run has finished
    agent.json        while an agent is at work: where it can be asked
"""

from __future__ import annotations

import fcntl
import json
import secrets
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from paceline.core.errors import RunDirectoryError, RunInUseError
from paceline.core.files import DISK_ERRORS, _append, read_json_lines, write_atomically

_MOST_EVENTS = 1000
_unwritten: dict[Path, list[str]] = {}
_appending = threading.Lock()


@dataclass(frozen=True)
class RunDirectory:
    """The paths inside a run's directory; making one touches nothing."""

    path: Path

    @property
    def manifest(self) -> Path:
        """``run.toml``."""
        return self.path / "run.toml"

    @property
    def events(self) -> Path:
        """``events.jsonl``."""
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """``metrics.jsonl``."""
        return self.path / "metrics.jsonl"

    @property
    def ledger(self) -> Path:
        """``ledger/``."""
        return self.path / "ledger"

    @property
    def sample_lengths(self) -> Path:
        """``sample-sizes.npy``: what micro-batches are balanced by, where the task says it."""
        return self.path / "sample-sizes.npy"

    @property
    def checkpoints(self) -> Path:
        """``checkpoints/``."""
        return self.path / "checkpoints"

    @property
    def initial(self) -> Path:
        """``initial.safetensors``: the weights that a fine-tuned run began with."""
        return self.path / "initial.safetensors"

    @property
    def tensorboard(self) -> Path:
        """``tensorboard/``."""
        return self.path / "tensorboard"

    @property
    def profile(self) -> Path:
        """``profile/``."""
        return self.path / "profile"

    @property
    def logs(self) -> Path:
        """``logs/``."""
        return self.path / "logs"

    @property
    def heartbeats(self) -> Path:
        """``heartbeats/``."""
        return self.path / "heartbeats"

    @property
    def hangs(self) -> Path:
        """``hangs/``."""
        return self.path / "hangs"

    @property
    def result(self) -> Path:
        """``result.json``."""
        return self.path / "result.json"

    @property
    def agents(self) -> Path:
        """``agents.json``: where the agents of a job on several machines listen."""
        return self.path / "agents.json"

    @property
    def lock(self) -> Path:
        """``run.lock``, held while it runs: by rank 0, or by the agent that leads."""
        return self.path / "run.lock"

    @property
    def agent(self) -> Path:
        """``agent.json``: where the agent of a run at work can be asked."""
        return self.path / "agent.json"

    def log_of(self, rank: int) -> Path:
        """The file that holds what ``rank`` printed."""
        return self.logs / f"rank-{rank}.log"

    def error_of(self, rank: int) -> Path:
        """The file in which ``rank`` records the error that ended it."""
        return self.logs / f"rank-{rank}.error.json"

    def exists(self) -> bool:
        """Whether a run was created here."""
        return self.manifest.is_file()

    def check_resume(self, resume: str) -> None:
        """Hold ``--resume`` against what is here.

        Raises:
            RunDirectoryError: there must be a run and is none, or the other way round.
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
            RunDirectoryError: it cannot be made or written.
        """
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".probe-{secrets.token_hex(4)}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise self.unwritable(error) from error

    def unwritable(self, error: OSError) -> RunDirectoryError:
        """The error for a directory that cannot be written."""
        return RunDirectoryError(
            f"cannot write to the run directory {self.path}: {error.strerror}. "
            "Make it writable and make room, or choose another with --run-dir DIR."
        )

    def read_manifest(self) -> dict[str, Any]:
        """The contents of ``run.toml``.

        Raises:
            RunDirectoryError: there is none, or it is damaged.
        """
        try:
            return tomllib.loads(self.manifest.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RunDirectoryError(f"{self.path} is not a run directory: it has no run.toml.") from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise RunDirectoryError(
                f"{self.manifest} cannot be read: {error}. Restore it from a copy, or choose another --run-dir DIR."
            ) from error

    def read_complete_manifest(self) -> dict[str, Any]:
        """The contents of ``run.toml``, with all that continuing the run takes.

        Raises:
            RunDirectoryError: there is none, or something is missing in it.
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
                f"{self.manifest} is incomplete: it must hold an id and the tables task and config. "
                "Restore it from a copy, or choose another --run-dir DIR."
            )
        return manifest

    def write_manifest(self, document: Mapping[str, Any]) -> None:
        """Write ``run.toml`` whole or not at all."""
        write_atomically(self.manifest, tomli_w.dumps(_without_none(document)).encode())

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write ``result.json`` whole or not at all."""
        write_atomically(self.result, (json.dumps(result, indent=2) + "\n").encode())

    def read_result(self) -> dict[str, Any] | None:
        """The content of ``result.json``; None where the run has not finished.

        Raises:
            RunDirectoryError: it is damaged.
        """
        try:
            result = json.loads(self.result.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise RunDirectoryError(
                f"{self.result} is damaged: {error}. Remove it to conclude the run again."
            ) from error
        return dict(result)

    def append_event(self, kind: str, **fields: Any) -> None:
        """Add one record to ``events.jsonl``; while the disk takes none, they wait for the next one."""
        line = json.dumps({"time": round(time.time(), 3), "event": kind, **fields}) + "\n"
        with _appending:
            waiting = _unwritten.setdefault(self.events.absolute(), [])
            waiting.append(line)
            del waiting[:-_MOST_EVENTS]
            try:
                _append(self.events, "".join(waiting).encode())
            except OSError as error:
                if error.errno not in DISK_ERRORS:
                    raise
            else:
                del _unwritten[self.events.absolute()]

    def read_events(self) -> list[dict[str, Any]]:
        """The records of ``events.jsonl``; a last line cut short by a crash is left out."""
        return read_json_lines(self.events)

    def is_running(self) -> bool:
        """Whether some process on this machine holds the run's lock."""
        try:
            with self.lock.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def in_use(self) -> RunInUseError:
        """The error for a directory that another process works in."""
        return RunInUseError(
            f"{self.path} is in use by another process. Wait for it to end, or choose another --run-dir DIR."
        )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run's lock, so that no second run writes here.

        Raises:
            RunInUseError: somebody else holds it.
        """
        with closing(RunLock(self)) as lock:
            lock.take()
            yield


class RunLock:
    """A run's lock, which is held only once it was taken, and until :meth:`close`.

    A process that inherits the descriptor, before or after that, holds the lock too, until it ends.

    Args:
        directory: the run's.

    Attributes:
        held: whether it was taken.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._file = directory.lock.open("a+b")
        self.held = False

    def fileno(self) -> int:
        """The descriptor, to be inherited."""
        return self._file.fileno()

    def take(self) -> None:
        """Take it.

        Raises:
            RunInUseError: somebody else holds it.
        """
        for attempts_left in (4, 3, 2, 1, 0):
            if self.try_to_take():
                return
            if attempts_left:
                # is_running() in another process holds it for an instant.
                time.sleep(0.02)
        raise self._directory.in_use()

    def try_to_take(self) -> bool:
        """Take it, unless somebody else holds it; return whether it is held now."""
        with suppress(BlockingIOError):
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.held = True
        return self.held

    def close(self) -> None:
        """Hold it no longer, as far as this process goes."""
        self._file.close()


def backup_path(backup_to: str | None, run_id: str) -> Path | None:
    """Where a run's checkpoints are copied to: several runs may share one ``--backup-to``."""
    return None if backup_to is None else Path(backup_to) / f"run-{run_id}"


def _without_none(value: Any) -> Any:
    """TOML has no null: leave such keys out."""
    if isinstance(value, Mapping):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_without_none(v) for v in value]
    return value
