"""The trained model of a run: which checkpoint, its weights, and what it does for others."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from paceline.config import RunConfig
from paceline.data.evaluation import EvalBatches
from paceline.errors import ExportError
from paceline.inference import Inference
from paceline.run_directory import RunDirectory
from paceline.task import Task
from paceline.training.trained import Trained, evaluator_of, open_trained

EVALUATION = "evaluation"
"""In a package's ``provenance.data``: the options of the run that its evaluation follows from."""

PACKAGE_METRICS = "package_metrics"
"""Likewise: the metrics of quantized weights; those of the manifest are of the weights before that."""

_DECIDE_IT = (
    *("seed", "global_batch_size", "shards", "precision", "threads"),
    *("val_fraction", "epochs", "max_steps"),
)
_SPLITS = ("test", "val")


@dataclass(frozen=True)
class Source:
    """A trained model that is exported, on the CPU, in evaluation mode.

    Attributes:
        trained: the model, and the evaluation that its run would do.
        manifest: the run's ``run.toml``.
        inference: the function around the model.
        split: what it is compared and measured on: "test", or "val" where there is no test split.
    """

    trained: Trained
    manifest: Mapping[str, Any]
    inference: Inference
    split: str

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

    def measure(self, model: nn.Module | None = None) -> dict[str, float]:
        """The task's metrics on the split, as the run records them.

        Args:
            model: what is measured; by default the trained one.
        """
        with closing(evaluator_of(self.trained, self.split)) as evaluator:
            return self.trained.evaluate(evaluator, self.split, module=model)


@contextmanager
def open_source(run: Path, checkpoint: str | None) -> Iterator[Source]:
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
    with open_trained(directory, checkpoint, device="cpu") as trained:
        inference = inference_of(trained.run.task, trained.module)
        yield Source(trained, manifest, inference, _compared_split(trained))


def inference_of(task: Task, model: nn.Module) -> Inference:
    """What a task's model does for others, in evaluation mode, without gradients.

    Raises:
        ExportError: the task does not say it, or says something else.
    """
    name = type(task).__name__
    model.eval().requires_grad_(False)
    inference = task.build_inference(model)
    if inference is None:
        raise ExportError(
            f"{name} does not say what its model does for others. Define build_inference(self, model) and "
            "inference_batch(self, batch) in the task; the weights of a run need no training for it."
        )
    if not inference.inputs or not inference.outputs:
        raise ExportError(
            f"{name}.build_inference must name inputs and outputs, but named {inference!r:.80}."
        )
    inference.module.eval().requires_grad_(False)
    return inference


def source_sha256(task: Task) -> str | None:
    """Of the file that defines the task."""
    try:
        return hashlib.sha256(Path(inspect.getfile(type(task))).read_bytes()).hexdigest()
    except (OSError, TypeError):
        return None


def _compared_split(trained: Trained) -> str:
    for split in _SPLITS:
        batches = trained.run.build_eval_batches(split)
        if batches is not None:
            batches.close()
            return split
    raise ExportError(
        f"{type(trained.run.task).__name__} has neither a test nor a val split, and nothing is exported that "
        "was not compared with the trained model. Let build_dataset return one for 'test'."
    )
