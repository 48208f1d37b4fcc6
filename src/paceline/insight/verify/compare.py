"""What the ranks of a run noted, put together and compared step by step. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.insight.verify.cases import Training, forward_path, trace_path

Kind = Literal["gradient", "weight"]
KINDS: tuple[Kind, ...] = ("gradient", "weight")

FACTOR = 16.0
"""How much farther than one process in float32 a run in another order may be from float64."""

_DEVIATIONS = 4.0
"""Of a projection on random signs, whose standard deviation is the norm of what is projected."""

_COPIES = "two ranks hold different copies"

_LEAST = 2.0**-21
"""A tolerance is never below a few roundings of float32: one process may be nearer to float64 by luck."""


@dataclass(frozen=True)
class Step:
    """A step, as all ranks together noted it.

    Attributes:
        number: from 1.
        loss: the mean over the step's samples.
        rates: the learning rates.
        tensors: kind -> name -> digest and distance from the float64 run.
        apart: kind -> the first tensor of which two ranks hold different copies.
    """

    number: int
    loss: float
    rates: tuple[float, ...]
    tensors: Mapping[Kind, Mapping[str, tuple[str, float | None]]]
    apart: Mapping[Kind, str]


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Where a run leaves the one that it is compared with.

    Attributes:
        step: from 1.
        what: "learning rate", "loss", "gradient", "weight" or "copies".
        module: the module's name.
        tensor: the tensor's.
        microbatch: whose forward differs first.
        detail: in words.
    """

    step: int
    what: str
    module: str | None = None
    tensor: str | None = None
    microbatch: int | None = None
    detail: str = ""

    def __str__(self) -> str:
        words = [f"step {self.step}: {self.what}"]
        if self.tensor is not None:
            words.append(f"of {self.tensor}")
        if self.module is not None and self.tensor is None:
            words.append(f"differs in the forward of {self.module or 'the model'}")
        if self.microbatch is not None:
            words.append(f"(micro-batch {self.microbatch})")
        return " ".join(words) + (f": {self.detail}" if self.detail else "")


def read_steps(root: Path, training: Training, *, together: bool = True) -> list[Step]:
    """The steps that the ranks noted.

    Args:
        root: where the training has its files.
        training: what was trained.
        together: all ranks make each step; else each makes its own, and they are put in order.
    """
    of_ranks = [_lines(trace_path(root, training, rank)) for rank in range(training.world_size)]
    of_ranks = [lines for lines in of_ranks if lines]  # a parameter server makes no steps
    if together:
        return [_together(lines) for lines in zip(*of_ranks, strict=False)]
    return sorted((_together([line]) for lines in of_ranks for line in lines), key=lambda step: step.number)


def read_recorded_steps(metrics: Path) -> list[Step]:
    """The losses that a run recorded by itself in its ``metrics.jsonl``."""
    lines = [line for line in _lines(metrics) if line["kind"] == "train"]
    return [Step(line["step"], line["loss"], (), {kind: {} for kind in KINDS}, {}) for line in lines]


def first_difference(steps: Sequence[Step], alone: Sequence[Step]) -> Divergence | None:
    """Where a run first leaves the bits of another."""
    for step, other in zip(steps, alone, strict=False):
        for kind, name in step.apart.items():
            return _of_tensor(step.number, kind, name, _COPIES)
        if step.rates != other.rates:
            detail = f"{_numbers(step.rates)}, but {_numbers(other.rates)} on one process"
            return Divergence(step=step.number, what="learning rate", detail=detail)
        if step.loss != other.loss and not (math.isnan(step.loss) and math.isnan(other.loss)):
            return Divergence(step=step.number, what="loss", detail=f"{step.loss!r}, but {other.loss!r} on one process")
        for kind in KINDS:
            mine, theirs = step.tensors[kind], other.tensors[kind]
            wrong = [
                name
                for name in dict.fromkeys([*theirs, *mine])
                if mine.get(name, ("", None))[0] != theirs.get(name, ("", None))[0]
            ]
            if wrong:
                # Backward comes to the last module first.
                name = wrong[-1] if kind == "gradient" else wrong[0]
                detail = f"{len(wrong)} of {len(theirs)} tensors differ"
                return _of_tensor(step.number, kind, name, detail)
    if len(steps) < len(alone):
        return Divergence(step=len(steps) + 1, what="step", detail="it was not done")
    return None


@dataclass(frozen=True)
class Margins:
    """What one process in float32 is away from float64, step by step; and what others may be.

    Attributes:
        steps: of the run on one process, with distances.
        double: the losses of the run in float64.
    """

    steps: Sequence[Step]
    double: Sequence[float]

    def of_loss(self, number: int) -> float:
        """The tolerance of a step's loss, relative."""
        so_far = zip(self.steps[:number], self.double, strict=False)
        return FACTOR * max([_LEAST, *(_relative(step.loss, exact) for step, exact in so_far)])

    def of_tensors(self, number: int, kind: Kind) -> float:
        """The tolerance of the distance of a step's tensors."""
        distances = [
            distance
            for step in self.steps[:number]
            for _, distance in step.tensors[kind].values()
            if distance is not None
        ]
        return FACTOR * max([_LEAST, *distances])


@dataclass(frozen=True)
class TraceDifference:
    """How far a run is from float64.

    Attributes:
        distance: of the tensor or loss that takes most of its tolerance.
        tolerance: its.
        divergence: what is first beyond its tolerance.
    """

    distance: float
    tolerance: float
    divergence: Divergence | None


