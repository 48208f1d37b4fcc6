"""One rank of the reducer's tests: ``python reduction_worker.py REPORT``, with RANK and the like set.

It trains a model that holds one of everything, for each transport and order, and writes as JSON what
it ended up with. Whoever started it compares the reports of several numbers of ranks.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import random
import resource
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.core.environment import detect_environment
from paceline.core.errors import PacelineError
from paceline.parallel import grad_buffers, reducer
from paceline.parallel.reducer import GradientReducer, StepSums
from paceline.parallel.reduction_tree import Combine, ReductionOrder, ReductionPlan, equal_work_split
from paceline.parallel.world import World, open_world

NUM_MICROBATCHES = 11
BATCH = 48
STEPS: list[list[int]] = [
    list(range(11)),
    list(range(8)),  # a short batch
    [0, 1],  # most ranks have none
    list(range(11)),  # with create_graph
    [9],  # the first ranks have none
    [1, 2, 5, 8, 10],
    list(range(11)),
]
WITH_CREATE_GRAPH = 3
STRESS_STEPS = 100


class Everything(nn.Module):
    """One of each kind of parameter and buffer that a reducer may meet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.frozen = nn.Linear(64, 16).requires_grad_(False)
        self.twice = nn.Linear(16, 16)
        self.unused = nn.Linear(3, 3)
        self.in_float64 = nn.Linear(16, 8, dtype=torch.float64)
        self.in_bfloat16 = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.head = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.empty(0, 3))
        # 8 m + 8 m + 7 m over 23 would be -inf for the middle one.
        self.register_buffer("mask", torch.tensor([-torch.inf, torch.finfo(torch.float32).min, 0.1]))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int32))
        self.register_buffer("seen", torch.tensor(False))
        self.register_buffer("average", torch.zeros(16))
        self.register_buffer("extent", torch.zeros(8, dtype=torch.float64))
        self.register_buffer("even_calls", torch.zeros(2, dtype=torch.bfloat16))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += 3
        self.seen.fill_(True)
        x = self.frozen(self.norm(self.conv(images)).relu().flatten(1))
        x = self.twice(self.twice(x).tanh())
        x = nn.functional.dropout(x, 0.2)
        self.average = self.average * 0.9 + 0.1 * x.detach().mean(0)  # another tensor under the name
        x = self.in_float64(x.double())
        self.extent.copy_(torch.maximum(self.extent, x.detach().abs().amax(0)))
        if len(images) % 2 == 0:
            self.even_calls += 1  # by some micro-batches only
        x = self.in_bfloat16(x.bfloat16()).float()
        out: torch.Tensor = self.head(x) * self.scale
        return out


def digest(tensor: torch.Tensor) -> str:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()[:16]


def sums_report(sums: StepSums) -> dict[str, Any]:
    return {
        "loss": sums.loss.hex(),
        "weight": sums.weight,
        "samples": sums.samples,
        "checksum": sums.checksum,
        "bad_microbatch": sums.bad_microbatch,
        "finite": sums.finite,
    }


def random_shares(world_size: int, number: int) -> tuple[int, ...]:
    """Shares of ``NUM_MICROBATCHES``, none of them for some ranks."""
    chosen = random.Random(100 * world_size + number)
    bounds = sorted(chosen.choices(range(NUM_MICROBATCHES + 1), k=world_size - 1))
    return tuple(b - a for a, b in itertools.pairwise([0, *bounds, NUM_MICROBATCHES]))


