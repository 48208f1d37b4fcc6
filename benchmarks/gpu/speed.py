"""The rows of ``make bench-gpu``, and the program of each: ``python -m benchmarks.gpu.speed ROW GPUS``."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import DIRECTORY, IS_REAL, LIMIT, Row, report
from benchmarks.gpu.turns import COUNTED, MEASURED, Contender, Measured, conduct, steps_of

ROUNDS = 3 if IS_REAL else 1
_REPORTING_S = 6.0

PEAK_BF16_TFLOPS = {"H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "A100": 312, "L40S": 362}
"""Of datasheets, dense; the first name that the GPU's contains decides."""


@dataclass(frozen=True)
class Workload:
    """A model and the size of its steps.

    Attributes:
        model: a class of :mod:`benchmarks.gpu.models`.
        title: for people.
        batch: samples of a step and GPU, on 40 GiB or more.
        small_batch: on less.
        pretended: fields that make it small, for a pretended GPU.
    """

    model: str
    title: str
    batch: int
    small_batch: int
    pretended: Mapping[str, object]


RESNET = Workload("ResNet50", "ResNet-50, bf16", 128, 32, {"size": 32, "images": 64})
GPT = Workload(
    "GPT",
    "GPT, 125 million parameters, bf16",
    16,
    4,
    {"layers": 1, "width": 32, "heads": 2, "context": 32, "vocabulary": 256},
)
_SMALL = 40 * 2**30


def rows(gpus: int) -> list[Row]:
    """Return the rows for a machine with so many GPUs, the cheapest and most telling first."""
    command = [sys.executable, "-m", "benchmarks.gpu.speed"]

    def row(name: str, title: str, limit_s: float, *, gpus: int = 1, real: bool = False) -> Row:
        argv = [*command, name, str(gpus)]
        return Row(name=name, title=title, command=argv, limit_s=limit_s, gpus=gpus, real=real, alone=True)

    found = [
        row("ceilings", "bf16 matrix products and copies, as this GPU does them", 30, real=True),
        row("attention", "forward and backward by each backend, and what determinism costs", 40, real=True),
        row("snapshot", "a state is copied to the host: GB/s, and the pause", 40),
        row("resnet50", f"{RESNET.title}: Paceline and a loop by hand, in turns", 110),
        row("gpt", f"{GPT.title}: Paceline and a loop by hand, in turns", 110),
        row("loader", "samples of a dataset in Python: Paceline's loader and torch's", 40),
    ]
    if gpus > 1:
        found[3:3] = [
            row(f"{name}-{gpus}", f"{workload.title}: Paceline and DDP by hand, in turns", 160, gpus=gpus, real=True)
            for name, workload in (("resnet50", RESNET), ("gpt", GPT))
        ]
    return found


# --- steps a second, in turns ---


def compare_training(workload: Workload, gpus: int) -> None:
    """Measure Paceline and the loop by hand, deterministic and not, with one micro-batch a GPU and with eight."""
    began, directory = time.monotonic(), Path(os.environ[DIRECTORY])
    memory, name, flops = _examine(workload)
    batch = 4 if memory is None else workload.batch if memory >= _SMALL else workload.small_batch
    batch *= gpus
    many = 8 if batch >= 8 * gpus else batch // 2
    # The contenders' weights and optimizers are on the GPU at the same time.
    several = [gpus, many] if many > gpus and (memory is None or memory >= _SMALL) else [gpus]
    fields = {} if memory is not None else dict(workload.pretended)
    contenders = []
    for microbatches in several:
        s = f"S = {microbatches}"
        make = partial(_plain, workload, fields, batch, microbatches, gpus, directory)
        contenders += [make(f"loop-{microbatches}", f"loop by hand, {s}", deterministic=False)]
        contenders += [make(f"deterministic-{microbatches}", f"deterministic loop, {s}", deterministic=True)]
        for reduction in ("allreduce", "exact"):
            contenders.append(
                _paceline(workload, fields, batch, microbatches, gpus, directory, reduction, f"{reduction}, {s}")
            )
    measured = conduct(
        contenders, directory, ROUNDS, began + float(os.environ[LIMIT]) - _REPORTING_S - time.monotonic()
    )
    titles = {contender.name: contender.title for contender in contenders}
    _report_training(measured, titles, batch, gpus, several, name, flops)
    problems = {name: found.problem for name, found in measured.items() if found.problem is not None}
    for name in problems:
        print(f"--- {titles[name]}", (directory / f"{name}.log").read_text(errors="replace")[-2000:], sep="\n")
    if problems:
        raise SystemExit("; ".join(f"{titles[name]}: {problem}" for name, problem in problems.items()))


