"""The trained model of a run: which checkpoint, its weights, and what it does for others."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from paceline.core.callback import Callback
from paceline.core.config import RunConfig
from paceline.core.errors import ExportError, PackageError
from paceline.core.inference import InferenceSignature
from paceline.core.option_sets import select
from paceline.core.stats import Estimate
from paceline.core.task import Task
from paceline.core.task_loading import load_task_class
from paceline.data.loader import EvalBatches
from paceline.data.samples import MicroBatch
from paceline.runs.directory import RunDirectory
from paceline.runs.package_manifest import Provenance
from paceline.training.evaluation import MetricIntervals
from paceline.training.loaded_model import (
    EvaluableModel,
    LoadedModel,
    load_evaluable_model,
    load_trained_model,
    make_evaluator,
)
from paceline.training.run_context import RunContext

EVALUATION = "evaluation"
"""In a package's ``provenance.data``: the options of the run that its evaluation follows from."""

PACKAGE_METRICS = "package_metrics"
"""Likewise: the metrics of quantized weights; those of the manifest are of the weights before that."""

INTERVALS = "intervals"
"""Likewise: metric -> the ends of its 95 % interval, and what gave it."""

_DECIDE_IT = select(lambda its: its.evaluation)
"""Data, their blocks and precision; what a callback is told of the run's length; what a good model is."""

_SPLITS = ("test", "val")

Load = Callable[[nn.Module], None]


@dataclass(frozen=True, kw_only=True)
class TrainedSource:
    """A trained model that is exported, on the CPU, in evaluation mode.

    Attributes:
        trained: the model, and the evaluation that its run would do.
        manifest: of the run's ``run.toml`` at least the tables ``task`` and ``config``.
        inference: the function around the model.
        split: what it is compared and measured on: "test", or "val" where there is no test split.
        step: optimizer steps that the model was trained for.
        state_version: of the checkpoint.
    """

    trained: EvaluableModel
    manifest: Mapping[str, Any]
    inference: InferenceSignature
    split: str
    step: int
    state_version: int

    @property
    def task(self) -> Task:
        """What the model was trained by."""
        return self.trained.run.task

    @property
    def model(self) -> nn.Module:
        """The trained one."""
        return self.trained.module

    @property
    def spec(self) -> str:
        """The task's name."""
        return str(self.manifest["task"]["spec"])

    @property
    def fields(self) -> Mapping[str, Any]:
        """The task's hyperparameters."""
        return dict(self.manifest["task"]["fields"])

    @property
    def data(self) -> dict[str, Any]:
        """What is known of the data, and how the model is evaluated on it."""
        config = self.trained.run.config
        default = RunConfig()
        decide = {name: getattr(config, name) for name in _DECIDE_IT}
        return {
            **self.manifest.get("data", {}),
            "compared_split": self.split,
            EVALUATION: {n: value for n, value in decide.items() if value != getattr(default, n)},
        }

    def batches(self) -> EvalBatches:
        """The split, in the blocks in which the run evaluates it; close them."""
        batches = self.trained.run.build_eval_batches(self.split)
        assert batches is not None
        return batches

    def measure(
        self,
        model: nn.Module | None = None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> dict[str, Estimate]:
        """The task's metrics on the split, as the run records them, with intervals.

        Args:
            model: what is measured; by default the trained one.
            on_progress: told of the samples done, and of all.
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
def open_source(run: Path, checkpoint: str | None) -> Iterator[TrainedSource]:
    """Read the model of a run.

    Args:
        run: its directory.
        checkpoint: "best", "last" or a step; None is the best where there is one, and else the last.

    Raises:
        UserError: there is no such run or checkpoint, or the task says not what its model does for others.
        CheckpointError: none verifies, or it does not fit the task.
    """
    directory = RunDirectory(run)
    manifest = directory.read_complete_manifest()
    with load_trained_model(directory, checkpoint, device="cpu") as trained:
        inference = inference_of(trained.run.task, trained.module)
        yield TrainedSource(
            trained=trained,
            manifest=manifest,
            inference=inference,
            split=_compared_split(trained),
            step=trained.info.step,
            state_version=trained.info.state_version,
        )


@contextmanager
def open_exported(package: Path, origin: Provenance, spec: str, load: Load) -> Iterator[TrainedSource]:
    """Build the model of a package as it was when it was exported and measured.

    Args:
        package: the package's directory, for messages.
        origin: what its manifest says of where it comes from.
        spec: the task whose code is used.
        load: puts the weights into the model.

    Raises:
        UserError: the task or its data cannot be built.
        PackageError: it does not say how it was measured, or its weights do not fit the task.
    """
    config, split = origin.data.get(EVALUATION), origin.data.get("compared_split")
    if not isinstance(config, dict) or split not in _SPLITS:
        raise PackageError(
            f"package {package} does not say how it was measured, so it cannot be checked. Export it again."
        )
    if unknown := config.keys() - set(_DECIDE_IT):
        raise PackageError(f"package {package} was measured with {min(unknown)!r:.80}, which is no option.")
    task = {"spec": spec, "name": load_task_class(spec).__qualname__, "fields": dict(origin.fields)}
    manifest = {"task": task, "config": config}

    def fill(run: RunContext, model: nn.Module, callback: Callback) -> tuple[int, int]:
        load(model.requires_grad_(False))  # rounded weights are integers, which have no gradients
        return origin.step, 0

    with load_evaluable_model(RunDirectory(package), manifest, fill, device="cpu") as evaluated:
        yield TrainedSource(
            trained=evaluated,
            manifest=manifest,
            inference=inference_of(evaluated.run.task, evaluated.module),
            split=split,
            step=origin.step,
            state_version=origin.state_version,
        )


def inference_of(task: Task, model: nn.Module) -> InferenceSignature:
    """What a task's model does for others, in evaluation mode, without gradients.

    Raises:
        ExportError: the task does not say it, or says something else.
    """
    name = type(task).__name__
    model.eval().requires_grad_(False)
    inference = task.inference_signature(model)
    if inference is None:
        raise ExportError(
            f"{name} does not say what its model does for others. Define inference_signature(self, model) and "
            "inference_batch(self, batch) in the task; the weights of a run need no training for it."
        )
    if not inference.inputs or not inference.outputs:
        raise ExportError(f"{name}.inference_signature must name inputs and outputs, but named {inference!r:.80}.")
    inference.module.eval().requires_grad_(False)
    return inference


def source_sha256(task: Task) -> str | None:
    """Of the file that defines the task."""
    try:
        return hashlib.sha256(Path(inspect.getfile(type(task))).read_bytes()).hexdigest()
    except (OSError, TypeError):
        return None


def _compared_split(trained: LoadedModel) -> str:
    for split in _SPLITS:
        batches = trained.run.build_eval_batches(split)
        if batches is not None:
            batches.close()
            return split
    raise ExportError(
        f"{type(trained.run.task).__name__} has neither a test nor a val split, and nothing is exported that "
        "was not compared with the trained model. Let build_dataset return one for 'test'."
    )