def train_everything(
    world: World, kind: ReductionOrder, shares: tuple[int, ...] = (), *, watching: bool = False
) -> dict[str, Any]:
    """Some steps of gradient descent on the model with everything; digests of what each step made.

    Where it is ``watching``, every rank computes one micro-batch of each step once more.
    """
    torch.manual_seed(0)
    model = Everything()
    first_mask = digest(model.mask)
    plan = ReductionPlan(NUM_MICROBATCHES, world.world_size, kind, shares)
    reduction = GradientReducer(model, plan, world, row_length=2, timeout_s=60)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(len(STEPS), BATCH, 2, 6, 6, generator=generator)
    labels = torch.randint(0, 3, (len(STEPS), BATCH), generator=generator)
    steps: list[dict[str, Any]] = []
    numbers: list[float] = []
    rows = []
    checked: list[int] = []
    fingerprints: list[list[int]] = []
    for step, all_present in enumerate(STEPS):
        bounds = [BATCH * i // len(all_present) for i in range(len(all_present) + 1)]
        present = [microbatch for microbatch in plan.microbatches_of(world.rank) if microbatch in all_present]
        reduction.begin(present)

        def forward_backward(
            microbatch: int,
            step: int = step,
            all_present: list[int] = all_present,
            bounds: list[int] = bounds,
        ) -> tuple[torch.Tensor, torch.Tensor, int]:
            torch.manual_seed(step * 1000 + microbatch)
            place = all_present.index(microbatch)
            mine = slice(bounds[place], bounds[place + 1])
            output = model(images[step, mine])
            weights = (labels[step, mine] + 1).float()  # samples that do not weigh the same
            loss = (nn.functional.cross_entropy(output, labels[step, mine], reduction="none") * weights).sum()
            loss.backward(create_graph=step == WITH_CREATE_GRAPH)
            return loss, weights.sum(), len(output)

        watched = all_present[(3 * step) % len(all_present)]
        if watching:
            reduction.watch(watched, lambda rows: checked.append(len(rows)))
            fingerprints.append([reduction.recompute(lambda s=watched: forward_backward(s)[:2], 2**watched)])
        for microbatch in present:
            reduction.begin_microbatch()
            loss, weight, samples = forward_backward(microbatch)
            reduction.end_microbatch(samples, weight, loss, checksum=2**microbatch)
        if watching and watched in present:
            fingerprints[-1].append(reduction.watched)
        sums = reduction.finish([world.rank, step + 0.5])
        rows.append([list(row) for row in sums.rows])
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        steps.append(
            {
                "sums": sums_report(sums),
                "gradients": {name: digest(gradient) for name, gradient in gradients.items()},
                "buffers": {name: digest(buffer) for name, buffer in model.named_buffers()},
            }
        )
        if step == 0:
            numbers = [number for g in gradients.values() for number in g.double().flatten().tolist()]
            strides_kept = all(p.grad is None or p.grad.stride() == p.stride() for p in model.parameters())
        with torch.no_grad():  # not by torch.optim, whose first step imports for seconds
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.05 * parameter.grad
    report = {
        "steps": steps,
        "rows": rows,
        "checked": checked,
        "fingerprints": fingerprints,
        "first_gradient": numbers,
        "strides_kept": strides_kept,
        "unused_gradient": model.unused.weight.grad,
        "frozen_gradient": model.frozen.weight.grad,
        "mask_kept": digest(model.mask) == first_mask,
        "calls": int(model.calls),
        "seen": bool(model.seen),
        "batches": int(model.norm.num_batches_tracked),
        "average_is_the_registered_buffer": "average" in dict(model.named_buffers()),
        "state": {name: digest(value) for name, value in model.state_dict().items()},
    }
    reduction.close()
    reduction.close()
    report["gradients_left"] = [name for name, p in model.named_parameters() if p.grad is not None]
    return report


def mapped_files() -> list[str]:
    """Files that this process maps to share them, other than libraries and devices."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    return [words[5] for words in lines if "s" in words[1] and words[4] != "0"]


def stress(world: World, kind: ReductionOrder, spares: int = 0) -> list[str]:
    """Many tiny steps with ranks out of step; whole numbers, so that every sum is known."""
    model = nn.Module()
    model.weights = nn.Parameter(torch.zeros(257))
    num_microbatches = 2 * world.world_size + 1
    shares = equal_work_split(num_microbatches, world.world_size - spares) + (0,) * spares
    plan = ReductionPlan(num_microbatches, world.world_size, kind, shares)
    reduction = GradientReducer(model, plan, world, row_length=1, timeout_s=60)
    delays = random.Random(world.rank)
    wrong = []
    for step in range(STRESS_STEPS):
        count = num_microbatches - step % num_microbatches
        present = [microbatch for microbatch in plan.microbatches_of(world.rank) if microbatch < count]
        reduction.begin(present)
        for microbatch in present:
            reduction.begin_microbatch()
            loss = model.weights.sum() * float(step + microbatch)
            loss.backward()
            reduction.end_microbatch(1, 1.0 if microbatch == 0 else 0.0, loss, microbatch)
            for _ in range(delays.randrange(2000)):
                pass
        sums = reduction.finish([float(world.rank * step)])
        expected = float(sum(step + microbatch for microbatch in range(count)))
        if not torch.equal(model.weights.grad, torch.full((257,), expected)):
            wrong.append(f"step {step}: gradients {model.weights.grad.unique().tolist()}, not {expected}")
        if [list(row) for row in sums.rows] != [[float(rank * step)] for rank in range(world.world_size)]:
            wrong.append(f"step {step}: rows {sums.rows}")
        if (sums.samples, sums.weight, sums.checksum) != (count, 1.0, sum(range(count))):
            wrong.append(f"step {step}: {sums}")
    reduction.close()
    return wrong


def spare_at_leisure(world: World) -> dict[str, Any]:
    """Two steps; the last rank, a spare, looks at each only when the others are through with it."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(1))
    shares = (2,) + (0,) * (world.world_size - 1)
    plan = ReductionPlan(2, world.world_size, "exact", shares)
    reduction = GradientReducer(model, plan, world, row_length=0, timeout_s=60)
    is_spare = world.rank == world.world_size - 1
    total = reduction._transport.reduce

    def reduce_when_told(combine: Combine) -> None:
        world.broadcast_object(None)  # rank 0 sends it after its step
        total(combine)

    if is_spare:
        reduction._transport.reduce = reduce_when_told  # type: ignore[method-assign]
    report: dict[str, Any] = {"gradients": [], "samples": []}
    for step in range(2):
        present = plan.microbatches_of(world.rank)
        reduction.begin(present)
        for microbatch in present:
            reduction.begin_microbatch()
            loss = model.weight.sum() * (step + microbatch + 1)
            loss.backward()
            reduction.end_microbatch(1, 0.5, loss, 0)
        sums = reduction.finish([])
        if not is_spare:
            world.broadcast_object(None)
        report["gradients"].append(model.weight.grad.tolist())
        report["samples"].append(sums.samples)
    world.barrier()
    reduction.close()
    return report


def bad_numbers(world: World) -> list[dict[str, Any]]:
    """Steps with a NaN loss, an infinite gradient, a sum that overflows, and no weight at all."""
    model = nn.Module()
    model.weights = nn.Parameter(torch.ones(4))
    plan = ReductionPlan(NUM_MICROBATCHES, world.world_size)
    reduction = GradientReducer(model, plan, world, row_length=0, timeout_s=60)
    reports = []
    for case in ("NaN loss", "infinite gradient", "overflow", "no weight", "good again"):
        present = plan.microbatches_of(world.rank)
        reduction.begin(present)
        for microbatch in present:
            reduction.begin_microbatch()
            factor = {"overflow": 1e38, "infinite gradient": torch.inf if microbatch == 7 else 1.0}.get(case, 1.0)
            (model.weights * factor).sum().backward()
            loss = torch.tensor(torch.nan if case == "NaN loss" and microbatch in (4, 9) else 1.0)
            reduction.end_microbatch(1, 0.0 if case == "no weight" else 1.0, loss, 0)
        report = sums_report(reduction.finish([]))
        reports.append({"case": case, "bad_microbatch": report["bad_microbatch"], "finite": report["finite"]})
    reduction.close()
    return reports


def checkpointed(world: World, reentrant: bool | None) -> dict[str, str] | str:
    """A step whose segments are recomputed in backward (None: not); the gradients, or the error."""
    torch.manual_seed(3)
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    plan = ReductionPlan(4, world.world_size)
    reduction = GradientReducer(model, plan, world, row_length=0, timeout_s=60)
    try:
        present = plan.microbatches_of(world.rank)
        reduction.begin(present)
        for microbatch in present:
            reduction.begin_microbatch()
            torch.manual_seed(microbatch)
            x = torch.randn(4, 8, requires_grad=True)
            for layer in (model[0], model[1], model[0]):
                x = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
            loss = x.square().sum()
            loss.backward()
            reduction.end_microbatch(4, 4.0, loss, 0)
        reduction.finish([])
        return {name: digest(p.grad) for name, p in model.named_parameters()}
    except PacelineError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        world.barrier()  # whoever leaves early breaks the others' connections
        reduction.close()


class Warnings(logging.Handler):
    """Keeps what Paceline warns about."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def limited(kind: int, value: int) -> Iterator[None]:
    """Lower one of this process's limits for a while."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def without_shared_memory(world: World, limiting: Callable[[], Any]) -> dict[str, Any]:
    """Build a reducer and take a step where a limit forbids sharing memory."""
    model = nn.Linear(100, 1000)
    handler = Warnings()
    logging.getLogger("paceline").addHandler(handler)
    plan = ReductionPlan(world.world_size, world.world_size)
    with limiting():
        reduction = GradientReducer(model, plan, world, row_length=0, timeout_s=60)
    logging.getLogger("paceline").removeHandler(handler)
    reduction.begin([world.rank])
    reduction.begin_microbatch()
    loss = model(torch.full((1, 100), float(world.rank))).sum()
    loss.backward()
    reduction.end_microbatch(1, 1.0, loss, 0)
    sums = reduction.finish([])
    report = {
        "warnings": handler.texts,
        "shares": mapped_files(),
        "samples": sums.samples,
        "gradient": model.weight.grad.unique().tolist(),
    }
    reduction.close()
    return report


def no_big_files() -> Any:
    return limited(resource.RLIMIT_FSIZE, 65536)


def no_more_descriptors() -> Any:
    free = os.dup(0)
    os.close(free)
    return limited(resource.RLIMIT_NOFILE, free)


def of_transport(world: World) -> dict[str, Any]:
    """All that is done alike through each transport."""
    kinds: Sequence[ReductionOrder] = ("exact", "allreduce")
    return {
        **{kind: train_everything(world, kind) for kind in kinds},
        **{f"watched {kind}": train_everything(world, kind, watching=True) for kind in kinds},
        "by_shares": {
            kind: [train_everything(world, kind, random_shares(world.world_size, n)) for n in range(count)]
            for kind, count in zip(kinds, (3, 1), strict=True)
        },
        "stress": [text for kind in kinds for text in stress(world, kind)],
        "stress_with_spare": [text for kind in kinds if world.world_size > 1 for text in stress(world, kind, spares=1)],
        "bad_numbers": bad_numbers(world),
        "not_checkpointed": checkpointed(world, None),
        "checkpointed": checkpointed(world, False),
    }


def main(report_path: Path) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Using backward.. with create_graph=True")
    # Small buckets, so that there are several.
    grad_buffers._FIRST_BUCKET_BYTES, grad_buffers._BUCKET_BYTES = 64, 256
    report: dict[str, Any] = {}
    with open_world(detect_environment(), device="cpu") as world:
        report["shared"] = of_transport(world)
        report["mapped_after_close"] = mapped_files()
        if world.world_size > 1:
            report["spare_at_leisure"] = spare_at_leisure(world)
            nobody_may = without_shared_memory(world, no_big_files)
            rank_1_may_not = without_shared_memory(
                world, no_more_descriptors if world.rank == 1 else lambda: limited(resource.RLIMIT_CORE, 0)
            )
            report["fallback"] = {"no big files": nobody_may, "rank 1 cannot open": rank_1_may_not}
            reducer.supported = lambda _: False
            report["group"] = of_transport(world)
        report["reentrant"] = checkpointed(world, True)
    report_path.write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