def _report_training(
    measured: Mapping[str, Measured],
    titles: Mapping[str, str],
    batch: int,
    gpus: int,
    several: Sequence[int],
    gpu: str,
    flops: float,
) -> None:
    peak = next((1e12 * tflops for known, tflops in PEAK_BF16_TFLOPS.items() if known in gpu), None)
    table = [["", "steps/s", "min to max", "samples/s", "MFU", "of the loop", "host waits a step", "peak GiB"]]
    for name, found in measured.items():
        if not found.seconds:
            table.append([titles[name], *["failed"] * (len(table[0]) - 1)])
            continue
        rates = [MEASURED / seconds for seconds in found.seconds]
        rate = statistics.median(rates)
        mfu = "" if peak is None else f"{rate * batch * flops / (peak * gpus):.1%}"
        # Equal determinism, and an equal number of micro-batches.
        kind, _, microbatches = name.partition("-")
        peer = measured[f"{'deterministic' if kind == 'exact' else 'loop'}-{microbatches}"]
        waits = sum(found.waits.values()) / COUNTED
        table.append(
            [
                titles[name],
                f"{rate:.2f}",
                f"{min(rates):.2f} to {max(rates):.2f}",
                f"{rate * batch:,.0f}",
                mfu,
                _ratio(found, peer) or "",
                f"{waits:.1f}",
                f"{found.peak_bytes / 2**30:.1f}",
            ]
        )
    notes = []
    for count in several:
        costs = {
            "exact of allreduce": ("exact", "allreduce"),
            "deterministic of free kernels, by hand": ("deterministic", "loop"),
        }
        for what, (mine, theirs) in costs.items():
            ratio = _ratio(measured[f"{mine}-{count}"], measured[f"{theirs}-{count}"])
            notes.append(f"S = {count}, {what}: {ratio or 'unknown'}")
    for name, found in measured.items():
        if found.waits and not name.startswith(("loop", "deterministic")):
            places = ", ".join(
                f"{place} {count / COUNTED:g}" for place, count in itertools.islice(found.waits.items(), 5)
            )
            notes.append(f"host waits a step of {titles[name]}: {places}")
    report(*notes, table=table, batch=batch, measured={name: vars(found) for name, found in measured.items()})


def _ratio(mine: Measured, theirs: Measured) -> str | None:
    """Return the ratio of step rates, the median over the rounds."""
    ratios = [b / a for a, b in zip(mine.seconds, theirs.seconds, strict=False)]
    return f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else None


def _examine(workload: Workload) -> tuple[int | None, str, float]:
    """Return the GPU's memory (None: it is pretended), its name, and the floating-point operations of a sample.

    In a process of its own, so that this one holds no memory of the GPU.
    """
    import subprocess

    argv = [sys.executable, "-m", "benchmarks.gpu.speed", "examine", workload.model]
    ended = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
    found: tuple[int | None, str, float] = tuple(json.loads(ended.stdout.splitlines()[-1]))
    return found


