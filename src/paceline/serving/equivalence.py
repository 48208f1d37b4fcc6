"""Each format against the trained model, on every sample of the test split."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.errors import ExportError
from paceline.core.inference import InferenceSignature, TensorSpec
from paceline.runs.package_manifest import FormatDifference
from paceline.serving.formats import Compute
from paceline.serving.trained_source import TrainedSource

ROUNDING = 1e-4
"""What an output may differ by where nothing was rounded on purpose: a share of the largest, or of 1."""

LEAST_EQUAL = {None: 0.999, "bf16": 0.995, "int8": 0.99}
"""Which share of the samples must get the same label, by quantization."""

QUANTIZED = {"bf16": 0.05, "int8": 0.1}
"""The same as ROUNDING, where weights were rounded on purpose."""

OnProgress = Callable[[int, int], None]
"""Is told how many samples are done, and how many there are."""


class _Tally:
    """What is known so far of one format."""

    def __init__(self) -> None:
        self.largest = 0.0
        self.scale = 1.0
        self.equal = 0
        self.samples = 0

    def add(self, expected: Mapping[str, Tensor], given: Mapping[str, Tensor], label: str | None) -> None:
        """Take in one batch."""
        for name, tensor in expected.items():
            if name == label:
                self.equal += int((given[name] == tensor).sum())
                continue
            self.largest = max(self.largest, distance(tensor, given[name]))
            if tensor.numel() and tensor.is_floating_point():
                largest = tensor.abs().nan_to_num(0.0, 0.0, 0.0).max().item()
                self.scale = max(self.scale, largest)
        self.samples += len(next(iter(expected.values())))


def compare(
    trained: TrainedSource, candidates: Mapping[str, Compute], on_progress: OnProgress
) -> dict[str, tuple[FormatDifference, float]]:
    """Compute the whole split with the trained model and with each format.

    Returns:
        For each format how far it is off, and the largest output (at least 1).

    Raises:
        ExportError: the task's function does not give what it says, or a format cannot compute a batch.
    """
    inference = trained.inference
    tallies = {name: _Tally() for name in candidates}
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
                    given = compute(inputs)
                except Exception as error:
                    raise ExportError(
                        f"the {name} program cannot compute {batch.num_samples} samples of the "
                        f"{trained.split} "
                        f"split: {error}"
                    ) from error
                tallies[name].add(expected, given, inference.label)
            done += batch.num_samples
            on_progress(done, batches.num_samples)
    finally:
        batches.close()
    return {
        name: (
            FormatDifference(
                largest=tally.largest,
                equal_labels=tally.equal / tally.samples if inference.label and tally.samples else None,
                samples=tally.samples,
            ),
            tally.scale,
        )
        for name, tally in tallies.items()
    }


def problem_of(
    difference: FormatDifference, scale: float, quantization: str | None, tolerance: float | None
) -> str | None:
    """What is wrong with a format, or None where it is near enough.

    Args:
        difference: how far it is off.
        scale: the largest output.
        quantization: what was rounded on purpose.
        tolerance: what outputs may differ by, where the user said so; labels then do not count.
    """
    allowed = QUANTIZED.get(quantization or "", ROUNDING) * scale if tolerance is None else tolerance
    # With labels, what counts of a quantized model is whether it says the same.
    by_label = quantization is not None and difference.equal_labels is not None and tolerance is None
    if not by_label and not difference.largest <= allowed:
        return f"an output differs by {difference.largest:.3g}, more than {allowed:.3g}"
    least = LEAST_EQUAL[quantization]
    if tolerance is None and difference.equal_labels is not None and difference.equal_labels < least:
        return f"only {difference.equal_labels:.2%} of the labels are equal, less than {least:.1%}"
    return None


def layer_at_fault(
    trained: TrainedSource,
    alone: Callable[[str, tuple[Any, ...]], Tensor],
    quantization: str | None,
    tolerance: float | None,
) -> str | None:
    """The first layer, in the order of the forward, that a format computes differently by itself.

    Where weights were rounded, every layer differs; then it is the one that does most.

    Args:
        trained: gives the layers' inputs, for one batch.
        alone: a layer's name and its inputs -> its output in the format.
        quantization: what was rounded on purpose.
        tolerance: what may differ, where the user said so.
    """
    worst, named = 0.0, None
    for name, module, arguments, expected in _calls(trained):
        label = f"{name} ({type(module).__name__})"
        scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
        try:
            off = distance(expected, alone(name, arguments))
        except ExportError as error:
            return f"{label}, which by itself fails: {str(error).splitlines()[0]}"
        if quantization is None and not off <= min(ROUNDING * scale, tolerance or math.inf):
            return f"the first layer that differs is {label}"
        if off / scale > worst:
            worst, named = off / scale, f"the layer that differs most is {label}"
    return named if quantization else None


def batch_inputs(trained: TrainedSource, batch: Any) -> list[Tensor]:
    """The inputs in a batch, checked against the task's own word.

    Raises:
        ExportError: they are not those that inference_signature names.
    """
    given, _ = trained.task.inference_batch(batch)
    inputs = list(given)
    specs = trained.inference.inputs
    if len(inputs) != len(specs):
        raise ExportError(
            f"{type(trained.task).__name__}.inference_batch gave {len(inputs)} inputs; inference_signature names "
            f"{len(specs)}: {', '.join(specs)}."
        )
    for (name, spec), tensor in zip(specs.items(), inputs, strict=True):
        _check_tensor(f"the input {name!r}", spec, tensor, len(inputs[0]))
    return inputs


def check_outputs(inference: InferenceSignature, outputs: Any, samples: int) -> None:
    """Hold what the function gave against what the task says.

    Raises:
        ExportError: it is something else.
    """
    if not isinstance(outputs, Mapping) or list(outputs) != list(inference.outputs):
        there = ", ".join(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
        raise ExportError(
            f"inference_signature names the outputs {', '.join(inference.outputs)}, in this order, but "
            "its module "
            f"returned {there}."
        )
    for name, spec in inference.outputs.items():
        _check_tensor(f"the output {name!r}", spec, outputs[name], samples)


def distance(expected: Tensor, given: Tensor) -> float:
    """The largest absolute difference of two tensors; infinite where one is NaN and the other is not."""
    if expected.shape != given.shape:
        return math.inf
    equal = (expected == given) | (expected.isnan() & given.isnan())
    if bool(equal.all()):
        return 0.0
    largest = (expected.double() - given.double()).abs()[~equal].max().item()
    return math.inf if math.isnan(largest) else largest


def _check_tensor(what: str, spec: TensorSpec, tensor: Any, samples: int) -> None:
    is_tensor = isinstance(tensor, Tensor)
    there = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}" if is_tensor else repr(tensor)[:80]
    sizes = (samples, *spec.shape)
    if (
        not is_tensor
        or str(tensor.dtype) != f"torch.{spec.dtype}"
        or tensor.dim() != len(sizes)
        or any(want is not None and want != have for want, have in zip(sizes, tensor.shape, strict=True))
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in sizes)
        raise ExportError(
            f"{what} should be {spec.dtype} ({wanted}), as inference_signature says, but is {there}. "
            "Correct its TensorSpec."
        )


def _calls(trained: TrainedSource) -> list[tuple[str, nn.Module, tuple[Any, ...], Tensor]]:
    """Each layer without layers of its own, as it was called first: name, module, inputs, output."""
    calls: list[tuple[str, nn.Module, tuple[Any, ...], Tensor]] = []
    seen: set[nn.Module] = set()

    def noted(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            plain = all(isinstance(value, Tensor) for value in arguments) and isinstance(output, Tensor)
            if plain and module not in seen:
                seen.add(module)
                calls.append((name, module, tuple(value.clone() for value in arguments), output.clone()))

        return hook

    module = trained.inference.module
    leaves = [(name, layer) for name, layer in module.named_modules() if not list(layer.children())]
    handles = [layer.register_forward_hook(noted(name)) for name, layer in leaves]
    batches = trained.batches()
    try:
        batch = next(iter(batches.read(range(1))))
        with torch.no_grad():
            module(*batch_inputs(trained, batch.batch))
    finally:
        batches.close()
        for handle in handles:
            handle.remove()
    return calls
