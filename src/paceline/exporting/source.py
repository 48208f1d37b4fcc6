"""The trained model of a run: which checkpoint, its weights, and what it does for others."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.checkpoint.checkpointer import load
from paceline.checkpoint.choice import choose
from paceline.checkpoint.manifest import CheckpointInfo
from paceline.config import config_from_mapping
from paceline.config.fine_tuning import Lora
from paceline.data.evaluation import EvalBatches
from paceline.distributed.mesh import Mesh
from paceline.distributed.world import World
from paceline.errors import ExportError
from paceline.inference import Inference
from paceline.run_directory import RunDirectory
from paceline.task import Task, TaskReference
from paceline.training.evaluation import Evaluator
from paceline.training.parent import evaluated_weights
from paceline.training.randomness import seed_model
from paceline.training.state import built_model

COMPARED_BATCH = 64
"""Samples of the test split that are computed at once; the last batch is smaller."""

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Trained:
    """A trained model, on the CPU, in evaluation mode.

    Attributes:
        task: it was trained by.
        spec: the task's name.
        fields: the task's hyperparameters.
        model: the trained one.
        inference: the function around it.
        run: the run's id.
        info: of the checkpoint.
        split: what it is compared and measured on, "test", or "val" where there is no test split.
        dataset: that split.
        seed: the run's.
        data: what the run recorded of its data.
    """

    task: Task
    spec: str
    fields: Mapping[str, Any]
    model: nn.Module
    inference: Inference
    run: str
    info: CheckpointInfo
    split: str
    dataset: Any
    seed: int
    data: Mapping[str, Any]

    def batches(self) -> EvalBatches:
        """The split, in its order."""
        return EvalBatches(
            self.dataset,
            COMPARED_BATCH,
            seed=self.seed,
            device=_CPU,
            workers=0,
            collate=self.task.collate,
            split=self.split,
        )

    def measure(self) -> dict[str, float]:
        """The task's metrics of the trained model on the split."""
        world = World(
            rank=0,
            world_size=1,
            local_rank=0,
            local_world_size=1,
            device=_CPU,
            backend="gloo",
            generation=0,
            one_host=True,
        )
        evaluator = Evaluator(
            self.task, _CPU, self.batches(), seed=self.seed, autocast=torch.no_grad, split=self.split
        )
        try:
            return evaluator.run(Mesh(world, {}), self.model, lambda: 0)
        finally:
            evaluator.close()


def read_trained(run: Path, checkpoint: str | None) -> Trained:
    """Read the model of a run.

    Args:
        run: its directory.
        checkpoint: "best", "last" or a step; None is the best where there is one, and else the last.

    Raises:
        UserError: there is no such run or checkpoint, or the task says not what its model does for others.
        CheckpointError: none verifies.
    """
    directory = RunDirectory(run)
    manifest = directory.read_complete_manifest()
    config = config_from_mapping(manifest["config"], str(directory.manifest))
    found = load(choose(directory.checkpoints, checkpoint))
    spec, fields = manifest["task"]["spec"], manifest["task"]["fields"]
    task = TaskReference(spec, fields).load()
    seed_model(config.seed)
    model = built_model(task)
    _load_weights(model, found.state, config.adapters)
    split, dataset = _compared_split(task)
    return Trained(
        task=task,
        spec=spec,
        fields=fields,
        model=model,
        inference=inference_of(task, model),
        run=manifest["id"],
        info=found.manifest.info,
        split=split,
        dataset=dataset,
        seed=config.seed,
        data=manifest.get("data", {}),
    )


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


def _load_weights(model: nn.Module, state: Mapping[str, Any], lora: Lora | None) -> None:
    try:
        model.load_state_dict(evaluated_weights(state, lora))
    except RuntimeError as error:
        raise ExportError(
            f"the checkpoint does not fit the task as it is now: {error}\n"
            "Export with the code that the run was trained with."
        ) from error


def _compared_split(task: Task) -> tuple[str, Any]:
    for split in ("test", "val"):
        dataset = task.build_dataset(split)
        if dataset is not None:
            return split, dataset
    raise ExportError(
        f"{type(task).__name__} has neither a test nor a val split, and nothing is exported that was "
        "not compared "
        "with the trained model. Let build_dataset return one for 'test'."
    )
