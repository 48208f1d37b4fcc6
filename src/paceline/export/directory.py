"""Export of a trained run as a directory of files that another library loads by itself."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline import __version__
from paceline.core.built_in import DIRECTORY_FORMATS
from paceline.core.errors import ConfigError, ExportError
from paceline.core.files import remove_directory
from paceline.core.plugins import import_object
from paceline.export.equivalence import distance, problem_of
from paceline.export.export import ExportRequest
from paceline.export.formats import Quantization
from paceline.export.trained_source import SPLITS, first_batch
from paceline.runs.checkpoint_manifest import temporary_directory
from paceline.runs.checkpoint_state import model_sha256
from paceline.runs.directory import RunDirectory
from paceline.runs.package_manifest import FormatDifference
from paceline.training.loaded_model import LoadedModel, load_trained_model

PROVENANCE = "paceline.json"
"""The file that says which run a directory comes from; a directory that has it may be written again."""

_SAMPLES = 8
"""Samples of the training data that are compared if there is no test and no validation split."""

Write = Callable[[LoadedModel, Path, Quantization | None], nn.Module]
"""Writes a model's files into an empty directory, and returns the model as the other library loads it from there.

Raises:
    ExportError: the model cannot be written in this format.
"""


@dataclass(frozen=True, kw_only=True)
class ExportedDirectory:
    """A directory that was written, with the origin and the check of its model.

    Attributes:
        directory: where it is.
        format: a name of :data:`DIRECTORY_FORMATS`.
        model_sha256: of the trained model's weights.
        split: whose samples were compared.
        difference: from the trained model's outputs.
    """

    directory: str
    format: str
    run: str
    task: str
    step: int
    model_sha256: str
    split: str
    difference: FormatDifference


def export_directory(
    request: ExportRequest, output: Path | None = None, on_stage: Callable[[str], None] = lambda stage: None
) -> ExportedDirectory:
    """Write a run's model as another library's directory, compare it as loaded from there, and give it its name.

    Args:
        request: with one format, of :data:`DIRECTORY_FORMATS`.
        output: the directory; by default the format's name inside the run's directory.
        on_stage: called with the name of each stage.

    Raises:
        UserError: run, checkpoint, task or options cannot work, or the directory holds something else.
        ExportError: the model cannot be written, or what was written does not compute the same.
    """
    if len(request.formats) > 1:
        raise ConfigError(f"--format {' '.join(request.formats)}: hf and peft are directories. Export each alone.")
    (kind,) = request.formats
    write: Write = import_object(DIRECTORY_FORMATS[kind])
    target = request.run / kind if output is None else output
    if target.exists() and not (target / PROVENANCE).is_file() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} holds something else, and would be replaced. Name another with --output.")
    directory = RunDirectory(request.run)
    manifest = directory.read_complete_manifest()
    on_stage("reading the run")
    with load_trained_model(directory, request.checkpoint, device="cpu", task=request.task) as trained:
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary_directory(target.parent) as draft:
            on_stage(f"writing {kind}")
            reloaded = write(trained, draft, request.quantization)
            on_stage("comparing")
            split, batch = _example(trained)
            difference, scale = _compare(trained, reloaded.eval(), batch)
            if problem := problem_of(difference, scale, request.quantization, request.tolerance):
                raise ExportError(
                    f"the model that {kind} loads does not compute the same as the trained one on the {split} split: "
                    f"{problem}. Allow the difference with --tolerance. Nothing was exported."
                )
            exported = ExportedDirectory(
                directory=str(target),
                format=kind,
                run=str(manifest["id"]),
                task=str(manifest["task"]["spec"]),
                step=trained.info.step,
                model_sha256=model_sha256(trained.module.state_dict()),
                split=split,
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


def _example(trained: LoadedModel) -> tuple[str, Any]:
    """Return a split and a batch of its first samples."""
    for split in SPLITS:
        batches = trained.run.build_eval_batches(split)
        if batches is not None:
            batches.close()
            return split, first_batch(trained, split)
    data = trained.run.data.train
    if data is None:
        raise ExportError(
            "the task has streams alone, but an export must be compared with the trained model. Return a data set "
            "for 'test' from build_dataset."
        )
    return "train", trained.run.task.collate([data[index] for index in range(min(_SAMPLES, len(data)))])


def _compare(trained: LoadedModel, reloaded: nn.Module, batch: Any) -> tuple[FormatDifference, float]:
    """Return how the outputs of two models differ where the task calls them, and the largest output (at least 1)."""
    largest, scale = 0.0, 1.0
    expected, actual = (_outputs(trained, module, batch) for module in (trained.module, reloaded))
    if not expected or expected.keys() != actual.keys():
        raise ExportError(f"the task's model returned {', '.join(expected)}, and the exported {', '.join(actual)}.")
    for name, tensor in expected.items():
        largest = max(largest, distance(tensor, actual[name]))
        if tensor.numel():
            scale = max(scale, tensor.abs().nan_to_num(0.0, 0.0, 0.0).max().item())
    samples = max((len(tensor) for tensor in expected.values() if tensor.dim()), default=0)
    return FormatDifference(largest=largest, equal_labels=None, samples=samples), scale


def _outputs(trained: LoadedModel, module: nn.Module, batch: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    hook = module.register_forward_hook(lambda _module, _inputs, output: found.update(_floats("output", output)))
    try:
        with torch.no_grad():
            trained.run.task.loss(module, batch)
    finally:
        hook.remove()
    return found


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