def measure(steps: Sequence[Step], margins: Margins) -> TraceDifference:
    """Compare a run with the one in float64, within what one process in float32 makes likely.

    Weights of which ranks hold copies must be equal all the same: apart, they only grow farther so.
    """
    worst, first = (0.0, math.inf), None
    for step, exact, alone in zip(steps, margins.double, margins.steps, strict=False):
        if step.rates != alone.rates and first is None:
            detail = f"{_numbers(step.rates)}, but {_numbers(alone.rates)} on one process"
            first = Divergence(step=step.number, what="learning rate", detail=detail)
        found: list[tuple[float, float, Divergence]] = []
        distance, allowed = _relative(step.loss, exact), margins.of_loss(step.number)
        found.append((distance, allowed, Divergence(step=step.number, what="loss", detail=_beyond(distance, allowed))))
        for kind in KINDS:
            allowed = margins.of_tensors(step.number, kind)
            for name, (_, of_tensor) in step.tensors[kind].items():
                distance = math.inf if of_tensor is None else of_tensor
                # What is zero but for rounding in float64 may be absent there, and the other way round.
                if of_tensor is None:
                    continue
                found.append((distance, allowed, _of_tensor(step.number, kind, name, _beyond(distance, allowed))))
        for distance, allowed, divergence in found:
            if distance / allowed > worst[0] / worst[1]:
                worst = distance, allowed
            if distance > allowed and first is None:
                first = divergence
        if "weight" in step.apart and first is None:
            first = _of_tensor(step.number, "weight", step.apart["weight"], _COPIES)
    if first is None and len(steps) < len(margins.steps):
        first = Divergence(step=len(steps) + 1, what="step", detail="it was not done")
    return TraceDifference(worst[0], worst[1], first)


@dataclass(frozen=True)
class LossDecrease:
    """How far a loss has fallen, beside one process's.

    Attributes:
        first: what it was, on one process.
        last: what it is.
        alone: what it is on one process.
    """

    first: float
    last: float
    alone: float

    @property
    def ok(self) -> bool:
        """Whether it has fallen by at least half of what one process's has."""
        return self.alone < self.first and self.last <= self.first - 0.5 * (self.first - self.alone)

    def __str__(self) -> str:
        text = f"loss {self.first:.4g} -> {self.last:.4g}; on one process {self.alone:.4g}"
        return text if self.alone < self.first else f"{text}, so give more --steps"


def converges(steps: Sequence[Step], alone: Sequence[Step]) -> LossDecrease:
    """Compare the losses of the last fifth of the steps with one process's."""
    return LossDecrease(_mean(alone[: _fifth(alone)]), _mean(steps[-_fifth(steps) :]), _mean(alone[-_fifth(alone) :]))


def _fifth(steps: Sequence[Step]) -> int:
    return max(1, len(steps) // 5)


def _mean(steps: Sequence[Step]) -> float:
    return math.fsum(step.loss for step in steps) / len(steps) if steps else math.nan


def first_forward(
    root: Path, training: Training, alone: Training, divergence: Divergence, *, tolerance: float | None
) -> Divergence:
    """The same divergence, with the module whose forward is the first that differs.

    Args:
        root: where both were trained again.
        training: the run that diverges.
        alone: the one on one process.
        divergence: what is known so far.
        tolerance: of the outputs; None where bits are compared.
    """
    mine: dict[tuple[int, str, int], Mapping[str, Any]] = {}
    for rank in range(training.world_size):
        mine |= _calls(_lines(forward_path(root, training, rank)))
    for key, call in _calls(_lines(forward_path(root, alone, 0))).items():
        other = mine.get(key)
        if other is None or other["shape"] != call["shape"]:
            continue  # another rank's part of it, or a stage that has no such call
        same = other["digest"] == call["digest"]
        if not same and tolerance is not None:
            # The difference of two projections is about as large as the norm of the difference.
            apart = abs(other["projection"] - call["projection"])
            same = apart <= _DEVIATIONS * tolerance * call["norm"]
        if not same:
            microbatch, name, _ = key
            return Divergence(
                step=divergence.step,
                what=divergence.what,
                module=name,
                microbatch=microbatch,
                detail=f"its output {tuple(call['shape'])}",
            )
    return divergence


def _calls(lines: Sequence[Mapping[str, Any]]) -> dict[tuple[int, str, int], Mapping[str, Any]]:
    """By micro-batch, module, and which of the module's calls it was; in the order of one process."""
    calls: dict[tuple[int, str, int], Mapping[str, Any]] = {}
    for line in lines:
        number = 0
        while (line["microbatch"], line["module"], number) in calls:
            number += 1
        calls[line["microbatch"], line["module"], number] = line
    return calls


def _together(lines: Sequence[Mapping[str, Any]]) -> Step:
    tensors: dict[Kind, dict[str, tuple[str, float | None]]] = {kind: {} for kind in KINDS}
    apart: dict[Kind, str] = {}
    for kind in KINDS:
        for line in lines:
            for name, (digest, distance) in line[kind].items():
                known = tensors[kind].setdefault(name, (digest, distance))
                if known[0] != digest:
                    apart.setdefault(kind, name)
                if distance is not None and known[1] is not None and distance > known[1]:
                    tensors[kind][name] = (digest, distance)
    first = lines[0]
    return Step(first["step"], first["loss"], tuple(first["rates"]), tensors, apart)


def _of_tensor(step: int, kind: Kind, name: str, detail: str) -> Divergence:
    return Divergence(step=step, what=kind, module=name.rpartition(".")[0], tensor=name, detail=detail)


def _relative(value: float, exact: float) -> float:
    if not math.isfinite(value):
        return math.inf
    return abs(value - exact) / abs(exact) if exact else abs(value)


def _beyond(distance: float, allowed: float) -> str:
    return f"{distance:.2e} from float64, where {allowed:.2e} is allowed"


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in values)


def _lines(path: Path) -> list[dict[str, Any]]:
    """A file's JSON lines; one that was not finished is left out."""
    lines = []
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    for text in texts:
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines
