"""Scripts of others with a loop of their own, before and after: the suite ``scripts``, and the clock of a script.

``torchrun -m benchmarks.scripts_of_others REPORT SCRIPT ARGS`` runs a script with the clock.
"""

from __future__ import annotations

import json
import os
import pickle
import runpy
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.moved_scripts import ORIGINALS, move

from benchmarks.results import MS_PER_STEP, STEPS_PER_S, BenchResult, Progress, TargetResult, measure
from benchmarks.rounds import REPORT, BenchCommand, Variant
from paceline.core.errors import ConfigError

_RANKS = 2
_WARMUP = 8


# --- How fast both are ---


@dataclass(frozen=True)
class _Script:
    """A script to measure.

    Attributes:
        name: of its folder.
        file: the script in it.
        under_ddp: file -> what is replaced there, so that the original trains by DDP on CPUs.
        for_both: likewise, in both.
        options: number of micro-batches, and of ranks that each have a loader of their own -> the arguments.
        accumulates: whether the original has micro-batches itself.
    """

    name: str
    file: str
    under_ddp: Mapping[str, Mapping[str, str]]
    options: Callable[[int, int], Mapping[str, Any]]
    accumulates: bool = False
    for_both: Mapping[str, Mapping[str, str]] | None = None


def _nanogpt_options(microbatches: int, ranks: int) -> dict[str, Any]:
    options = {"dataset": "some", "device": "cpu", "dtype": "float32", "compile": False, "backend": "gloo"}
    options |= {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "batch_size": 12, "dropout": 0.0}
    steps = 28 if microbatches == _RANKS else 18
    options |= {"eval_interval": 1000, "eval_iters": 1, "max_iters": steps, "lr_decay_iters": steps}
    return options | {"gradient_accumulation_steps": microbatches}


