"""A job in Slurm's hands."""

from __future__ import annotations

import getpass
import glob
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import LaunchError
from paceline.launchers.attached import EXIT_CODE
from paceline.launchers.base import ENDED, JobHandle, JobStatus, State
from paceline.launchers.log_files import follow_files
from paceline.launchers.slurm.commands import run_slurm

_FIRST_POLL_S, _LAST_POLL_S = 0.5, 10.0
_PATIENCE_S = 600.0
"""How long Slurm may not answer while one waits for a job."""

_STATES: dict[str, State] = {
    **dict.fromkeys(("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED"), "pending"),
    **dict.fromkeys(("SPECIAL_EXIT", "RESV_DEL_HOLD"), "pending"),
    **dict.fromkeys(("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING"), "running"),
    **dict.fromkeys(("RESIZING", "STAGE_OUT"), "running"),
    "COMPLETED": "succeeded",
    **dict.fromkeys(("CANCELLED", "PREEMPTED", "REVOKED"), "cancelled"),
    **dict.fromkeys(("FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"), "failed"),
}


class SlurmJob(JobHandle):
    """A job, or an array of them, that sbatch has taken."""

    def __init__(self, reference: Mapping[str, Any]) -> None:
        self._reference = dict(reference)
        self._id: str = reference["id"]

    @property
    def reference(self) -> dict[str, Any]:
        """Its number, and where its logs are."""
        return self._reference

    def status(self) -> JobStatus:
        """What the controller says; once that has forgotten, what accounting or the job's own file does."""
        done = run_slurm("scontrol", "--oneliner", "show", "job", self._id)
        if done.returncode == 0:
            tasks = [_from_scontrol(line) for line in done.stdout.splitlines() if "JobState=" in line]
            if tasks:
                return _together(tasks)
        # Without accounting it fails, and says so.
        options = ("--allocations", "--noheader", "--parsable2", "--format=State,ExitCode")
        done = run_slurm("sacct", *options, f"--jobs={self._id}")
        tasks = [_from_sacct(line) for line in done.stdout.splitlines() if "|" in line]
        if done.returncode == 0 and tasks:
            return _together(tasks)
        try:
            code = int((Path(self._reference["directory"]) / EXIT_CODE).read_text())
        except (OSError, ValueError):
            return JobStatus(state="unknown", detail=f"Slurm does not know job {self._id} any more")
        return JobStatus(state="succeeded" if code == 0 else "failed", exit_code=code)

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """Its log files, which Slurm writes."""
        yield from follow_files(self._log_files(), ended=_Watch(self).ended if follow else None)

    def cancel(self) -> None:
        """Have Slurm end it: SIGTERM, upon which a Paceline task saves, then SIGKILL."""
        done = run_slurm("scancel", self._id)
        if done.returncode != 0:
            raise LaunchError(f"scancel did not end job {self._id}: {done.stderr.strip()}")

    def wait(self) -> int:
        """Ask at longer and longer intervals until it has ended."""
        watch = _Watch(self)
        while not watch.ended():
            time.sleep(0.1)
        code = self.status().exit_code
        return 1 if code is None else code

    def _log_files(self) -> list[Path]:
        numbers = _array_indices(self._reference.get("array"))
        files: list[Path] = []
        for pattern in self._reference["logs"]:
            for number in numbers:
                files += _expanded(pattern, self._id, self._reference["name"], number)
        return list(dict.fromkeys(files))


class _Watch:
    """Asks after a job, at intervals that grow, and bears with a controller that is away for a while."""

    def __init__(self, job: SlurmJob) -> None:
        self._job = job
        self._interval_s = _FIRST_POLL_S
        self._next = 0.0
        self._silent_since: float | None = None

    def ended(self) -> bool:
        """Whether it has, as far as is known.

        Raises:
            LaunchError: Slurm has forgotten the job, or has not answered for long.
        """
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._interval_s
        self._interval_s = min(_LAST_POLL_S, self._interval_s * 1.3)
        try:
            status = self._job.status()
        except LaunchError:
            self._silent_since = self._silent_since or now
            if now - self._silent_since > _PATIENCE_S:
                raise
            return False
        self._silent_since = None
        if status.state == "unknown":
            raise LaunchError(f"{status.detail}. Its logs: {', '.join(self._job.reference['logs'])}")
        return status.ended


def _from_scontrol(line: str) -> JobStatus:
    values = dict(re.findall(r"(\w+)=(\S+)", line.partition(" Command=")[0]))
    state, reason = values["JobState"], values.get("Reason", "None")
    return _status(
        state,
        f"{state} ({reason})" if reason != "None" else state,
        values.get("ExitCode", "0:0"),
        int(values.get("Restarts", "0")),
    )


def _from_sacct(line: str) -> JobStatus:
    words, code = line.split("|")[:2]
    return _status(words.split()[0], words, code, 0)


def _status(slurm_state: str, detail: str, exit_code: str, restarts: int) -> JobStatus:
    state = _STATES.get(slurm_state, "unknown")
    code, _, number = exit_code.partition(":")
    known = 128 + int(number) if number not in ("", "0") else int(code)
    return JobStatus(
        state=state,
        detail=detail,
        # A job that was lost or timed out has no code of its own.
        exit_code=(known or (0 if state == "succeeded" else 1)) if state in ENDED else None,
        restarts=restarts,
    )


def _together(tasks: Sequence[JobStatus]) -> JobStatus:
    """The status of an array: at work while one task of it is, and failed if one has."""
    if len(tasks) == 1:
        return tasks[0]
    order: tuple[State, ...] = ("unknown", "running", "pending", "failed", "cancelled", "succeeded")
    worst = min(tasks, key=lambda task: order.index(task.state))
    counts = Counter(task.detail for task in tasks)
    return JobStatus(
        state=worst.state,
        detail=", ".join(f"{number} {detail}" for detail, number in counts.items()),
        exit_code=worst.exit_code,
        restarts=sum(task.restarts for task in tasks),
    )


def _array_indices(array: str | None) -> list[int | None]:
    """0, 1, 2, 5 of ``0-2,5%2``."""
    if array is None:
        return [None]
    indices: list[int | None] = []
    for part in array.partition("%")[0].split(","):
        first, last, step = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part).groups()  # type: ignore[union-attr]
        indices += range(int(first), int(last or first) + 1, int(step or 1))
    return indices


def _expanded(pattern: str, job: str, name: str, index: int | None) -> list[Path]:
    """The file that Slurm writes for a pattern; those there are, where only Slurm knows a part of it."""
    known = {"%": "%", "x": name, "A": job, "u": getpass.getuser()}
    known |= {"j": job} if index is None else {"a": str(index)}
    parts = re.split(r"%\d*(.)", pattern)
    texts = [known.get(part) if number % 2 else part for number, part in enumerate(parts)]
    if None not in texts:
        return [Path("".join(text for text in texts if text is not None))]
    return sorted(
        Path(found) for found in glob.glob("".join("*" if t is None else glob.escape(t) for t in texts))
    )
