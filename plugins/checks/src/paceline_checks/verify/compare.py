"""Merging and comparison of the ranks' recorded steps. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from paceline.core.files import read_json_lines
from paceline_checks.verify.cases import Training

Kind = Literal["gradient", "weight"]
KINDS: tuple[Kind, ...] = ("gradient", "weight")

FACTOR = 16.0
"""How much farther from float64 a run with another order may be than one process in float32."""

PLAIN_TOLERANCES = {"float64": 1e-6, "float32": 0.1}
"""How far weights may be from those of plain PyTorch, which adds the same terms in another order.

Adam takes steps of its full size from a gradient that is only rounding, such as that of a bias before a batch norm; in
float64 its ``eps`` is far above it.
"""

_MAX_DEVIATIONS = 4.0
"""Of a projection on random signs, whose standard deviation is the norm of the projected tensor."""

_COPIES = "two ranks hold different copies"

_MIN_DISTANCE = 2.0**-21
"""Smallest distance for a tolerance, a few roundings of float32: one process may be closer by chance."""


@dataclass(frozen=True)
class Step:
    """A step, merged from all ranks' records.

    Attributes:
        number: from 1.
        tensors: kind -> name -> digest and distance from the float64 run.
        unequal: kind -> the first tensor of which two ranks hold different copies.
    """

    number: int
    loss: float
    rates: tuple[float, ...]
    tensors: Mapping[Kind, Mapping[str, tuple[str, float | None]]]
    unequal: Mapping[Kind, str]


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first difference between a run and its reference.

    Attributes:
        step: from 1.
        what: "learning rate", "loss", "gradient", "weight" or "copies".
        microbatch: the first one whose forward differs.
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


def read_steps(training: Training, *, synchronous: bool = True) -> list[Step]:
    """Read the recorded steps of all ranks.

    Args:
        synchronous: whether all ranks make each step; else each makes its own, and they are sorted.
    """
    lines_of_ranks = [read_json_lines(training.trace(rank)) for rank in range(training.world_size)]
    lines_of_ranks = [lines for lines in lines_of_ranks if lines]  # a parameter server makes no steps
    if synchronous:
        return [_merge(lines) for lines in zip(*lines_of_ranks, strict=False)]
    return sorted((_merge([line]) for lines in lines_of_ranks for line in lines), key=lambda step: step.number)


def read_recorded_steps(metrics: Path) -> list[Step]:
    """Return the losses in a run's ``metrics.jsonl``."""
    lines = [line for line in read_json_lines(metrics) if line["kind"] == "train"]
    return [Step(line["step"], line["loss"], (), {kind: {} for kind in KINDS}, {}) for line in lines]


def first_difference(steps: Sequence[Step], reference: Sequence[Step]) -> Divergence | None:
    """Return where a run first differs from its reference."""
    for step, expected in zip(steps, reference, strict=False):
        for kind, name in step.unequal.items():
            return _of_tensor(step.number, kind, name, _COPIES)
        if step.rates != expected.rates:
            return _of_rates(step, expected)
        if step.loss != expected.loss and not (math.isnan(step.loss) and math.isnan(expected.loss)):
            return Divergence(
                step=step.number, what="loss", detail=f"{step.loss!r}, but {expected.loss!r} on one process"
            )
        for kind in KINDS:
            actual_tensors, expected_tensors = step.tensors[kind], expected.tensors[kind]
            wrong = [
                name
                for name in dict.fromkeys([*expected_tensors, *actual_tensors])
                if actual_tensors.get(name, ("", None))[0] != expected_tensors.get(name, ("", None))[0]
            ]
            if wrong:
                # Backward reaches the last module first.
                name = wrong[-1] if kind == "gradient" else wrong[0]
                detail = f"{len(wrong)} of {len(expected_tensors)} tensors differ"
                return _of_tensor(step.number, kind, name, detail)
    if len(steps) < len(reference):
        return Divergence(step=len(steps) + 1, what="step", detail="the step is missing")
    return None


@dataclass(frozen=True)
class Margins:
    """The distance of one process in float32 from float64 by step, and the tolerances that follow from it.

    Attributes:
        steps: of the run on one process, with distances.
        double: losses of the float64 run.
    """

    steps: Sequence[Step]
    double: Sequence[float]

    def of_loss(self, number: int) -> float:
        """Return the relative tolerance of a step's loss."""
        so_far = zip(self.steps[:number], self.double, strict=False)
        return FACTOR * max([_MIN_DISTANCE, *(_relative(step.loss, exact) for step, exact in so_far)])

    def of_tensors(self, number: int, kind: Kind) -> float:
        """Return the tolerance of the distance of a step's tensors."""
        distances = [
            distance
            for step in self.steps[:number]
            for _, distance in step.tensors[kind].values()
            if distance is not None
        ]
        return FACTOR * max([_MIN_DISTANCE, *distances])


class TraceDifference(NamedTuple):
    """A run's distance from float64, of the value with the largest share of its tolerance; the first value beyond."""

    distance: float
    tolerance: float
    divergence: Divergence | None


