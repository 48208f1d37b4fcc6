"""A task that comes to harm where a test says so. Tests copy this file to where they train."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from paceline_tasks.fashion_mnist import FashionMNIST


@dataclass
class Harmed(FashionMNIST):
    """The process that takes a file KIND-N of the plan, in its Nth call of loss, comes to that harm."""

    plan: str = ""
    calls: ClassVar[int] = 0

    def loss(self, model: nn.Module, batch: Any) -> Any:
        plan = pathlib.Path(self.plan)
        Harmed.calls += 1
        for harm in plan.glob(f"*-{self.calls}"):
            try:
                harm.unlink()
            except FileNotFoundError:
                continue
            if harm.name.startswith("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            (plan / "here").write_text(os.uname().nodename)
            while harm.name.startswith("wait") and not (plan / "go").exists():
                time.sleep(0.01)
        return super().loss(model, batch)
