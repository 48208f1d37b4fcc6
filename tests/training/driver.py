"""Trains one job after another in this process, as a rank where the environment says so.

``python driver.py JOBS.json``, where a job is ``{"task", "fields", "options", "stop_at"}``. Prints one
JSON line a job: the ``result.json``, or ``{"error", "message"}``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import tasks  # beside this file

import paceline


def train(job: dict[str, Any]) -> dict[str, Any]:
    tasks.interruption.calls, tasks.interruption.at = 0, job.get("stop_at", 0)
    task = getattr(tasks, job["task"])(**job.get("fields", {}))
    try:
        return dict(paceline.fit(task, quiet=True, **job["options"]).record)
    except paceline.PacelineError as error:
        return {"error": type(error).__name__, "message": str(error)}


if __name__ == "__main__":
    for number, job in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        result = train(job)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps({"job": number, **result}), flush=True)
