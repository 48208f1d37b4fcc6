"""A script that uses a Trainer, with a clock: ``torchrun -m benchmarks.language_models.clock REPORT SCRIPT ARGS``."""

from __future__ import annotations

import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, trainer


class Clock(TrainerCallback):  # type: ignore[misc]
    """Writes when each step ended, the processor time until then, and its loss, in rank 0."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._processor_s: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._seconds.append(time.perf_counter())
        self._processor_s.append(time.process_time())

    def on_train_end(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            losses = [record["loss"] for record in state.log_history if "loss" in record]
            found = {"at": self._seconds, "processor_s": self._processor_s, "losses": losses}
            report.write_text(json.dumps({**found, "packs": len(train_dataloader.dataset)}))


if __name__ == "__main__":
    report = Path(sys.argv[1])
    trainer.DEFAULT_CALLBACKS.append(Clock)
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