def examine(model: str) -> None:
    """Print what :func:`_examine` returns."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from benchmarks.gpu import models

    memory = torch.cuda.get_device_properties(0).total_memory if IS_REAL else None
    flops = 0.0
    if IS_REAL:  # counted without computing
        task = getattr(models, model)(**({"images": 2} if model == "ResNet50" else {}))
        batch = [tensor[:2] for tensor in task.build_dataset("train").tensors]
        with torch.device("meta"):
            module = task.build_model()
            batch = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in batch]
        with FlopCounterMode(display=False) as counter:
            task.loss(module, batch).backward()
        flops = counter.get_total_flops() / 2
    print(json.dumps([memory, torch.cuda.get_device_name(0), flops]))


def _plain(
    workload: Workload,
    fields: Mapping[str, object],
    batch: int,
    microbatches: int,
    gpus: int,
    directory: Path,
    name: str,
    title: str,
    *,
    deterministic: bool,
) -> Contender:
    job = {
        "model": workload.model,
        "fields": fields,
        "turns": str(directory),
        "name": name,
        "rounds": ROUNDS,
        "batch": batch // gpus,
        "microbatches": microbatches // gpus,
        "deterministic": deterministic,
    }
    command = [sys.executable, "-m", "benchmarks.gpu.plain", json.dumps(job)]
    return Contender(name, title, [[*command, str(rank), str(gpus)] for rank in range(gpus)], gpus)


def _paceline(
    workload: Workload,
    fields: Mapping[str, object],
    batch: int,
    microbatches: int,
    gpus: int,
    directory: Path,
    reduction: str,
    title: str,
) -> Contender:
    name = f"{reduction}-{microbatches}"
    settings = {**fields, "turns": directory, "contender": name, "rounds": ROUNDS}
    options = {
        "--run-dir": directory / name,
        "--device": "cuda",
        "--precision": "bf16",
        "--nproc": gpus,
        "--recover": "none",
        "--reduction": reduction,
        "--microbatches": microbatches,
        "--global-batch-size": batch,
        "--max-steps": steps_of(ROUNDS),
        "--checkpoint-every": "never",
        "--log-every": 1000,
        "--purity": "off",
        "--hang-timeout": "never",
    }
    command = [sys.executable, "-m", "paceline", "train", f"benchmarks.gpu.models:{workload.model}"]
    command += [word for option, value in options.items() for word in (option, str(value))]
    command += [word for field, value in settings.items() for word in ("--set", f"{field}={value}")]
    return Contender(name, title, [command], gpus)


# --- one process: ceilings, attention, snapshots, the loader ---


def _median_s(action: Callable[[], object], times: int = 10) -> float:
    """Return the median time of an action, in seconds, by the clock of the GPU's end."""
    import torch

    action()
    taken = []
    for _ in range(times):
        torch.cuda.synchronize()
        began = time.perf_counter()
        action()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def measure_ceilings(_: int) -> None:
    """Measure what nothing on this GPU can be faster than."""
    import torch

    gpu = torch.device("cuda")
    a, b = (torch.randn(8192, 8192, device=gpu, dtype=torch.bfloat16) for _ in range(2))
    tflops = 2 * 8192**3 / _median_s(lambda: a @ b) / 1e12
    source = torch.empty(2**30, dtype=torch.uint8, device=gpu)
    target = torch.empty_like(source)
    pinned = torch.empty(2**28, dtype=torch.uint8).pin_memory()
    part = source[: 2**28]
    copies = {
        "on the GPU (read + written)": 2 * 2**30 / _median_s(lambda: target.copy_(source)) / 1e9,
        "to the host": 2**28 / _median_s(lambda: pinned.copy_(part, non_blocking=True)) / 1e9,
        "from the host": 2**28 / _median_s(lambda: part.copy_(pinned, non_blocking=True)) / 1e9,
    }
    report(
        f"matrix product of 8192 x 8192, bf16: {tflops:.0f} TFLOP/s",
        "copies, GB/s: " + ", ".join(f"{what} {rate:.0f}" for what, rate in copies.items()),
        tflops=tflops,
        copies=copies,
    )


def measure_attention(_: int) -> None:
    """Measure each backend with free and with deterministic kernels."""
    import torch
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    shape = (8, 12, 1024, 64)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    weights = torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), weights)

    table = [["B 8, H 12, T 1024, K 64, bf16, causal", "free, ms", "deterministic, ms"]]
    for backend in (
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ):
        cells = []
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            try:
                with sdpa_kernel(backend):
                    cells.append(f"{1000 * _median_s(step):.2f}")
            except RuntimeError as error:
                if "No available kernel" not in str(error) and "deterministic" not in str(error):
                    raise
                cells.append("refused")
        table.append([backend.name, *cells])
    report(table=table)