_MORE_IMAGES = {
    "torchvision/datasets.py": {"96 if is_train": "480 if is_train", "(3, 16, 16)": "(3, 32, 32)"},
    "torchvision/models.py": {
        "nn.Conv2d(3, 8, 3),\n        nn.BatchNorm2d(8),": "nn.Conv2d(3, 64, 3),\n        nn.BatchNorm2d(64),\n"
        "        nn.ReLU(),\n        nn.Conv2d(64, 64, 3, stride=2),",
        "nn.Linear(32, num_classes)": "nn.Linear(256, num_classes)",
    },
}
_SCRIPTS = (
    _Script(
        name="nanogpt",
        file="train.py",
        under_ddp={
            "train.py": {
                "    device = f'cuda:{ddp_local_rank}'\n    torch.cuda.set_device(device)\n": "",
                "DDP(model, device_ids=[ddp_local_rank])": "DDP(model)",
            }
        },
        options=_nanogpt_options,
        accumulates=True,
    ),
    _Script(
        name="mnist",
        file="main.py",
        under_ddp={
            "main.py": {
                "    train_loader = torch.utils.data.DataLoader(dataset1,**train_kwargs)": "    torch.distributed."
                "init_process_group('gloo')\n    train_loader = torch.utils.data.DataLoader(\n"
                "        dataset1, sampler=torch.utils.data.distributed.DistributedSampler(dataset1), **train_kwargs)",
                "Net().to(device)": "torch.nn.parallel.DistributedDataParallel(Net().to(device))",
            }
        },
        options=lambda microbatches, ranks: {"batch-size": 48 // ranks, "epochs": 3, "log-interval": 10},
        for_both=_MORE_IMAGES,
    ),
    _Script(
        name="vision",
        file="train.py",
        under_ddp={
            "train.py": {"DistributedDataParallel(model, device_ids=[args.gpu])": "DistributedDataParallel(model)"},
            "utils.py": {
                "    torch.cuda.set_device(args.gpu)\n": "",
                'args.dist_backend = "nccl"': 'args.dist_backend = "gloo"',
                'device="cuda"': 'device="cpu"',
            },
        },
        options=lambda microbatches, ranks: {
            "device": "cpu",
            "workers": 0,
            "epochs": 4,
            "output-dir": "out",
            "clip-grad-norm": 1,
            "mixup-alpha": 0.2,
            "cutmix-alpha": 1,
            "model-ema-steps": 2,
            "batch-size": 24 // ranks,
        },
        for_both=_MORE_IMAGES,
    ),
)
_FLAGS = {"vision": ("--model-ema",)}


def bench_scripts(*, rounds: int, progress: Progress) -> BenchResult:
    """Train each script on two ranks, the original under DDP and the moved one in turns.

    A script whose original is not there is left out, and the remarks say so.

    Raises:
        ConfigError: ``rounds`` is out of range.
        LaunchError: a process failed.
    """
    if rounds < 1:
        raise ConfigError("--rounds must be at least 1.")
    comparisons, verdicts, absent = [], [], []
    with tempfile.TemporaryDirectory(prefix="paceline-bench-scripts-") as name:
        for script in _SCRIPTS:
            if not (ORIGINALS / script.name / script.file).exists():
                absent.append(script.name)
                continue
            for contenders in _groups_of(script, Path(name) / script.name):
                title = script.name if not script.accumulates else contenders[0].title.replace("DDP", script.name)
                found = measure(title, [STEPS_PER_S, MS_PER_STEP], contenders, rounds, progress)
                comparisons.append(found)
                for row in found.rows[1:]:
                    bar = 1.0 if row.name.endswith(f"-{_RANKS}") else None
                    verdicts.append(TargetResult(script.name, row.title, row.ratio, bar))
    remarks = [f"The median interval of two updates, {_WARMUP} at the beginning left out. {_RANKS} ranks."]
    if absent:
        remarks.append(f"Not measured, as the originals are not in the repository: {', '.join(absent)}.")
    return BenchResult(
        benchmark="scripts", document={"ranks": _RANKS}, comparisons=comparisons, verdicts=verdicts, remarks=remarks
    )


def _groups_of(script: _Script, directory: Path) -> list[list[Variant]]:
    """Write the script before and after; return what is compared with each other, the original first."""
    before, after = directory / "before", directory / "after"
    for folder in (before, after):
        move(script.name, script.file, folder)
        _replace(folder, script.for_both or {})
    shutil.copy(ORIGINALS / script.name / script.file, before / script.file)
    _replace(before, script.under_ddp)
    if script.name == "nanogpt":
        for folder in (before, after):
            _write_tokens(folder / "data/some")

    def variant(folder: Path, microbatches: int) -> Variant:
        is_original = folder == before
        title = f"DDP, {microbatches} micro-batches" if script.accumulates else "DDP"
        options = script.options(microbatches, _RANKS if is_original else 1)
        arguments = [*_FLAGS.get(script.name, ()), *(f"--{name}={value}" for name, value in options.items())]

        def commands(target: Path) -> list[BenchCommand]:
            shutil.copytree(folder, target / "script")
            if not is_original:
                moved = target / "script" / script.file
                moved.write_text(moved.read_text().replace("microbatches=6", f"microbatches={microbatches}"))
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={_RANKS}"]
            clock = ["-m", "benchmarks.scripts_of_others", str(target / REPORT), str(target / "script" / script.file)]
            return [BenchCommand([*launcher, *clock, *arguments])]

        return Variant(
            name=f"{'ddp' if is_original else 'paceline'}-{microbatches}",
            title=title if is_original else f"Paceline, {microbatches} micro-batches",
            commands=commands,
        )

    if script.accumulates:
        return [[variant(before, number), variant(after, number)] for number in (_RANKS, 6)]
    return [[variant(before, _RANKS), variant(after, _RANKS), variant(after, 6)]]


def _replace(directory: Path, replacements: Mapping[str, Mapping[str, str]]) -> None:
    for file, texts in replacements.items():
        content = (directory / file).read_text()
        for old, new in texts.items():
            assert old in content, f"{file} has no {old!r}"
            content = content.replace(old, new)
        (directory / file).write_text(content)


def _write_tokens(directory: Path) -> None:
    import numpy as np

    directory.mkdir(parents=True)
    tokens = np.random.default_rng(0).integers(0, 65, 100_000, dtype=np.uint16)
    tokens[:90_000].tofile(directory / "train.bin")
    tokens[90_000:].tofile(directory / "val.bin")
    (directory / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65}))


# --- In a rank of the script ---


def _run_with_clock(report: Path, script: Path) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    ends: list[float] = []
    register_optimizer_step_post_hook(lambda *unused: ends.append(time.perf_counter()))
    os.chdir(script.parent)
    sys.path[0] = str(script.parent)
    runpy.run_path(str(script), run_name="__main__")
    if int(os.environ["RANK"]) == 0:
        measured = ends[_WARMUP:]
        intervals = [after - before for before, after in pairwise(measured)]
        report.write_text(json.dumps({"steps": 1, "seconds": statistics.median(intervals)}))


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    _report = Path(sys.argv.pop(0))
    _run_with_clock(_report, Path(sys.argv[0]))
