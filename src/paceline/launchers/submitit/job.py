"""A job that submitit has submitted, found again by its folder and number; no pickle is loaded here."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from paceline.launchers.attached import (
    ended_status,
    process_reference,
    process_status,
    process_to_end,
)
from paceline.launchers.base import JobHandle, JobStatus
from paceline.launchers.log_files import follow_files
from paceline.launchers.slurm.job import SlurmJob
from paceline.launchers.submitit.running import exit_code_file
from paceline.launchers.watch import Watch

_POLL_S = 0.2
_SLURM_POLL_S = 2.0


class SubmititJob(JobHandle):
    """A job on Slurm, or one whose controller is a process of this machine.

    Args:
        reference: ``id``, ``executor``, ``folder``, ``tasks``, ``is_command`` and, of a local job, the
            controller's ``pid``, when it was ``created``, and where.
    """

    def __init__(self, reference: Mapping[str, Any]) -> None:
        self._reference = dict(reference)
        self._folder = Path(reference["folder"])
        self._tasks = int(reference["tasks"])

    @classmethod
    def submitted(
        cls, number: str, executor: str, folder: Path, *, tasks: int, is_command: bool
    ) -> SubmititJob:
        """The job that has just got this number.

        Args:
            number: Slurm's, or the controller's process id.
            executor: "slurm" or "local".
            folder: submitit's.
            tasks: over all machines.
            is_command: it runs a command, which ends by itself when it is asked to.
        """
        reference: dict[str, Any] = {
            "id": number,
            "executor": executor,
            "folder": str(folder),
            "tasks": tasks,
            "is_command": is_command,
        }
        if executor == "local":
            with suppress(psutil.NoSuchProcess):
                reference |= process_reference(int(number))
        return cls(reference)

    @property
    def id(self) -> str:
        """Slurm's number, or the controller's process id."""
        return str(self._reference["id"])

    @property
    def reference(self) -> dict[str, Any]:
        """What :meth:`Submitit.reopen` finds it by."""
        return self._reference

    def status(self) -> JobStatus:
        """What its tasks have left, else what Slurm or the process table says."""
        # In this order: a job that ends in between has left its codes.
        system = self._system_status()
        codes = self._exit_codes()
        if len(codes) == self._tasks and (not any(codes) or not self._cancelled.exists()):
            return ended_status(max(codes, key=abs), system.restarts)
        if not system.ended:
            return system
        if self._cancelled.exists():
            return JobStatus(state="cancelled", restarts=system.restarts)
        if codes:
            return ended_status(max(codes, key=abs) or 1, system.restarts)
        return system

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """What its tasks printed."""
        paths = [
            self._folder / f"{self.id}_{task}_log.{kind}"
            for task in range(self._tasks)
            for kind in self._kinds
        ]
        # A controller on another machine is unknown here, and its tasks leave their codes all the same.
        ended = self._watch().ended if self._reference["executor"] == "slurm" else self._has_ended
        yield from follow_files(paths, ended=ended if follow else None)

    def cancel(self) -> None:
        """End it; a command is asked first, and killed by a second call.

        Raises:
            LaunchError: Slurm refused it, or the controller is not one of this machine's processes.
        """
        asked = self._cancelled.exists()
        if self._reference["executor"] == "slurm":
            self._cancelled.touch()
            self._slurm.cancel()
            return
        process = process_to_end(self._reference, self.status())
        self._cancelled.touch()
        if process is not None:
            with suppress(psutil.NoSuchProcess):
                # submitit's controller passes SIGTERM on; at SIGINT it kills its tasks after a second.
                process.send_signal(
                    signal.SIGTERM if self._reference["is_command"] and not asked else signal.SIGINT
                )

    def wait(self) -> int:
        """Wait for all tasks; return the first code that is not 0.

        Raises:
            LaunchError: Slurm has forgotten the job, which has left no exit code, or has not answered for
                long.
        """
        code = self._watch().wait().exit_code
        return 1 if code is None else code

    def _has_ended(self) -> bool:
        return self.status().ended

    def _watch(self) -> Watch:
        interval_s = _SLURM_POLL_S if self._reference["executor"] == "slurm" else _POLL_S
        return Watch(self.status, (interval_s, interval_s), logs=str(self._folder))

    @property
    def _slurm(self) -> SlurmJob:
        return SlurmJob({"id": self.id, "directory": str(self._folder)})

    @property
    def _kinds(self) -> tuple[str, ...]:
        return ("out",) if self._reference["is_command"] else ("out", "err")

    @property
    def _cancelled(self) -> Path:
        return self._folder / f"{self.id}_cancelled"

    def _exit_codes(self) -> list[int]:
        """Of the tasks that have ended."""
        codes = []
        for task in range(self._tasks):
            with suppress(OSError, ValueError):
                codes.append(int(exit_code_file(self._folder, self.id, task).read_text()))
        return codes

    def _system_status(self) -> JobStatus:
        if self._reference["executor"] == "slurm":
            return self._slurm.status()
        if "pid" in self._reference:
            return process_status(self._reference)
        return JobStatus(state="failed", detail="its process is gone, and left no exit code")
