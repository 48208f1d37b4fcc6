"""The mistakes in a task that the purity guard and ``paceline verify`` find: each has its name and words here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import join_names

_GLOBAL = "the global generators of torch, Python and numpy, which Paceline keys by sample and micro-batch"

MISTAKES = {
    # The model depends on the number of processes, or on a restart.
    "unkeyed-randomness": "{what}. A generator of its own, or a memory of what came before, decides: use " + _GLOBAL,
    "cached-randomness": "{what} drew other random numbers when it was read again, although it had the same values. "
    "The dataset keeps what it drew, such as an augmented sample in a cache",
    "reshuffled-stream": "the first samples had other values when the stream was opened again. It draws from a "
    "generator of its own, or counts how often it was opened: seed its shuffles, or draw from the global generators, "
    "which Paceline seeds (in webdataset: shuffle(1000, rng=random))",
    "shared-randomness": "the loss seeds {names} itself: every micro-batch on every rank uses the same numbers (for "
    "example, the same dropout mask). Do not seed there: use " + _GLOBAL,
    "hidden-state": "{what}, while {names} changed",
    "counter": "{names} counted a micro-batch twice that was computed twice. Each rank counts its own micro-batches, "
    "and begins again after a restart; on_batch_begin gives step, epoch and progress",
    "attribute": "{names} changed whenever a micro-batch was computed. Each rank has values of its own there, and a "
    "restart loses them",
    "forward": "forward or backward changed the parameters {names}: each rank changes its replica by its own "
    "micro-batches. Change them in a callback's on_step_end",
    "optimizer": "a micro-batch changed {names}: in a short step a rank may have no micro-batch. Use build_scheduler, "
    "or a callback's on_step_begin",
    "coupled": "the optimizer {names} updates a parameter by what others have, their gradients or random numbers "
    "before its own, and under zero1 a rank updates its own parameters alone. Use --strategy ddp",
    "evaluation": "an evaluation changed the buffers {names}, on each rank by its own part of the data. Leave the "
    "model in evaluation mode there",
    "replicas": "{what} the ranks have different bits in {names}. A callback, an optimizer or a scheduler does "
    "something else on each rank",
    "split-stream": "{what} other samples at the beginning of the stream{than}. Every rank must read the whole "
    "stream, since Paceline gives each micro-batch to one rank: leave out the split by rank (get_rank, RANK, "
    "split_dataset_by_node, split_by_node), and seed every shuffle",
    "data": "{what} other values in the same samples{than}. Files differ, or build_dataset draws from a generator that "
    "nothing seeds",
    "reads-the-rank": "two ranks differ in {names}. Do not use the rank: the result would depend on the number of "
    "processes. Build the same on all ranks, with all samples, which Paceline distributes",
    # The model is the same everywhere, and wrong.
    "mean-of-means": "the loss of a batch is {what}: it is a mean over items of which samples have different numbers "
    "(tokens, valid labels), or has another weight than its sum: return paceline.Loss(sum, weight); or samples depend "
    "on each other, so that the loss depends on the number of micro-batches",
    "unequal-counts": "the metric {names} of a batch is {what}: it is averaged over unequal counts. Return one value "
    "per sample, or (sum, weight)",
    "duplicated-samples": "{what} samples occur twice, and count twice in its metrics. Return each sample once: "
    "Paceline distributes them without padding",
    "unused-parameters": "the parameters {names} {what}. Remove them, or freeze them with requires_grad_(False)",
    "tiny-batch-norm": "batch norm {names} computes its mean and variance over {what}. Use fewer --microbatches, a "
    "larger --global-batch-size, or a norm that does not depend on the batch (GroupNorm, LayerNorm)",
    "scheduler-steps": "the task steps its scheduler itself in each micro-batch, and Paceline again in each step. "
    "Leave that to Paceline, and return the scheduler from build_scheduler",
}
_NAMED = 3  # names that a message lists


@dataclass(frozen=True)
class Impurity:
    """A mistake that was found in a task.

    Attributes:
        kind: one of :data:`MISTAKES`.
        about: names what differed, so that it counts once, whichever rank, step and values showed it.
        certain: whether the model depends on it; else it may.
        place: FILE:LINE, if known.
    """

    kind: str
    message: str
    about: str = ""
    certain: bool = True
    place: str | None = None

    def __str__(self) -> str:
        return f"{self.place + ': ' if self.place else ''}{self.message} [{self.kind}]"


def impurity(kind: str, names: Iterable[str] = (), *, about: str = "", certain: bool = True, **words: Any) -> Impurity:
    """Describe a mistake.

    Args:
        kind: one of :data:`MISTAKES`.
        about: see :class:`Impurity`; by default the names.
        certain: see :class:`Impurity`.
    """
    names = list(names)
    message = MISTAKES[kind].format(names=join_names(names, _NAMED), **words)
    return Impurity(kind, f"{message}.", about or " ".join(names), certain)
