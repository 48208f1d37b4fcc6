"""A task whose model does what a row tells it, and answers with the number of its process."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.core.inference import InferenceSignature, TensorSpec
from paceline.core.task import Task

DIE, FAIL, LEAVE_A_CHILD, WRONG_INDEX, LOSE_GPU = -1.0, -2.0, -3.0, -4.0, -5.0
"""What a row may say; a positive number is seconds to sleep, 0 nothing."""


def _refuse() -> None:
    raise RuntimeError("CUDA error: device-side assert triggered")


class Puppet(nn.Module):
    """Acts (B, 1) -> process numbers (B,)."""

    def forward(self, act: Tensor) -> dict[str, Tensor]:
        pid = os.getpid()
        for what in act.ravel().tolist():
            if what == DIE:
                os.kill(pid, signal.SIGKILL)
            if what == FAIL:
                raise ValueError("it is told to fail")
            if what == WRONG_INDEX:
                nn.functional.embedding(torch.tensor([3]), torch.zeros(3, 1))
            if what == LOSE_GPU:
                torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, _refuse
                _refuse()
            if what == LEAVE_A_CHILD:
                pid = os.fork()
                if pid == 0:  # it holds whatever its parent has open
                    time.sleep(120)
                    os._exit(0)
            if what > 0:
                time.sleep(what)
        return {"pid": torch.full((len(act),), pid)}


@dataclass
class PuppetTask(Task):
    """It has no weights, and nothing to train on."""

    def build_model(self) -> nn.Module:
        return nn.Identity()

    def inference_signature(self, model: nn.Module) -> InferenceSignature:
        inputs = {"act": TensorSpec(dtype="float32", shape=(1,))}
        return InferenceSignature(module=Puppet(), inputs=inputs, outputs={"pid": TensorSpec(dtype="int64")})
