"""Comparison of each exported format with the trained model, on every sample of the test split."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.errors import ExportError
from paceline.core.inference import InferenceSignature, TensorSpec
from paceline.export.formats import Compute
from paceline.export.inferred_signature import InferredModule
from paceline.export.trained_source import TrainedSource
from paceline.runs.package_manifest import FormatDifference

ROUNDING = 1e-4
"""Largest difference of an output without quantization, relative to the largest output or 1."""

MIN_EQUAL_LABELS = {None: 0.999, "bf16": 0.995, "int8": 0.99}
"""Smallest share of the samples with equal labels, by quantization."""

QUANTIZED = {"bf16": 0.05, "int8": 0.1}
"""ROUNDING for quantized weights."""

OnProgress = Callable[[int, int], None]
"""Called with the number of finished samples and the total."""


class _Comparison:
    """Running comparison of one format."""

    def __init__(self) -> None:
        self.largest = 0.0
        self.scale = 1.0
        self.equal = 0
        self.samples = 0

    def add(self, expected: Mapping[str, Tensor], actual: Mapping[str, Tensor], label: str | None) -> None:
        for name, tensor in expected.items():
            if name == label:
                self.equal += int((actual[name] == tensor).sum())
                continue
            self.largest = max(self.largest, distance(tensor, actual[name]))
            if tensor.numel() and tensor.is_floating_point():
                largest = tensor.abs().nan_to_num(0.0, 0.0, 0.0).max().item()
                self.scale = max(self.scale, largest)
        self.samples += len(next(iter(expected.values())))


def compare(
    trained: TrainedSource, candidates: Mapping[str, Compute], on_progress: OnProgress
) -> dict[str, tuple[FormatDifference, float]]:
    """Compute the whole split with the trained model and with each format.

    Returns:
        For each format its difference, and the largest output (at least 1).

    Raises:
        ExportError: the task's inference module breaks its signature, or a format cannot compute a batch.
    """
    inference = trained.inference
    comparisons = {name: _Comparison() for name in candidates}
    batches = trained.batches()
    done = 0
    try:
        for batch in batches.read(range(batches.num_batches)):
            inputs = batch_inputs(trained, batch.batch)
            with torch.no_grad():
                expected = inference.module(*inputs)
            check_outputs(inference, expected, batch.num_samples)
            for name, compute in candidates.items():
                try:
                    actual = compute(inputs)
                except Exception as error:
                    raise ExportError(
                        f"the {name} program cannot compute {batch.num_samples} samples of the {trained.split} "
                        f"split: {error}"
                    ) from error
                comparisons[name].add(expected, actual, inference.label)
            done += batch.num_samples
            on_progress(done, batches.num_samples)
    finally:
        batches.close()
    return {
        name: (
            FormatDifference(
                largest=comparison.largest,
                equal_labels=comparison.equal / comparison.samples if inference.label and comparison.samples else None,
                samples=comparison.samples,
            ),
            comparison.scale,
        )
        for name, comparison in comparisons.items()
    }


def problem_of(
    difference: FormatDifference, scale: float, quantization: str | None, tolerance: float | None
) -> str | None:
    """Return what is wrong with a format, or None if it is close enough.

    Args:
        scale: largest output.
        tolerance: largest difference, if the user gave one; labels then do not count.
    """
    allowed = QUANTIZED.get(quantization or "", ROUNDING) * scale if tolerance is None else tolerance
    # With labels, a quantized model is judged by its labels.
    uses_labels = quantization is not None and difference.equal_labels is not None and tolerance is None
    if not uses_labels and not difference.largest <= allowed:
        return f"an output differs by {difference.largest:.3g}, more than {allowed:.3g}"
    min_equal = MIN_EQUAL_LABELS[quantization]
    if tolerance is None and difference.equal_labels is not None and difference.equal_labels < min_equal:
        return f"only {difference.equal_labels:.2%} of the labels are equal, less than {min_equal:.1%}"
    return None


def find_faulty_layer(
    trained: TrainedSource,
    compute_layer: Callable[[str, tuple[Any, ...]], Tensor],
    quantization: str | None,
    tolerance: float | None,
) -> str | None:
    """Return the first layer, in the order of the forward, that a format alone computes differently.

    With quantized weights, every layer differs; then return the layer that differs most.

    Args:
        trained: provides the layers' inputs for one batch.
        compute_layer: a layer's name and its inputs -> its output in the format.
        tolerance: largest difference, if the user gave one.
    """
    max_error, message = 0.0, None
    for name, module, arguments, expected in _calls(trained):
        label = f"{name} ({type(module).__name__})"
        scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
        try:
            error_size = distance(expected, compute_layer(name, arguments))
        except ExportError as error:
            return f"{label} fails on its own: {str(error).splitlines()[0]}"
        if quantization is None and not error_size <= min(ROUNDING * scale, tolerance or math.inf):
            return f"the first layer that differs is {label}"
        if error_size / scale > max_error:
            max_error, message = error_size / scale, f"the layer that differs most is {label}"
    return message if quantization else None


def batch_inputs(trained: TrainedSource, batch: Any) -> list[Tensor]:
    """Return the inputs of a batch, checked against the task's signature.

    Raises:
        ExportError: they are not the inputs of inference_signature.
    """
    inferred = isinstance(trained.inference.module, InferredModule)
    inputs = [batch[0]] if inferred else list(trained.task.inference_batch(batch)[0])
    specs = trained.inference.inputs
    if len(inputs) != len(specs):
        raise ExportError(
            f"{type(trained.task).__name__}.inference_batch returned {len(inputs)} inputs; inference_signature has "
            f"{len(specs)}: {', '.join(specs)}."
        )
    for (name, spec), tensor in zip(specs.items(), inputs, strict=True):
        _check_tensor(f"the input {name!r}", spec, tensor, len(inputs[0]))
    return inputs


def check_outputs(inference: InferenceSignature, outputs: Any, samples: int) -> None:
    """Check the outputs against the task's signature.

    Raises:
        ExportError: they differ.
    """
    if not isinstance(outputs, Mapping) or list(outputs) != list(inference.outputs):
        description = ", ".join(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
        raise ExportError(
            f"inference_signature declares the outputs {', '.join(inference.outputs)}, in this order, but its module "
            f"returned {description}."
        )
    for name, spec in inference.outputs.items():
        _check_tensor(f"the output {name!r}", spec, outputs[name], samples)


def distance(expected: Tensor, actual: Tensor) -> float:
    """Return the largest absolute difference of two tensors; infinite if only one is NaN."""
    if expected.shape != actual.shape:
        return math.inf
    equal = (expected == actual) | (expected.isnan() & actual.isnan())
    if bool(equal.all()):
        return 0.0
    largest = (expected.double() - actual.double()).abs()[~equal].max().item()
    return math.inf if math.isnan(largest) else largest


def _check_tensor(subject: str, spec: TensorSpec, tensor: Any, samples: int) -> None:
    is_tensor = isinstance(tensor, Tensor)
    description = (
        f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}" if is_tensor else repr(tensor)[:80]
    )
    sizes = (samples, *spec.shape)
    if (
        not is_tensor
        or str(tensor.dtype) != f"torch.{spec.dtype}"
        or tensor.dim() != len(sizes)
        or any(
            expected_size is not None and expected_size != actual_size
            for expected_size, actual_size in zip(sizes, tensor.shape, strict=True)
        )
    ):
        expected_shape = ", ".join("any" if size is None else str(size) for size in sizes)
        raise ExportError(
            f"{subject} must be {spec.dtype} ({expected_shape}), as in inference_signature, but is {description}. "
            "Correct its TensorSpec."
        )


def _calls(trained: TrainedSource) -> list[tuple[str, nn.Module, tuple[Any, ...], Tensor]]:
    """Return name, module, inputs and output of the first call of each leaf layer."""
    calls: list[tuple[str, nn.Module, tuple[Any, ...], Tensor]] = []
    seen: set[nn.Module] = set()

    def make_hook(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            has_plain_tensors = all(isinstance(value, Tensor) for value in arguments) and isinstance(output, Tensor)
            if has_plain_tensors and module not in seen:
                seen.add(module)
                calls.append((name, module, tuple(value.clone() for value in arguments), output.clone()))

        return hook

    module = trained.inference.module
    leaf_layers = [(name, layer) for name, layer in module.named_modules() if not list(layer.children())]
    handles = [layer.register_forward_hook(make_hook(name)) for name, layer in leaf_layers]
    try:
        with torch.no_grad():
            module(*batch_inputs(trained, trained.first_batch()))
    finally:
        for handle in handles:
            handle.remove()
    return calls
