"""One run, analysed: its record, and its model evaluated once more on a split."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from paceline.data.microbatch import MicroBatch
from paceline.inference import Inference
from paceline.intervals import Estimate, Floats
from paceline.reporting.architecture import Architecture, Watch
from paceline.reporting.classification import Classification, classify
from paceline.reporting.observation import Observer, Predictions
from paceline.reporting.record import Record, read_record
from paceline.run_directory import RunDirectory
from paceline.training.trained import Trained, evaluator_of, open_trained

OnProgress = Callable[[int, int], None]
"""Is told how many samples were evaluated, and how many there are."""

_SOURCE_LINES = 60


@dataclass(frozen=True, kw_only=True)
class Data:
    """What the model was evaluated on.

    Attributes:
        samples: how many the split has.
        sha256: of its tensors, in blocks of whatever size.
        train_samples, val_samples: of the run's own, where they have a length.
        inputs: name -> "uint8, 1 x 28 x 28" and so on, as the model's :class:`Inference` says.
        preprocessing: the source of what stands between inputs and outputs, which is part of the model that
            is exported; None where there is none.
    """

    samples: int
    sha256: str
    train_samples: int | None
    val_samples: int | None
    inputs: Mapping[str, str]
    preprocessing: str | None


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """A run and what its model does on a split.

    Attributes:
        record: what its directory says.
        split: what was evaluated.
        step: of the checkpoint.
        is_best: whether that is the best model so far.
        metrics: by name, with intervals.
        recorded: what the run itself recorded for this split and model, by name; empty where it did not.
        changed_pins: in what this process differs from the run's, where bits depend on it.
        per_sample: the metrics that have a value for each sample, (N,), by name.
        predictions: None where the model is no classifier.
        classification: of the predictions.
        architecture: of the model.
        data: what was evaluated.
        device: where.
    """

    record: Record
    split: str
    step: int
    is_best: bool
    metrics: Mapping[str, Estimate]
    recorded: Mapping[str, float | None]
    changed_pins: tuple[str, ...]
    per_sample: Mapping[str, Floats]
    predictions: Predictions | None
    classification: Classification | None
    architecture: Architecture
    data: Data
    device: str

    @property
    def main_metric(self) -> str:
        """The name of the metric that ``--best`` watches, else of the first."""
        best = str(self.record.manifest["config"].get("best") or "").partition(":")[0]
        return best if best in self.metrics else next(iter(self.metrics))

    @property
    def more_is_better(self) -> bool:
        """Whether the main metric is to be high; where nothing says so, a loss or an error is to be low."""
        name, _, mode = str(self.record.manifest["config"].get("best") or "").partition(":")
        if name == self.main_metric and mode in ("min", "max"):
            return mode == "max"
        low = ("loss", "error", "perplexity", "bits", "mse", "mae", "rmse")
        return not any(word in self.main_metric.lower() for word in low)


def analyse(
    directory: RunDirectory,
    *,
    split: str = "test",
    checkpoint: str | None = None,
    on_progress: OnProgress = lambda done, total: None,
) -> Analysis:
    """Read a run, and evaluate one of its checkpoints; nothing is written.

    Args:
        directory: the run's.
        split: "test" or "val".
        checkpoint: "best", "last" or a step; None: the best, or the last where nothing was validated.
        on_progress: called after each block of samples.

    Raises:
        UserError: the directory holds no run, or its task or data cannot be built.
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    record = read_record(directory)
    with (
        open_trained(directory, checkpoint) as trained,
        closing(evaluator_of(trained, split)) as evaluator,
    ):
        with torch.no_grad():
            inference = trained.run.task.build_inference(trained.module)
        if inference is not None:
            inference.module.eval()
        observer = Observer(trained.run.task, inference)
        watch = Watch(trained.module)
        done = 0

        def observe(microbatch: MicroBatch, values: Mapping[str, Any]) -> None:
            nonlocal done
            observer(microbatch, values)
            done += microbatch.num_samples
            on_progress(done, evaluator.num_samples)

        with watch.watching():
            measured = trained.evaluate(evaluator, split, observe)
        predictions = observer.predictions()
        return Analysis(
            record=record,
            split=split,
            step=trained.info.step,
            is_best=trained.is_best,
            metrics={name: observer.estimates.estimate(name, value) for name, value in measured.items()},
            recorded=_recorded(record, trained, split),
            changed_pins=tuple(trained.changed_pins),
            per_sample=observer.estimates.per_sample(),
            predictions=predictions,
            classification=None if predictions is None else classify(predictions),
            architecture=watch.architecture(),
            data=_data(record, evaluator.num_samples, observer.data_sha256, inference),
            device=str(trained.run.device),
        )


def _recorded(record: Record, trained: Trained, split: str) -> Mapping[str, float | None]:
    """A result's metrics are those of the best model, or of the last where nothing was validated."""
    best = (record.result or {}).get("best_step")
    of_step = (record.result or {}).get("steps") if best is None else best
    return record.recorded_metrics.get(split, {}) if of_step == trained.info.step else {}


def _data(record: Record, samples: int, sha256: str, inference: Inference | None) -> Data:
    recorded = record.manifest.get("data", {})
    inputs = {}
    if inference is not None:
        for name, spec in inference.inputs.items():
            shape = " × ".join("any" if size is None else str(size) for size in spec.shape)
            inputs[name] = f"{spec.dtype}, {shape or 'a number'}"
    return Data(
        samples=samples,
        sha256=sha256,
        train_samples=recorded.get("train_samples"),
        val_samples=recorded.get("val_samples"),
        inputs=inputs,
        preprocessing=None if inference is None else _source(type(inference.module)),
    )


def _source(kind: type) -> str | None:
    try:
        lines = inspect.getsource(kind).splitlines()
    except (OSError, TypeError):
        return None
    return "\n".join(lines if len(lines) <= _SOURCE_LINES else [*lines[:_SOURCE_LINES], "..."])
