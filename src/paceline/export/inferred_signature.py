"""The inference signature of a task that defines none: a sample is a pair, and the model takes its first part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.errors import ExportError
from paceline.core.inference import InferenceSignature, TensorSpec
from paceline.core.task import Task

_INPUT, _OUTPUT, _LABEL = "input", "output", "label"


class InferredModule(nn.Module):
    """Names what the model returns, and adds the class with the largest output.

    Args:
        model: takes a batch of inputs, returns a tensor.
        classifies: whether the output has a number for each class.
    """

    def __init__(self, model: nn.Module, *, classifies: bool) -> None:
        super().__init__()
        self.model = model
        self._classifies = classifies

    def forward(self, batch: Tensor) -> dict[str, Tensor]:
        output = self.model(batch)
        return {_OUTPUT: output, **({_LABEL: output.argmax(1)} if self._classifies else {})}


def infer_signature(task: Task, model: nn.Module, batch: Any) -> InferenceSignature:
    """Infer the signature from a batch, and from what ``task.loss`` calls the model with.

    Args:
        model: in evaluation mode.

    Raises:
        ExportError: it is not the obvious case.
    """
    if not (isinstance(batch, list | tuple) and len(batch) == 2 and all(isinstance(part, Tensor) for part in batch)):
        raise _not_inferred(task, "a batch is not a pair of tensors")
    inputs, target = batch
    calls: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []

    def record(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        calls.append((arguments, named, output))

    hook = model.register_forward_hook(record, with_kwargs=True)
    try:
        with torch.no_grad():
            task.loss(model, batch)
    except Exception as error:  # it may need more than a batch, such as its position in the run
        raise _not_inferred(task, f"loss() fails on a single batch: {error}") from error
    finally:
        hook.remove()
    if len(calls) != 1:
        raise _not_inferred(task, f"loss() calls the model {len(calls)} times")
    [(arguments, named, output)] = calls
    if named or len(arguments) != 1 or not _is_same(arguments[0], inputs):
        raise _not_inferred(task, "loss() calls the model with something else than the first tensor of the batch")
    if not isinstance(output, Tensor) or output.shape[:1] != inputs.shape[:1]:
        raise _not_inferred(task, "the model does not return one tensor with a row for each sample")
    is_class = target.dtype == torch.int64 and target.dim() == 1 and target.numel() > 0 and int(target.min()) >= 0
    classifies = output.dim() == 2 and is_class and int(target.max()) < output.shape[1] > 1
    outputs = {_OUTPUT: _spec(output), **({_LABEL: TensorSpec(dtype="int64")} if classifies else {})}
    return restore_signature(model, {_INPUT: _spec(inputs)}, outputs)


def restore_signature(
    model: nn.Module, inputs: Mapping[str, TensorSpec], outputs: Mapping[str, TensorSpec]
) -> InferenceSignature:
    """Return an inferred signature for a model with the same inputs and outputs."""
    label = _LABEL if _LABEL in outputs else None
    module = InferredModule(model, classifies=label is not None).eval()
    return InferenceSignature(module=module, inputs=inputs, outputs=outputs, label=label)


def _not_inferred(task: Task, why: str) -> ExportError:
    return ExportError(
        f"{type(task).__name__} has no inference signature, and none can be inferred: {why}. Define "
        "inference_signature(self, model) and inference_batch(self, batch) in the task; the run need not be trained "
        "again for this."
    )


def _spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape[1:]))


def _is_same(actual: Any, expected: Tensor) -> bool:
    return isinstance(actual, Tensor) and actual.dtype == expected.dtype and torch.equal(actual, expected)
