"""From a package back to a function: its weights with the task's code, or a program that it holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import cast, get_args

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from paceline.errors import ExportError, PackageError
from paceline.exporting.programs import Compute, load_onnx, load_pt2, require_onnx
from paceline.exporting.quantization import Quantization, quantize
from paceline.exporting.source import inference_of
from paceline.inference import Inference
from paceline.packages.package import Package
from paceline.packages.trust import trusted
from paceline.task import RECIPES, Task, TaskReference, load_task_class

TIED = "tied"
"""In the metadata of the weights: entry -> the entry that it is the same tensor as, as JSON."""


def weights_bytes(model: nn.Module) -> bytes:
    """A model's state as safetensors; what is tied is in it once.

    Raises:
        ExportError: the state holds something that is no tensor.
    """
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise ExportError(
                f"the model's state has {name!r}, a {type(value).__name__}; a package holds tensors "
                "only. Keep it in a "
                "buffer, or build it from the task's fields."
            )
        place = (value.data_ptr(), value.dtype, value.shape, value.stride())
        if value.numel() and place in first:
            tied[name] = first[place]
            continue
        first[place] = name
        tensors[name] = value.detach().clone(memory_format=torch.contiguous_format)
    return safetensors.torch.save(tensors, {TIED: json.dumps(tied)} if tied else None)


def load_with_task(package: Package, task: Task | str | None = None) -> Inference:
    """The function of a package by the task's own code: its weights can run no code of their own.

    Args:
        package: verified.
        task: the task, or its name, which is then given the package's hyperparameters; None is the task that
            the package names, where it is a recipe or this user trusts the package.

    Raises:
        TaskError: the task cannot be found or built.
        PackageError: the weights do not fit the task, or it is not said which code may run.
    """
    if not isinstance(task, Task):
        spec = task_of(package, task)
        load_task_class(spec)  # says what is wrong with the name before fields are blamed
        task = TaskReference(spec, package.manifest.provenance.fields).load()
    model = task.build_model()
    model.eval().requires_grad_(False)
    load_weights(model, package.read_weights(), package.manifest.quantization)
    return inference_of(task, model)


def task_of(package: Package, task: str | None) -> str:
    """The name of the task whose code may run.

    Args:
        package: verified.
        task: what the user names; None is the task that the package names.

    Raises:
        PackageError: the user names none, and the package is not trusted.
    """
    spec = package.manifest.provenance.task if task is None else task
    if task is None and spec not in RECIPES and package.digest not in trusted():
        # Importing it runs it, and the name is only the package's word.
        raise PackageError(
            f"package {package.path} says that it is of the task {spec}, and you have not trusted it. "
            "Name the task yourself, with --task, or say --trust once."
        )
    return spec


def load_weights(model: nn.Module, content: bytes, quantization: str | None) -> None:
    """Put a package's weights into a model that was just built; it is quantized as they are.

    Raises:
        PackageError: they do not fit.
    """
    if quantization is not None:
        if quantization not in get_args(Quantization):
            raise PackageError(
                f"the package is quantized by {quantization!r:.80}, which this version of Paceline "
                "does not know."
            )
        quantize(model, cast(Quantization, quantization))
    try:
        tensors = safetensors.torch.load(content)
        for name, same in _tied(content).items():
            tensors[name] = tensors[same]
        model.load_state_dict(tensors)
    except (SafetensorError, RuntimeError, KeyError, ValueError, AttributeError) as error:
        raise PackageError(
            f"the package's weights do not fit the task: {error}\n"
            "Use the code and the fields that it was trained with."
        ) from error


def load_program(package: Package, program: str) -> Compute:
    """A program of a package, ready to be called.

    Raises:
        UntrustedError: it is a pt2, and this user has not trusted the package.
        PackageError: it has no such program, or was changed.
        ExportError: onnxruntime is missing.
    """
    content = package.read_program(program)
    if program == "pt2":
        return load_pt2(content)
    require_onnx()
    # Weights of more than 2 GB are in files of their own, which the model names.
    name = package.manifest.programs[program]
    beside = {file: package.read(file) for file in package.manifest.files if file.startswith(f"{name}.")}
    return load_onnx(content, list(package.manifest.outputs), beside)


def _tied(content: bytes) -> Mapping[str, str]:
    """From the header, which is JSON: safetensors has a reader of metadata for files only."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    tied = json.loads(header.get("__metadata__", {}).get(TIED, "{}"))
    return {str(name): str(same) for name, same in tied.items()}
