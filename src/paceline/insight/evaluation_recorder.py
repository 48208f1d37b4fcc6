"""What one evaluation of a split shows: every sample's metrics, and what the model said of it."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import tree_leaves

from paceline.core.errors import TaskError
from paceline.core.inference import InferenceSignature
from paceline.core.stats import Floats
from paceline.core.task import Task
from paceline.data.samples import MicroBatch
from paceline.training.evaluation import MetricIntervals

MISTAKES = 12
"""How many of the most confident mistakes are kept, with their inputs."""

Classes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Mistake:
    """A sample whose class the model got wrong.

    Attributes:
        number: of the sample in its split.
        predicted, actual: classes.
        confidence: the probability of the predicted class.
        actual_probability: of the actual one.
        inputs: by name, without the batch.
    """

    number: int
    predicted: int
    actual: int
    confidence: float
    actual_probability: float
    inputs: Mapping[str, torch.Tensor] = field(compare=False, repr=False)


@dataclass(frozen=True)
class Predictions:
    """What a classifier said of a split of N samples, in the split's order.

    Attributes:
        actual, predicted: classes, (N,).
        confidence: of the predicted class, (N,).
        actual_probability: of the actual class, (N,).
        brier: the squared distance of the probabilities from the truth, (N,).
        labels: the classes' names.
        mistakes: the most confident ones, most confident first.
    """

    actual: Classes
    predicted: Classes
    confidence: Floats
    actual_probability: Floats
    brier: Floats
    labels: tuple[str, ...]
    mistakes: tuple[Mistake, ...]

    @property
    def right(self) -> npt.NDArray[np.bool_]:
        """Whether each was right, (N,)."""
        return np.asarray(self.actual == self.predicted)


class EvaluationRecorder:
    """Looks at each block of an evaluation; an instance is an ``Observe``.

    Attributes:
        estimates: of the metrics.

    Args:
        task: what is evaluated.
        inference: what its model does for others; None where that is unknown.
    """

    def __init__(self, task: Task, inference: InferenceSignature | None) -> None:
        self._task = task
        self._inference = inference
        self.estimates = MetricIntervals()
        self._digests: list[hashlib._Hash] = []  # of each tensor of a batch, through all blocks
        self._said: list[tuple[Any, ...]] = []
        self._worst: list[tuple[float, int, Mistake]] = []
        self._samples = 0

    def __call__(self, microbatch: MicroBatch, values: Mapping[str, Any]) -> None:
        """Take in a block and what the task's ``metrics`` said of it."""
        self.estimates(microbatch, values)
        tensors = [leaf for leaf in tree_leaves(microbatch.batch) if isinstance(leaf, torch.Tensor)]
        for place, tensor in enumerate(tensors):
            if place == len(self._digests):
                self._digests.append(hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape[1:])} ".encode()))
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            self._digests[place].update(flat.view(torch.uint8).numpy().tobytes())
        inference = self._inference
        if inference is not None and inference.probabilities is not None:
            self._classify(inference, microbatch.batch)
        self._samples += microbatch.num_samples

    @property
    def data_sha256(self) -> str:
        """Of the tensors of all batches: two evaluations with the same have seen the same data.

        The size of the blocks does not matter, unless what a sample looks like depends on the others in its
        block, as with padding.
        """
        parts = [str(self._samples), *(digest.hexdigest() for digest in self._digests)]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    def predictions(self) -> Predictions | None:
        """What the model said; None where it is no classifier."""
        if not self._said or self._inference is None:
            return None
        actual, predicted, confidence, of_actual, brier = (
            np.concatenate(column) for column in zip(*self._said, strict=True)
        )
        worst = sorted(self._worst, key=lambda entry: (-entry[0], entry[2].number))
        return Predictions(
            actual=actual,
            predicted=predicted,
            confidence=confidence,
            actual_probability=of_actual,
            brier=brier,
            labels=self._inference.labels,
            mistakes=tuple(mistake for _, _, mistake in worst),
        )

    def _classify(self, inference: InferenceSignature, batch: Any) -> None:
        inputs, actual = self._task.inference_batch(batch)
        if actual is None:
            return
        outputs = inference.module(*inputs)
        name = inference.probabilities
        assert name is not None
        if name not in outputs:
            raise TaskError(
                f"{type(self._task).__name__}.inference_signature says that its module gives {name!r}, but it "
                f"gives {', '.join(outputs) or 'nothing'}."
            )
        probabilities = outputs[name].detach().double().cpu()
        actual = actual.detach().cpu()
        if len(actual) and not 0 <= int(actual.min()) <= int(actual.max()) < probabilities.shape[1]:
            raise TaskError(
                f"{type(self._task).__name__}.inference_batch gave classes {int(actual.min())} to "
                f"{int(actual.max())}, but {name!r} has {probabilities.shape[1]} columns."
            )
        confidence, predicted = probabilities.max(dim=1)
        of_actual = probabilities.gather(1, actual[:, None])[:, 0]
        brier = probabilities.square().sum(dim=1) - 2 * of_actual + 1
        self._said.append(tuple(t.numpy() for t in (actual, predicted, confidence, of_actual, brier)))
        self._keep_worst(inference, inputs, actual, predicted, confidence, of_actual)

    def _keep_worst(
        self,
        inference: InferenceSignature,
        inputs: Sequence[torch.Tensor],
        actual: torch.Tensor,
        predicted: torch.Tensor,
        confidence: torch.Tensor,
        of_actual: torch.Tensor,
    ) -> None:
        wrong = (actual != predicted).nonzero()[:, 0]
        for index in wrong[confidence[wrong].argsort(descending=True, stable=True)][:MISTAKES].tolist():
            sure, number = float(confidence[index]), self._samples + index
            if len(self._worst) == MISTAKES and sure <= self._worst[0][0]:
                break
            mistake = Mistake(
                number=number,
                predicted=int(predicted[index]),
                actual=int(actual[index]),
                confidence=sure,
                actual_probability=float(of_actual[index]),
                inputs={
                    name: tensor[index].detach().cpu().clone()
                    for name, tensor in zip(inference.inputs, inputs, strict=True)
                },
            )
            push = heapq.heappush if len(self._worst) < MISTAKES else heapq.heappushpop
            push(self._worst, (sure, -number, mistake))
