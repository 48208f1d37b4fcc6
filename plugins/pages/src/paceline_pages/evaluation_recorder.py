"""Per-sample metrics, predictions and errors, recorded during the evaluation of a split."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.core.errors import TaskError
from paceline.core.inference import InferenceSignature, TensorSpec
from paceline.core.stats import Floats
from paceline.core.task import Task
from paceline.data.samples import MicroBatch
from paceline.torch_internals import tree_leaves
from paceline.training.metric_intervals import MetricIntervals
from paceline_serving.encodings import Categories, Dates

MISTAKES = 12
"""Number of most confident mistakes, or largest errors, to keep with their inputs."""

CURVES = 20
"""Largest number of classes for which every probability is kept."""

_MAX_COLUMNS = 32

Classes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MisclassifiedSample:
    """A misclassified sample.

    Attributes:
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
        mistakes: most confident first.
        inputs: of the model, by name.
        probabilities: of all classes, (N, classes); None with more than ``CURVES`` classes.
    """

    actual: Classes
    predicted: Classes
    confidence: Floats
    actual_probability: Floats
    brier: Floats
    labels: tuple[str, ...]
    mistakes: tuple[MisclassifiedSample, ...]
    inputs: Mapping[str, TensorSpec] = field(default_factory=dict)
    probabilities: npt.NDArray[np.float32] | None = None

    @property
    def right(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self.actual == self.predicted)


@dataclass(frozen=True)
class LargeError:
    """A sample of a regression: index in its split, predicted and true value, and inputs without the batch."""

    number: int
    predicted: float
    actual: float
    inputs: Mapping[str, torch.Tensor] = field(compare=False, repr=False)


@dataclass(frozen=True)
class Column:
    """A number of each sample: (N,); NaN where it is missing. Of a category it is the code by ``categories``."""

    cells: Floats
    categories: Categories | None = None


@dataclass(frozen=True)
class RegressionValues:
    """A regression's predictions for a split of N samples, in the split's order.

    Attributes:
        actual, predicted: (N,).
        columns: by name: the inputs that are single numbers or categories, and the named elements of others.
        misses: those with the largest errors, the largest first.
        inputs: of the model, by name.
    """

    target: str
    actual: Floats
    predicted: Floats
    columns: Mapping[str, Column]
    misses: tuple[LargeError, ...]
    inputs: Mapping[str, TensorSpec] = field(default_factory=dict)
    unit: str = ""


class EvaluationRecorder:
    """A recorder of each block of an evaluation, to be passed as its ``Observe``.

    Args:
        inference: signature of its model; None if unknown.
    """

    def __init__(self, task: Task, inference: InferenceSignature | None) -> None:
        self._task = task
        self._inference = inference
        self.estimates = MetricIntervals()
        self._digests: list[hashlib._Hash] = []  # one per tensor of a batch, over all blocks
        self._rows: list[tuple[Any, ...]] = []
        self._probabilities: list[npt.NDArray[np.float32]] = []
        self._values: list[tuple[Any, ...]] = []
        self._columns: dict[str, list[Any]] = {}
        self._target = ""
        self._task_gives_values = True
        self._worst: list[tuple[float, int, Any]] = []
        self._samples = 0

    def __call__(self, microbatch: MicroBatch, values: Mapping[str, Any]) -> None:
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
        elif inference is not None and self._task_gives_values:
            self._regress(inference, microbatch.batch)
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
        return Predictions(
            actual=actual,
            predicted=predicted,
            confidence=confidence,
            actual_probability=actual_probability,
            brier=brier,
            labels=self._inference.labels,
            mistakes=self._most_wrong(),
            inputs=self._inference.inputs,
            probabilities=np.concatenate(self._probabilities) if self._probabilities else None,
        )

    def regression(self) -> RegressionValues | None:
        """Return the values that the model predicted; None if it is not a regression."""
        if not self._values or self._inference is None:
            return None
        actual, predicted = (np.concatenate(column) for column in zip(*self._values, strict=True))
        inputs = self._inference.inputs
        encodings = {
            column: spec.encoding
            for name, spec in inputs.items()
            for column in spec.columns or [name]
            if isinstance(spec.encoding, Categories)
        }
        columns = {name: Column(np.concatenate(parts), encodings.get(name)) for name, parts in self._columns.items()}
        output = self._inference.outputs.get(self._target)
        return RegressionValues(
            target=self._target,
            actual=actual,
            predicted=predicted,
            columns=columns,
            misses=self._most_wrong(),
            inputs=inputs,
            unit="" if output is None else output.unit,
        )

    def _most_wrong(self) -> tuple[Any, ...]:
        return tuple(sample for _, _, sample in sorted(self._worst, reverse=True))

    def _regress(self, inference: InferenceSignature, batch: Any) -> None:
        try:
            inputs, actual = self._task.inference_batch(batch)
        except TaskError:
            actual = None  # the task does not define it: export says so, a report goes without
        if actual is None or not actual.is_floating_point() or actual.numel() != len(actual):
            self._task_gives_values = False
            return
        outputs = inference.module(*inputs)
        fitting = [n for n, out in outputs.items() if out.is_floating_point() and out.numel() == actual.numel()]
        if len(fitting) != 1:  # no single number for a sample, or several
            self._task_gives_values = False
            return
        self._target = fitting[0]
        actual, predicted = (t.detach().double().cpu().reshape(-1) for t in (actual, outputs[self._target]))
        self._values.append((actual.numpy(), predicted.numpy()))
        for name, cells in _cells_of(inference, inputs, len(actual))[:_MAX_COLUMNS]:
            self._columns.setdefault(name, []).append(cells)
        errors = (predicted - actual).abs().nan_to_num(torch.inf)
        for index in errors.argsort(descending=True, stable=True)[:MISTAKES].tolist():
            kept = _inputs_of(inference, inputs, index)
            miss = LargeError(self._samples + index, float(predicted[index]), float(actual[index]), kept)
            if not self._keep(float(errors[index]), miss):
                break

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
        if probabilities.shape[1] <= CURVES:
            self._probabilities.append(probabilities.float().numpy())
        wrong = (actual != predicted).nonzero()[:, 0]
        for index in wrong[confidence[wrong].argsort(descending=True, stable=True)][:MISTAKES].tolist():
            mistake = MisclassifiedSample(
                number=self._samples + index,
                predicted=int(predicted[index]),
                actual=int(actual[index]),
                confidence=float(confidence[index]),
                actual_probability=float(actual_probability[index]),
                inputs=_inputs_of(inference, inputs, index),
            )
            if not self._keep(mistake.confidence, mistake):
                break

    def _keep(self, score: float, sample: MisclassifiedSample | LargeError) -> bool:
        """Keep a sample if it is among the worst so far; return whether it is."""
        if len(self._worst) == MISTAKES and score <= self._worst[0][0]:
            return False
        push = heapq.heappush if len(self._worst) < MISTAKES else heapq.heappushpop
        push(self._worst, (score, -sample.number, sample))
        return True


def _inputs_of(inference: InferenceSignature, inputs: Sequence[torch.Tensor], index: int) -> dict[str, torch.Tensor]:
    return {name: tensor[index].detach().cpu().clone() for name, tensor in zip(inference.inputs, inputs, strict=True)}


def _cells_of(inference: InferenceSignature, inputs: Sequence[torch.Tensor], samples: int) -> list[tuple[str, Floats]]:
    """Return the columns of a batch that are numbers, categories or parts of dates, (samples,), with their names."""
    found = []
    for (name, spec), tensor in zip(inference.inputs.items(), inputs, strict=True):
        columns = list(spec.columns) or [name]
        if isinstance(spec.encoding, Dates):
            table = tensor.detach().double().cpu().reshape(samples, -1).numpy()
            is_missing = table[:, -1] == 1 if spec.encoding.missing else np.zeros(samples, bool)
            for number, part in enumerate(spec.encoding.parts):
                # Missing dates are one slice, of the first part.
                missing = np.nan if number == 0 else np.inf
                found.append((f"{name}: {part}", np.where(is_missing, missing, table[:, number])))
        is_text = spec.encoding is not None and bool(spec.encoding.shape)
        if not is_text and tensor.numel() == samples * len(columns):
            table = tensor.detach().double().cpu().reshape(samples, len(columns)).numpy()
            found += [(column, table[:, number]) for number, column in enumerate(columns)]
    return found
