"""Which jobs this user has submitted, over all launchers: one small JSON file each, for ``paceline jobs``."""

from __future__ import annotations

import dataclasses
import itertools
import json
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.files import parse_json, read_document, user_directory, write_atomically
from paceline.launch.launcher import JobHandle, JobStatus, get_launcher

_KEEP = 200
_LONG = 8192  # bytes; few records are longer
_SCOPE = ("server", "namespace", "region", "boot", "pid_namespace")
"""In a reference: within what a number means one job."""


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """A job that was submitted.

    Attributes:
        id: the launcher's name and the system's own number: ``slurm-4711``; see :func:`record_id`.
        launcher: its launcher's name for ``--on``.
        directory: has its script and logs.
        run: the run's directory, of a task.
        submitted: seconds since the epoch.
        ended: its last status, once it has ended: the system may forget.
    """

    id: str
    launcher: str
    name: str
    command: tuple[str, ...]
    directory: str
    run: str | None = None
    reference: Mapping[str, Any]
    submitted: float = field(default_factory=time.time)
    ended: Mapping[str, Any] | None = None

    def handle(self) -> JobHandle:
        return get_launcher(self.launcher).reopen(self.reference)

    def status(self) -> JobStatus:
        """Return the job's status; queries the system only while it may change."""
        if self.ended is not None:
            return JobStatus(**self.ended)
        status = self.handle().status()
        if status.ended:
            with suppress(ConfigError):  # it is asked again
                add_record(dataclasses.replace(self, ended=dataclasses.asdict(status)))
        return status


def record_id(launcher: str, reference: Mapping[str, Any]) -> str:
    """Return ``LAUNCHER-NUMBER``, with a further number if an active job elsewhere has that id."""
    scope = [reference.get(name) for name in _SCOPE]
    taken = {
        record.id
        for record in read_records()
        if record.ended is None and [record.reference.get(name) for name in _SCOPE] != scope
    }
    wanted = f"{launcher}-{reference['id']}"
    numbered = (f"{wanted}-{number}" for number in itertools.count(2))
    return next(each for each in itertools.chain([wanted], numbered) if each not in taken)


def jobs_directory() -> Path:
    """``~/.local/state/paceline/jobs``, or where XDG_STATE_HOME says."""
    return user_directory("state") / "jobs"


def make_jobs_directory() -> Path:
    """Return the directory of records, private to its owner, because commands and variables may hold secrets."""
    directory = jobs_directory()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


@contextmanager
def room_for_record() -> Iterator[None]:
    """See that a job can be recorded before it is submitted; where that fails, no directory is left.

    Raises:
        ConfigError: the directory cannot be written.
    """
    made: list[Path] = []
    try:
        with _refused():
            made += (path for path in (jobs_directory(), *jobs_directory().parents) if not path.exists())
            probe = make_jobs_directory() / f".probe-{secrets.token_hex(4)}"
            write_atomically(probe, bytes(_LONG))
            probe.unlink(missing_ok=True)
        yield
    except BaseException:  # Ctrl-C too
        for directory in made:
            with suppress(OSError):  # another process has begun to use it
                directory.rmdir()
        raise


def add_record(record: JobRecord) -> None:
    """Write a record, over an earlier one of the same job.

    Raises:
        ConfigError: the directory cannot be written.
    """
    with _refused():
        directory = make_jobs_directory()
        content = json.dumps(dataclasses.asdict(record), indent=1) + "\n"
        write_atomically(directory / f"{record.id}.json", content.encode())
        _forget_old(directory)


@contextmanager
def _refused() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot record the job in {jobs_directory()}: {error.strerror}. Set XDG_STATE_HOME to a place "
            "that can be written."
        ) from error


def _forget_old(directory: Path) -> None:
    """Keep so many that a list of them can be read."""
    if sum(1 for _ in directory.glob("*.json")) <= _KEEP:
        return
    ended = [record for record in read_records() if record.ended is not None]
    for record in ended[:-_KEEP]:
        (directory / f"{record.id}.json").unlink(missing_ok=True)
        if Path(record.directory).parent == directory:
            shutil.rmtree(record.directory, ignore_errors=True)


def read_records() -> list[JobRecord]:
    """Return all jobs, the oldest first; damaged files are skipped."""
    records = []
    for path in jobs_directory().glob("*.json"):
        try:
            values = parse_json(read_document(path))
            records.append(JobRecord(**{**values, "command": tuple(values["command"])}))
        except (OSError, ValueError, TypeError, KeyError):
            continue
    return sorted(records, key=lambda record: record.submitted)


def find_record(text: str) -> JobRecord:
    """Find the job of that id, the system's own number, name or run directory; of several the newest."""
    records = read_records()
    path = str(Path(text).resolve())
    for record in reversed(records):
        if text in (record.id, record.reference.get("id"), record.name) or path in (
            record.run,
            record.directory,
        ):
            return record
    recent = ", ".join(record.id for record in records[-5:])
    raise ConfigError(
        f"there is no job {text!r}. " + (f"The newest: {recent}." if recent else "None was submitted yet.")
    )
