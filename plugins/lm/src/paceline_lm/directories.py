"""Export of a trained run as a directory of files that another library loads by itself."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline import __version__
from paceline.core.config import RunConfig, config_from_mapping
from paceline.core.errors import ConfigError, DataError, ExportError, TaskError
from paceline.core.files import remove_directory
from paceline.core.task import Task
from paceline.core.task_loading import TaskReference, recorded_spec
from paceline.export.equivalence import distance, problem_of
from paceline.export.export import ExportedDirectory, ExportRequest
from paceline.export.formats import Quantization
from paceline.export.trained_source import SPLITS, first_batch
from paceline.runs.checkpoint_manifest import read_manifest, temporary_directory
from paceline.runs.checkpoint_selection import select_checkpoint
from paceline.runs.checkpoint_state import model_sha256
from paceline.runs.directory import RunDirectory
from paceline.runs.package_manifest import FormatDifference
from paceline.runs.rank_log import silence_loggers_and_warnings
from paceline.training.loaded_model import LoadedModel, load_model, load_trained_model
from paceline_lm.transformers import TransformersTask

PROVENANCE = "paceline.json"
"""The file that says which run a directory comes from; a directory that has it may be written again."""

_SAMPLES = 8
"""Samples of the training data that are compared if there is no test and no validation split."""


@dataclass(frozen=True, kw_only=True)
class ModelToWrite:
    """A trained model, with a batch on which it is compared.

    Attributes:
        module: in evaluation mode, on the CPU.
        split: from which the batch is, in words.
    """

    module: nn.Module
    task: Task
    config: RunConfig
    directory: RunDirectory
    path: Path
    split: str
    batch: Any


Write = Callable[[ModelToWrite, Path, Quantization | None], nn.Module]
"""Writes a model's files into an empty directory, and returns the model as the other library loads it from there.

Raises:
    ExportError: the model cannot be written in this format.
"""


def export_directory(
    kind: str,
    write: Write,
    request: ExportRequest,
    output: Path | None = None,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> ExportedDirectory:
    """Write a run's model as another library's directory, compare it as loaded from there, and give it its name.

    Args:
        output: the directory; by default the format's name inside the run's directory.

    Raises:
        UserError: run, checkpoint, task or options cannot work, or the directory holds something else.
        ExportError: the model cannot be written, or what was written does not compute the same.
    """
    target = request.run / kind if output is None else output
    if target.exists() and not (target / PROVENANCE).is_file() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} holds something else, and would be replaced. Name another with --output.")
    directory = RunDirectory(request.run)
    manifest = directory.read_complete_manifest()
    on_stage("reading the run")
    # transformers advises on the configuration of each model that is built, and the run has trained with this one.
    with silence_loggers_and_warnings("transformers"), _open(directory, request) as trained:
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary_directory(target.parent) as draft:
            on_stage(f"writing {kind}")
            reloaded = write(trained, draft, request.quantization)
            on_stage("comparing")
            difference, scale = _compare(trained, reloaded.eval())
            if problem := problem_of(difference, scale, request.quantization, request.tolerance):
                raise ExportError(
                    f"the model that {kind} loads does not compute the same as the trained one on {trained.split}: "
                    f"{problem}. Allow the difference with --tolerance. Nothing was exported."
                )
            exported = ExportedDirectory(
                directory=str(target),
                format=kind,
                run=str(manifest["id"]),
                task=str(manifest["task"]["spec"]),
                step=read_manifest(trained.path).info.step,
                model_sha256=model_sha256(trained.module.state_dict()),
                split=trained.split,
                difference=difference,
            )
            origin = {**asdict(exported), "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "paceline": __version__}
            del origin["directory"]
            (draft / PROVENANCE).write_text(json.dumps(origin, indent=2) + "\n")
            for file in draft.rglob("*"):
                file.chmod(draft.stat().st_mode if file.is_dir() else draft.stat().st_mode & 0o666)
            if target.exists():
                remove_directory(target)
            draft.rename(target)
    return exported


@contextmanager
def _open(directory: RunDirectory, request: ExportRequest) -> Iterator[ModelToWrite]:
    """Open the model with a batch of the run's data; where the data is not, with one that the task makes up."""
    with ExitStack() as stack:
        try:
            trained = stack.enter_context(
                load_trained_model(directory, request.checkpoint, device="cpu", task=request.task)
            )
            config: RunConfig = trained.run.config
            module, task, path = trained.module, trained.run.task, trained.path
            split, batch = _example(trained)
        except (DataError, TaskError, OSError):
            manifest = directory.read_complete_manifest()
            task = TaskReference(request.task or recorded_spec(manifest["task"]), manifest["task"]["fields"]).load()
            module = load_model(directory, request.checkpoint)
            if not isinstance(task, TransformersTask):
                raise
            assert isinstance(module, PreTrainedModel)
            config = config_from_mapping(manifest["config"], str(directory.manifest))
            path = select_checkpoint(directory.checkpoints, request.checkpoint)
            split, vocabulary = "made-up inputs, without the run's data", module.get_input_embeddings().num_embeddings
            tokens = torch.randint(vocabulary, (_SAMPLES, 16), generator=torch.Generator().manual_seed(0))
            batch = {"input_ids": tokens, "labels": tokens}  # an encoder-decoder makes its input of the labels
        yield ModelToWrite(
            module=module, task=task, config=config, directory=directory, path=path, split=split, batch=batch
        )


def _example(trained: LoadedModel) -> tuple[str, Any]:
    """Return a split and a batch of its first samples."""
    for split in SPLITS:
        batches = trained.run.build_eval_batches(split)
        if batches is not None:
            batches.close()
            return f"the {split} split", first_batch(trained, split)
    data = trained.run.data.train
    if data is None:
        raise DataError(
            "the task has streams alone, but an export must be compared with the trained model. Return a data set "
            "for 'test' from build_dataset."
        )
    samples = [data[index] for index in range(min(_SAMPLES, len(data)))]
    return "the train split", trained.run.task.collate(samples)


def _compare(trained: ModelToWrite, reloaded: nn.Module) -> tuple[FormatDifference, float]:
    """Return how the outputs of two models differ where the task calls them, and the largest output (at least 1)."""
    largest, scale = 0.0, 1.0
    expected, actual = (_outputs(trained, module) for module in (trained.module, reloaded))
    if not expected or expected.keys() != actual.keys():
        raise ExportError(f"the task's model returned {', '.join(expected)}, and the exported {', '.join(actual)}.")
    for name, tensor in expected.items():
        largest = max(largest, distance(tensor, actual[name]))
        if tensor.numel():
            scale = max(scale, tensor.abs().nan_to_num(0.0, 0.0, 0.0).max().item())
    samples = max((len(tensor) for tensor in expected.values() if tensor.dim()), default=0)
    return FormatDifference(largest=largest, equal_labels=None, samples=samples), scale


def _outputs(trained: ModelToWrite, module: nn.Module) -> dict[str, Tensor]:
    """Return what the model computes of the arguments with which the task calls it."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hook = module.register_forward_pre_hook(lambda _, given, named: calls.append((given, named)), with_kwargs=True)
    try:
        with torch.no_grad():
            trained.task.loss(module, trained.batch)
    finally:
        hook.remove()
    given, named = calls[-1]
    with torch.no_grad():  # outside of the task, which may have its loss in place of the logits
        return dict(_floats("output", module(*given, **named)))


def _floats(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield name, value.float()
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _floats(f"{name}.{key}", part)
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _floats(f"{name}.{number}", part)