def measure(steps: Sequence[Step], margins: Margins) -> TraceDifference:
    """Compare a run with the float64 run, within the distance that is likely for one process in float32.

    Copies of weights must still be equal on all ranks, because different copies drift apart further.
    """
    worst, first = (0.0, math.inf), None
    for step, exact, single in zip(steps, margins.double, margins.steps, strict=False):
        if step.rates != single.rates and first is None:
            first = _of_rates(step, single)
        candidates: list[tuple[float, float, Divergence]] = []
        distance, allowed = _relative(step.loss, exact), margins.of_loss(step.number)
        candidates.append(
            (distance, allowed, Divergence(step=step.number, what="loss", detail=_beyond(distance, allowed)))
        )
        for kind in KINDS:
            allowed = margins.of_tensors(step.number, kind)
            for name, (_, tensor_distance) in step.tensors[kind].items():
                # A gradient that is zero except for rounding may be absent in float64, and vice versa.
                if tensor_distance is not None:
                    beyond = _of_tensor(step.number, kind, name, _beyond(tensor_distance, allowed))
                    candidates.append((tensor_distance, allowed, beyond))
        for distance, allowed, divergence in candidates:
            if distance / allowed > worst[0] / worst[1]:
                worst = distance, allowed
            if distance > allowed and first is None:
                first = divergence
        if "weight" in step.unequal and first is None:
            first = _of_tensor(step.number, "weight", step.unequal["weight"], _COPIES)
    if first is None and len(steps) < len(margins.steps):
        first = Divergence(step=len(steps) + 1, what="step", detail="it was not done")
    return TraceDifference(worst[0], worst[1], first)


def converges(steps: Sequence[Step], alone: Sequence[Step]) -> tuple[bool, str]:
    """Return whether the loss fell by half of one process's decrease or more, fifth to fifth, and both in words."""

    def mean(steps: Sequence[Step]) -> float:
        return math.fsum(step.loss for step in steps) / len(steps) if steps else math.nan

    fifth, fifth_alone = (max(1, len(each) // 5) for each in (steps, alone))
    first, last, last_alone = mean(alone[:fifth_alone]), mean(steps[-fifth:]), mean(alone[-fifth_alone:])
    text = f"loss {first:.4g} -> {last:.4g}; on one process {last_alone:.4g}"
    if not last_alone < first:
        return False, f"{text}, so use more --steps"
    return last <= first - 0.5 * (first - last_alone), text


def first_forward(
    training: Training, alone: Training, divergence: Divergence, *, tolerance: float | None
) -> Divergence:
    """Return the divergence with the first module whose forward differs.

    Args:
        training, alone: the repeated run that diverges, and that on one process.
        tolerance: of the outputs; None to compare bits.
    """
    calls: dict[tuple[int, str, int], Mapping[str, Any]] = {}
    for rank in range(training.world_size):
        calls |= _calls(read_json_lines(training.forward(rank)))
    for key, call in _calls(read_json_lines(alone.forward(0))).items():
        other = calls.get(key)
        if other is None or other["shape"] != call["shape"]:
            continue  # a part of it on another rank, or a stage without this call
        same = other["digest"] == call["digest"]
        if not same and tolerance is not None:
            # The difference of two projections is about as large as the norm of the difference.
            difference = abs(other["projection"] - call["projection"])
            same = difference <= _MAX_DEVIATIONS * tolerance * call["norm"]
        if not same:
            microbatch, name, _ = key
            return replace(divergence, module=name, microbatch=microbatch, detail=f"its output {tuple(call['shape'])}")
    return divergence


def _calls(lines: Sequence[Mapping[str, Any]]) -> dict[tuple[int, str, int], Mapping[str, Any]]:
    """Index calls by micro-batch, module and count of the module's calls, in the order of one process."""
    calls: dict[tuple[int, str, int], Mapping[str, Any]] = {}
    for line in lines:
        number = 0
        while (line["microbatch"], line["module"], number) in calls:
            number += 1
        calls[line["microbatch"], line["module"], number] = line
    return calls


def _merge(lines: Sequence[Mapping[str, Any]]) -> Step:
    tensors: dict[Kind, dict[str, tuple[str, float | None]]] = {kind: {} for kind in KINDS}
    unequal: dict[Kind, str] = {}
    for kind in KINDS:
        for line in lines:
            for name, (digest, distance) in line[kind].items():
                known = tensors[kind].setdefault(name, (digest, distance))
                if known[0] != digest:
                    unequal.setdefault(kind, name)
                if distance is not None and known[1] is not None and distance > known[1]:
                    tensors[kind][name] = (digest, distance)
    first = lines[0]
    return Step(first["step"], first["loss"], tuple(first["rates"]), tensors, unequal)


def _of_tensor(step: int, kind: Kind, name: str, detail: str) -> Divergence:
    return Divergence(step=step, what=kind, module=name.rpartition(".")[0], tensor=name, detail=detail)


def _of_rates(step: Step, single: Step) -> Divergence:
    rates, expected = (", ".join(f"{rate:.6g}" for rate in each.rates) for each in (step, single))
    return Divergence(step=step.number, what="learning rate", detail=f"{rates}, but {expected} on one process")


def _relative(value: float, exact: float) -> float:
    if not math.isfinite(value):
        return math.inf
    return abs(value - exact) / abs(exact) if exact else abs(value)


def _beyond(distance: float, allowed: float) -> str:
    return f"{distance:.2e} from float64, where {allowed:.2e} is allowed"