def measure_snapshot(_: int) -> None:
    """Measure the copy of a GPT's state to the host, for which training pauses."""
    import torch

    from paceline.runs.checkpoint_state import Snapshot

    # A GPT's parameters and Adam's two moments, in tensors of several sizes.
    sizes = [768 * 50_304, *[768 * 768 * 4] * 24, *[768 * 768] * 48, *[768] * 100]
    scale = 1 if IS_REAL else 100
    tensors = {f"t{n}": torch.randn(3 * size // scale, device="cuda") for n, size in enumerate(sizes)}
    total = sum(4 * tensor.numel() for tensor in tensors.values())
    snapshot = Snapshot()
    began = time.perf_counter()
    snapshot.capture({"state.safetensors": tensors})
    first = time.perf_counter() - began
    pause = _median_s(lambda: snapshot.capture({"state.safetensors": tensors}), times=5)
    report(
        f"{total / 1e9:.2f} GB: {total / pause / 1e9:.1f} GB/s, a pause of {pause:.3f} s; the first time {first:.2f} s",
        bytes=total,
        pause_s=pause,
        first_s=first,
    )


class Images:
    """Made-up images, each augmented by a flip and noise in Python."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, k: int) -> Any:
        import torch

        image = torch.full((3, 128, 128), float(k % 256))
        return (image.flip(2) if torch.rand(()) < 0.5 else image) + torch.randn(3, 128, 128), k % 1000


def measure_loader(_: int) -> None:
    """Measure the loaders with four worker processes, in turns."""
    import torch
    from torch.utils.data import DataLoader, default_collate

    from paceline.data.loader import build_loader
    from paceline.data.order import DeterministicSampler

    gpu, batch, workers = torch.device("cuda", 0), 64, min(4, os.cpu_count() or 1)
    order = DeterministicSampler(1024, batch, 1, seed=0)
    rates: dict[str, list[float]] = {"Paceline": [], "torch": []}
    half = order.steps_per_epoch // 2
    for _round in range(2):
        with closing(
            build_loader(Images(), order, seed=0, device=gpu, workers=workers, collate=default_collate)
        ) as loader:
            for step in range(order.steps_per_epoch):
                if step == half:
                    began = time.perf_counter()
                loader.fetch(0, step, range(1))
            torch.cuda.synchronize()
            rates["Paceline"].append((order.steps_per_epoch - half) * batch / (time.perf_counter() - began))
        dataset: Any = Images()
        theirs = DataLoader(dataset, batch, shuffle=True, num_workers=workers, pin_memory=IS_REAL)
        for step, (images, labels) in enumerate(theirs):
            if step == half:
                began = time.perf_counter()
            images.to(gpu, non_blocking=True), labels.to(gpu, non_blocking=True)
        torch.cuda.synchronize()
        rates["torch"].append((len(theirs) - half) * batch / (time.perf_counter() - began))
    medians = {name: statistics.median(found) for name, found in rates.items()}
    report(
        f"{workers} workers, samples/s: "
        + ", ".join(f"{name} {rate:,.0f}" for name, rate in medians.items())
        + f"; {medians['Paceline'] / medians['torch']:.2f}x",
        rates=rates,
    )


PROGRAMS: Mapping[str, Callable[[int], None]] = {
    "ceilings": measure_ceilings,
    "resnet50": partial(compare_training, RESNET),
    "gpt": partial(compare_training, GPT),
    "attention": measure_attention,
    "snapshot": measure_snapshot,
    "loader": measure_loader,
}

if __name__ == "__main__":
    if sys.argv[1] == "examine":
        examine(sys.argv[2])
    else:
        PROGRAMS[sys.argv[1].partition("-")[0]](int(sys.argv[2]))
