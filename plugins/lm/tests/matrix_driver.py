"""Trains one small model after another in this process, as a rank where the environment says so.

``python matrix_driver.py JOBS.json``, where a job has the ``kind`` of model and the ``options`` of ``paceline.fit``;
``kill_at`` ends the process in that step, and ``backend`` is one of ``torch.compile``. Prints a JSON line a job: its
``result.json``, or an error.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from plugins.lm.tests.causal_models import Causal
from tests.zoo.driver import kill_in_step

import paceline
from paceline.core.errors import UserError
from paceline_lm import token_loss

token_loss._LOGITS = 160  # four tokens of a vocabulary of 40, so that small models have chunks


def train(job: dict[str, Any]) -> dict[str, Any]:
    options = job["options"]
    if job.get("backend"):
        torch.compile = partial(torch.compile, backend=job["backend"])  # type: ignore[assignment]
    if job.get("kill_at"):
        kill_in_step(Causal, job["kill_at"], Path(options["run_dir"], "checkpoints"))
    try:
        result = paceline.fit(Causal(kind=job["kind"]), quiet=True, threads=1, num_workers=0, **options)
    except UserError as error:
        return {"error": type(error).__name__, "text": str(error)}
    return dict(result.record)


if __name__ == "__main__":
    for each in json.loads(Path(sys.argv[1]).read_text()):
        trained = train(each)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(trained), flush=True)
