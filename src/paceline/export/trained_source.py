"""The trained model of a run or package: its weights, task and evaluation."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from paceline.core.config import all_options, select
from paceline.core.errors import ExportError
from paceline.core.inference import InferenceSignature
from paceline.core.stats import Estimate
from paceline.core.task import Task
from paceline.data.loader import EvalBatches
from paceline.data.samples import MicroBatch
from paceline.export.inferred_signature import infer_signature
from paceline.runs.directory import RunDirectory
from paceline.runs.purity import read_purity
from paceline.training.loaded_model import (
    EvaluableModel,
    LoadedModel,
    load_trained_model,
    make_evaluator,
)
from paceline.training.metric_intervals import MetricIntervals

EVALUATION = "evaluation"
"""In a package's ``provenance.data``: options of the run that decide its evaluation."""

PACKAGE_METRICS = "package_metrics"
"""In ``provenance.data``: metrics of the quantized weights; the manifest has those of the original weights."""

INTERVALS = "intervals"
"""In ``provenance.data``: metric -> the ends of its 95 % interval, and the method."""

EVALUATION_OPTIONS = select(lambda its: its.evaluation)
"""Options that affect data, evaluation batches, precision, a callback's schedule and model selection."""

SPLITS = ("test", "val")


@dataclass(frozen=True, kw_only=True)
class TrainedSource:
    """A trained model to export, on the CPU, in evaluation mode.

    Attributes:
        trained: the model, with its run's evaluation.
        manifest: at least the tables ``task`` and ``config`` of the run's ``run.toml``.
        split: to compare and evaluate on: "test", or "val" if there is no test split.
        step: number of optimizer steps of the training.
        state_version: of the checkpoint.
        purity: whether the run was checked by the purity guard, and what it found; None if unknown.
    """

    trained: EvaluableModel
    manifest: Mapping[str, Any]
    inference: InferenceSignature
    split: str
    step: int
    state_version: int
    purity: str | None = None

    @property
    def task(self) -> Task:
        return self.trained.run.task

    @property
    def model(self) -> nn.Module:
        return self.trained.module

    @property
    def spec(self) -> str:
        return str(self.manifest["task"]["spec"])

    @property
    def fields(self) -> Mapping[str, Any]:
        return dict(self.manifest["task"]["fields"])

    @property
    def data(self) -> dict[str, Any]:
        """Return the facts about the data, and the options of the model's evaluation on it."""
        config = self.trained.run.config
        decide = {name: config.values[name] for name in EVALUATION_OPTIONS}
        return {
            **self.manifest.get("data", {}),
            "compared_split": self.split,
            EVALUATION: {n: value for n, value in decide.items() if value != all_options()[n].default},
        }

    def batches(self) -> EvalBatches:
        """Return the split in the run's evaluation batches, to be closed by the caller."""
        batches = self.trained.run.build_eval_batches(self.split)
        assert batches is not None
        return batches

    def first_batch(self) -> Any:
        """Return the first evaluation batch of the split."""
        return first_batch(self.trained, self.split)

    def measure(
        self,
        model: nn.Module | None = None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> dict[str, Estimate]:
        """Compute the task's metrics on the split, as the run records them, with intervals.

        Args:
            model: by default the trained one.
            on_progress: called with the number of finished samples and the total.
        """
        done, estimates = 0, MetricIntervals()

        def observe(block: MicroBatch, values: Mapping[str, Any]) -> None:
            nonlocal done
            estimates(block, values)
            done += block.num_samples
            on_progress(done, evaluator.num_samples)

        with closing(make_evaluator(self.trained, self.split)) as evaluator:
            metrics = self.trained.evaluate(evaluator, self.split, observe, module=model)
        return {name: estimates.estimate(name, value) for name, value in metrics.items()}


@contextmanager
def open_source(run: Path, checkpoint: str | None, task: str = "") -> Iterator[TrainedSource]:
    """Open the model of a run.

    Args:
        checkpoint: "best", "last" or a step; None is the best, if any, else the last.
        task: where the task's class is now, if not where it was when the run was trained.

    Raises:
        UserError: the run or checkpoint does not exist, or the task has no inference signature.
        CheckpointError: no checkpoint verifies, or it does not fit the task.
    """
    directory = RunDirectory(run)
    manifest = directory.read_complete_manifest()
    with load_trained_model(directory, checkpoint, device="cpu", task=task) as trained:
        split = _compared_split(trained)
        yield TrainedSource(
            trained=trained,
            manifest=manifest,
            inference=inference_on(trained, split),
            split=split,
            step=trained.info.step,
            state_version=trained.info.state_version,
            purity=str(read_purity(directory)),
        )


def inference_on(trained: EvaluableModel, split: str) -> InferenceSignature:
    """Return the signature of the model of a run, from the data of a split if the task defines none."""
    return inference_of(trained.run.task, trained.module, partial(_infer, trained, split))


def _infer(trained: EvaluableModel, split: str, task: Task, model: nn.Module) -> InferenceSignature:
    return infer_signature(task, model, first_batch(trained, split))


def first_batch(trained: EvaluableModel, split: str) -> Any:
    """Return the first evaluation batch of a split that the run has."""
    batches = trained.run.build_eval_batches(split)
    assert batches is not None
    with closing(batches):
        return next(iter(batches.read(range(1)))).batch


def inference_of(
    task: Task, model: nn.Module, infer: Callable[[Task, nn.Module], InferenceSignature]
) -> InferenceSignature:
    """Return a task's inference signature in evaluation mode, without gradients.

    Args:
        infer: returns the signature if the task defines none.

    Raises:
        ExportError: the task has an invalid one, or none, and none can be inferred.
    """
    name = type(task).__name__
    model.eval().requires_grad_(False)
    inference = task.inference_signature(model)
    if inference is None:
        inference = infer(task, model)
    if not inference.inputs or not inference.outputs:
        raise ExportError(
            f"{name}.inference_signature must declare inputs and outputs, but returned {inference!r:.80}."
        )
    inference.module.eval().requires_grad_(False)
    return inference


def source_sha256(task: Task) -> str | None:
    """Return the SHA-256 of the file that defines the task."""
    try:
        return hashlib.sha256(Path(inspect.getfile(type(task))).read_bytes()).hexdigest()
    except (OSError, TypeError):
        return None


def _compared_split(trained: LoadedModel) -> str:
    for split in SPLITS:
        batches = trained.run.build_eval_batches(split)
        if batches is not None:
            batches.close()
            return split
    raise ExportError(
        f"{type(trained.run.task).__name__} has neither a test nor a val split, but an export must be compared "
        "with the trained model. Return a data set for 'test' from build_dataset."
    )
