"""The jobs that were submitted from here, asked about beside the requests: a scheduler may take its time."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from paceline.dashboard.index import Index
from paceline.errors import PacelineError
from paceline.launchers.base import JobStatus
from paceline.launchers.registry import JobRecord, read_records

_EVERY_S = 10.0
_ASKED_S = 30.0  # nobody has looked for so long: no scheduler is asked
_SHOWN_S = 86400.0  # of an ended job, as `paceline jobs` does


class Jobs:
    """Looks at the job store every ten seconds, while somebody asks.

    Commands and variables of jobs stay where they are: they may tell secrets.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[JobRecord, JobStatus]] = []
        self._asked = 0.0
        self._wake = threading.Event()
        self._ending = False
        self._thread = threading.Thread(target=self._watch, name="paceline-jobs", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._ending = True
        self._wake.set()
        self._thread.join(1.0)

    def rows(self, index: Index) -> list[dict[str, Any]]:
        """What is known of each job, the newest first; None of it is older than the last question but one."""
        was_asked, self._asked = self._asked, time.monotonic()
        if self._asked - was_asked > _ASKED_S:
            self._wake.set()
        return [
            {
                "id": record.id,
                "name": record.name,
                "launcher": record.launcher,
                "state": status.state,
                "detail": status.detail,
                "restarts": status.restarts,
                "submitted": record.submitted,
                "run": _listed(record, index),
            }
            for record, status in reversed(self._rows)
        ]

    def _watch(self) -> None:
        while not self._ending:
            if self._asked and time.monotonic() - self._asked < _ASKED_S:
                self._rows = [
                    (record, status)
                    for record in read_records()
                    if not (status := _status(record)).ended or time.time() - record.submitted < _SHOWN_S
                ]
            self._wake.wait(_EVERY_S)
            self._wake.clear()


def _status(record: JobRecord) -> JobStatus:
    try:
        return record.status()
    except (PacelineError, OSError) as error:
        return JobStatus(state="unknown", detail=str(error).partition(". ")[0])


def _listed(record: JobRecord, index: Index) -> str | None:
    return None if record.run is None else index.id_of(Path(record.run))
