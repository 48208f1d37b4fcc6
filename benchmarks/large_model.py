"""The memory of each rank of ``--strategy fsdp``, by what it does: ``python -m benchmarks.large_model``.

A rank's peak is the kernel's (VmHWM), which is set back between the phases. A phase of ``resume`` is a second call.
"""

from __future__ import annotations

import argparse
import atexit
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from paceline.core.task import Callback, Defaults, RankInfo, RunSchedule
from paceline_lm.transformers import TransformersTask

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2},
    "700M": {"vocab_size": 16000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12},
    "2B": {"vocab_size": 32000, "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 23},
}
"""Configurations of Llama; the first two by the MiB of their weights in float32, the last by its parameters."""
_TOKENS = 64


def peak_mib(*, reset: bool = False) -> float:
    """Return this process's peak of resident memory since the last reset, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kib,) = (int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return kib / 1024


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random sequences of tokens."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.randint(4000, (_TOKENS,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words}


class Peaks(Callback):
    """Writes this rank's peaks into a file."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._peaks = {"imported": _IMPORTED_MIB}

    def attach(self, group: RankInfo, *, step: int, epoch: int) -> None:
        self._rank = group.rank
        self._note("built")

    def on_fit_end(self) -> None:
        self._note("steps")
        atexit.register(self._note, "saved")

    def _note(self, phase: str) -> None:
        self._peaks[phase] = peak_mib(reset=True)
        if self._folder:
            Path(self._folder, f"{self._rank}.json").write_text(json.dumps(self._peaks))


@dataclass
class LargeModel(TransformersTask):
    """A Llama with random weights, or those of a directory."""

    size: str = "700M"
    directory: str = ""
    optimizer: str = "adamw"
    peaks: str = ""

    defaults: ClassVar[Defaults] = Defaults(global_batch_size=8)

    def build_model(self) -> PreTrainedModel:
        disable_progress_bar()
        if self.directory:
            built: PreTrainedModel = AutoModelForCausalLM.from_pretrained(self.directory, dtype=torch.float32)
            return built
        config = LlamaConfig(**SIZES[self.size], num_attention_heads=8, num_key_value_heads=8)
        built = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return built

    def build_dataset(self, split: str) -> Tokens | None:
        return Tokens() if split == "train" else None

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        parameters = list(model.parameters())
        return SGD(parameters, lr=1e-3) if self.optimizer == "sgd" else AdamW(parameters, lr=1e-4)

    def build_callback(self, model: nn.Module, schedule: RunSchedule) -> Callback:
        return Peaks(self.peaks)


def train(run: Path, nproc: int, fields: dict[str, str], options: Sequence[str]) -> list[dict[str, float]]:
    """Train with ``paceline train``; return the peaks of each rank by phase, in MiB."""
    peaks = run.parent / f"{run.name}-peaks"
    peaks.mkdir(exist_ok=True)
    settings = [
        word for name, value in {**fields, "peaks": str(peaks)}.items() for word in ("--set", f"{name}={value}")
    ]
    command = [sys.executable, "-m", "paceline", "train", f"{__file__}:LargeModel", "--nproc", str(nproc)]
    command += ["--run-dir", str(run), *["--strategy", "fsdp", "--max-steps", "3", "--checkpoint-every", "2steps"]]
    command += ["--threads", "1", "--quiet"]
    subprocess.run([*command, *settings, *options], check=True)
    return [json.loads((peaks / f"{rank}.json").read_text()) for rank in range(nproc)]


def rows(size: str, nprocs: Sequence[int], *, pretrained: bool, options: Sequence[str]) -> Iterator[list[int]]:
    """Measure a size; yield the number of ranks and the greatest peak of any rank by phase, less the imports' part."""
    with tempfile.TemporaryDirectory() as scratch:
        fields = {"size": size}
        if pretrained:
            fields["directory"] = str(Path(scratch, "model"))
            LargeModel(size=size).build_model().save_pretrained(fields["directory"])
        for nproc in nprocs:
            run = Path(scratch, f"run-{nproc}")
            begun = train(run, nproc, fields, options)
            # As if it had been killed after its second step.
            Path(run, "result.json").unlink()
            shutil.rmtree(next(Path(run, "checkpoints").glob("step-00000003-*")))
            resumed = train(run, nproc, fields, options)
            above = {p: max(rank[p] - rank["imported"] for rank in begun) for p in ("built", "steps", "saved")}
            above["resumed"] = max(rank["built"] - rank["imported"] for rank in resumed)
            yield [nproc, *(round(peak) for peak in above.values())]


_IMPORTED_MIB = peak_mib()

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, epilog="Further options are those of `paceline train`.")
    parser.add_argument("size", nargs="?", default="700M", choices=SIZES)
    arguments, options = parser.parse_known_args()
    for pretrained in (False, True):
        print("pretrained" if pretrained else "from a configuration", "(MiB above the imports)")
        print(*(f"{word:>8}" for word in ("ranks", "built", "steps", "saved", "resumed")))
        for row in rows(arguments.size, (2, 4), pretrained=pretrained, options=options):
            print(*(f"{cell:8}" for cell in row), flush=True)
