"""Per-sample metrics and predictions, recorded during the evaluation of a split."""

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
"""Number of most confident mistakes to keep with their inputs."""

Classes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Mistake:
    """A misclassified sample.

    Attributes:
        number: index of the sample in its split.
        predicted, actual: classes.
        confidence: probability of the predicted class.
        actual_probability: of the actual class.
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
    """A classifier's predictions for a split of N samples, in the split's order.

    Attributes:
        actual, predicted: classes, (N,).
        confidence: of the predicted class, (N,).
        actual_probability: of the actual class, (N,).
        brier: squared distance of the probabilities from the truth, (N,).
        labels: names of the classes.
        mistakes: most confident first.
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
        """Return whether each prediction is correct, (N,)."""
        return np.asarray(self.actual == self.predicted)


class EvaluationRecorder:
    """A recorder of each block of an evaluation, to be passed as its ``Observe``.

    Attributes:
        estimates: of the metrics.

    Args:
        task: the evaluated task.
        inference: signature of its model; None if unknown.
    """

    def __init__(self, task: Task, inference: InferenceSignature | None) -> None:
        self._task = task
        self._inference = inference
        self.estimates = MetricIntervals()
        self._digests: list[hashlib._Hash] = []  # one per tensor of a batch, over all blocks
        self._rows: list[tuple[Any, ...]] = []
        self._worst: list[tuple[float, int, Mistake]] = []
        self._samples = 0

    def __call__(self, microbatch: MicroBatch, values: Mapping[str, Any]) -> None:
        """Record a block and the metrics that the task computed of it."""
        self.estimates(microbatch, values)
        tensors = [leaf for leaf in tree_leaves(microbatch.batch) if isinstance(leaf, torch.Tensor)]
        for index, tensor in enumerate(tensors):
            if index == len(self._digests):
                self._digests.append(hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape[1:])} ".encode()))
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            self._digests[index].update(flat.view(torch.uint8).numpy().tobytes())
        inference = self._inference
        if inference is not None and inference.probabilities is not None:
            self._classify(inference, microbatch.batch)
        self._samples += microbatch.num_samples

    @property
    def data_sha256(self) -> str:
        """Return a digest of all batches' tensors: evaluations with the same digest saw the same data.

        The size of the blocks does not matter, unless a sample depends on the others in its block, as with
        padding.
        """
        parts = [str(self._samples), *(digest.hexdigest() for digest in self._digests)]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    def predictions(self) -> Predictions | None:
        """Return the model's predictions; None if it is not a classifier."""
        if not self._rows or self._inference is None:
            return None
        actual, predicted, confidence, actual_probability, brier = (
            np.concatenate(column) for column in zip(*self._rows, strict=True)
        )
        worst = sorted(self._worst, key=lambda entry: (-entry[0], entry[2].number))
        return Predictions(
            actual=actual,
            predicted=predicted,
            confidence=confidence,
            actual_probability=actual_probability,
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
                f"{type(self._task).__name__}.inference_signature declares an output {name!r}, but its module "
                f"returns {', '.join(outputs) or 'nothing'}."
            )
        probabilities = outputs[name].detach().double().cpu()
        actual = actual.detach().cpu()
        if len(actual) and not 0 <= int(actual.min()) <= int(actual.max()) < probabilities.shape[1]:
            raise TaskError(
                f"{type(self._task).__name__}.inference_batch gave classes {int(actual.min())} to "
                f"{int(actual.max())}, but {name!r} has {probabilities.shape[1]} columns."
            )
        confidence, predicted = probabilities.max(dim=1)
        actual_probability = probabilities.gather(1, actual[:, None])[:, 0]
        brier = probabilities.square().sum(dim=1) - 2 * actual_probability + 1
        self._rows.append(tuple(t.numpy() for t in (actual, predicted, confidence, actual_probability, brier)))
        self._keep_worst(inference, inputs, actual, predicted, confidence, actual_probability)

    def _keep_worst(
        self,
        inference: InferenceSignature,
        inputs: Sequence[torch.Tensor],
        actual: torch.Tensor,
        predicted: torch.Tensor,
        confidence: torch.Tensor,
        actual_probability: torch.Tensor,
    ) -> None:
        wrong = (actual != predicted).nonzero()[:, 0]
        for index in wrong[confidence[wrong].argsort(descending=True, stable=True)][:MISTAKES].tolist():
            sample_confidence, number = float(confidence[index]), self._samples + index
            if len(self._worst) == MISTAKES and sample_confidence <= self._worst[0][0]:
                break
            mistake = Mistake(
                number=number,
                predicted=int(predicted[index]),
                actual=int(actual[index]),
                confidence=sample_confidence,
                actual_probability=float(actual_probability[index]),
                inputs={
                    name: tensor[index].detach().cpu().clone()
                    for name, tensor in zip(inference.inputs, inputs, strict=True)
                },
            )
            push = heapq.heappush if len(self._worst) < MISTAKES else heapq.heappushpop
            push(self._worst, (sample_confidence, -number, mistake))
