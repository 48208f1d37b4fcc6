"""A job in Slurm's hands."""

from __future__ import annotations

import getpass
import glob
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.errors import LaunchError
from paceline.launchers.attached import EXIT_CODE
from paceline.launchers.base import ENDED, JobHandle, JobStatus, State
from paceline.launchers.log_files import follow_files
from paceline.launchers.slurm.commands import run_slurm
from paceline.launchers.watch import Watch

# Else Slurm cuts the numbers of an array short.
_WHOLE_LISTS = {"SLURM_BITSTR_LEN": "0"}

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
        """What the controller says; of what it has forgotten, what accounting or the job's own files do."""
        numbers = _array_indices(self._reference.get("array"))
        known = self._of_controller()
        # While one is at work the others do not matter: no need to ask the database again and again.
        if all(task.ended for task in known.values()) and not known.keys() >= set(numbers):
            known = {**self._of_accounting(), **known}
        known = {**self._of_files(number for number in numbers if number not in known), **known}
        if not known:
            return JobStatus(state="unknown", detail=f"Slurm does not know job {self._id} any more")
        lost = JobStatus(state="unknown", detail="forgotten by Slurm")
        return _together([known.get(number, lost) for number in numbers])

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """Its log files, which Slurm writes."""
        yield from follow_files(self._log_files(), ended=self._watch().ended if follow else None)

    def cancel(self) -> None:
        """Have Slurm end it: SIGTERM, upon which a Paceline task saves, then SIGKILL."""
        done = run_slurm("scancel", self._id)
        if done.returncode != 0:
            raise LaunchError(f"scancel did not end job {self._id}: {done.stderr.strip()}")

    def wait(self) -> int:
        """Ask at longer and longer intervals until it has ended."""
        code = self._watch().wait().exit_code
        return 1 if code is None else code

    def _watch(self) -> Watch:
        return Watch(self.status, logs=", ".join(self._reference["logs"]))

    def _of_controller(self) -> dict[int | None, JobStatus]:
        """By number in the array; it forgets each job of an array some minutes after that has ended."""
        done = run_slurm("scontrol", "--oneliner", "show", "job", self._id, env=_WHOLE_LISTS)
        lines = done.stdout.splitlines() if done.returncode == 0 else []
        return self._by_number(
            (line.partition(" JobName=")[0], _from_scontrol(line)) for line in lines if "JobState=" in line
        )

    def _of_accounting(self) -> dict[int | None, JobStatus]:
        """The same of a database that not every cluster has."""
        options = ("--allocations", "--noheader", "--parsable2", "--format=JobID,State,ExitCode")
        done = run_slurm("sacct", *options, f"--jobs={self._id}", env=_WHOLE_LISTS)
        lines = done.stdout.splitlines() if done.returncode == 0 else []
        return self._by_number((line.partition("|")[0], _from_sacct(line)) for line in lines if "|" in line)

    def _of_files(self, numbers: Iterable[int | None]) -> dict[int | None, JobStatus]:
        """What those have left that have ended by themselves."""
        found: dict[int | None, JobStatus] = {}
        for number in numbers:
            name = EXIT_CODE if number is None else f"{EXIT_CODE}-{self._id}_{number}"
            with suppress(OSError, ValueError):
                code = int((Path(self._reference["directory"]) / name).read_text())
                found[number] = JobStatus(
                    state="failed" if code else "succeeded", detail=f"exit code {code}", exit_code=code
                )
        return found

    def _by_number(self, found: Iterable[tuple[str, JobStatus]]) -> dict[int | None, JobStatus]:
        """Of words such as ``ArrayTaskId=1`` or ``4711_[2-5%2]``, by each number in the array."""
        array = self._reference.get("array")
        known: dict[int | None, JobStatus] = {}
        for words, status in found:
            named = re.search(r"(?:ArrayTaskId=|_)\[?(\d(?:[\d,:-]*\d)?)", words)
            numbers = _array_indices(named[1] if named is not None and array is not None else None)
            known.update(dict.fromkeys(numbers, status))
        return known

    def _log_files(self) -> list[Path]:
        numbers = _array_indices(self._reference.get("array"))
        files: list[Path] = []
        for pattern in self._reference["logs"]:
            for number in numbers:
                files += _expanded(pattern, self._id, self._reference["name"], number)
        return list(dict.fromkeys(files))


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
    words, code = line.split("|")[1:3]
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
    """The status of an array: at work while one task of it is, failed if one has, succeeded if all have."""
    if len(tasks) == 1:
        return tasks[0]
    order: tuple[State, ...] = ("running", "pending", "failed", "unknown", "cancelled", "succeeded")
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

    def value(field: str) -> str | None:
        # Slurm pads numbers only, and to ten digits at most.
        width = min(10, int(field[1:-1] or 0)) if field[-1] in "Aaj" else 0
        found = known.get(field[-1])
        return None if found is None else found.zfill(width)

    parts = re.split(r"(%\d*.)", pattern)
    texts = [value(part) if number % 2 else part for number, part in enumerate(parts)]
    if None not in texts:
        return [Path("".join(text for text in texts if text is not None))]
    return sorted(
        Path(found) for found in glob.glob("".join("*" if t is None else glob.escape(t) for t in texts))
    )
