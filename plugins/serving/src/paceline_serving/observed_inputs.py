"""An export's observations of a model's inputs: valid indices, ranges of the data, and an example."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from paceline.core.errors import ExportError
from paceline.core.inference import InferenceSignature, TensorSpec
from paceline.export.equivalence import batch_inputs
from paceline.export.export import markdown_table
from paceline.export.trained_source import TrainedSource
from paceline.runs.package_manifest import PackageManifest
from paceline_serving.model import DATATYPES, ModelSpec, PackageInputs, Range, client_specs, example, make_spec
from paceline_serving.tables import CellError, columns_of, to_inputs, to_record

_MAX_SHOWN = 60  # characters of an example in the card
_MAX_SAMPLES = 1000  # that are read
_MAX_ELEMENTS = 200_000  # of an example
_MAX_EXAMPLE_BYTES = 2**20
_MAX_WHOLE = 1e15  # below it a number is written without .0


class ObservedInputs(PackageInputs):
    """The inputs of a package that is being exported."""

    def card(self, manifest: PackageManifest) -> list[str]:
        """Describe a row as clients send it."""
        if any(tensor.dtype not in DATATYPES for tensor in {**self.specs, **manifest.outputs}.values()):
            return []  # such as bfloat16, which cannot be served
        spec = make_spec(manifest, self)
        rows = [
            (
                field.name,
                field.type_text,
                field.unit,
                field.values_text,
                "" if field.example is None else _code(field.example),
            )
            for field in spec.fields
        ]
        parts = [
            "A row, as `paceline predict` and `POST /predict` take it:",
            markdown_table(("name", "type", "unit", "values", "example"), rows),
        ]
        if any(tensor.dtype == "str" for tensor in spec.inputs.values()):
            parts.append("Texts and categories are encoded by the package; the program gets the numbers above.")
        return parts


def observe_inputs(source: TrainedSource) -> ObservedInputs:
    """Return the inputs of a trained model as its package describes them.

    Raises:
        ExportError: names occur twice, an encoding gives indices that the model does not have, or the task's example
            does not fit.
    """
    inference = source.inference
    for side, described in (("input", inference.inputs), ("output", inference.outputs)):
        names = chain.from_iterable(spec.columns or [name] for name, spec in described.items())
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise ExportError(f"inference_signature names the {side} or column {twice[0]!r} twice. Rename one of them.")
    specs = _limit_indices(inference)
    ranges: dict[str, Range] = {}
    found: dict[str, Any] = {}
    samples = 0
    batches = source.batches()
    try:
        for batch in batches.read(range(batches.num_batches)):
            tensors = dict(zip(specs, batch_inputs(source, batch.batch), strict=True))
            for name, spec in specs.items():
                _extend_ranges(ranges, name, spec, tensors[name])
            found = found or _example_of(specs, {name: tensor[0] for name, tensor in tensors.items()})
            samples += batch.num_samples
            if samples >= _MAX_SAMPLES:
                break
    finally:
        batches.close()
    if inference.example is None:
        is_valid = found and _problem_of(found, specs) is None
        return ObservedInputs(specs=specs, ranges=ranges, example=found if is_valid else {})
    record = inference.example
    row = {
        name: [record.get(column) for column in spec.columns] if spec.columns else record.get(name)
        for name, spec in specs.items()
    }
    if problem := _problem_of(row, specs):
        raise ExportError(f"the example of inference_signature does not fit its inputs: {problem}.")
    return ObservedInputs(specs=specs, ranges=ranges, example=row)


def _extend_ranges(ranges: dict[str, Range], name: str, spec: TensorSpec, tensor: Tensor) -> None:
    """Extend the ranges by a batch of numbers that have a name each."""
    if spec.encoding is not None or spec.dtype == "bool" or (spec.shape and not spec.columns):
        return
    table = tensor.double().reshape(len(tensor), -1).numpy()
    for column, numbers in zip(spec.columns or [name], table.T, strict=True):
        numbers = numbers[np.isfinite(numbers)]
        if numbers.size:
            least, most = (float(f"{end:.6g}") for end in (numbers.min(), numbers.max()))
            before = ranges.get(column, (least, most))
            ranges[column] = (min(before[0], least), max(before[1], most))


def _example_of(specs: Mapping[str, TensorSpec], row: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a row of tensors as a client would send it; empty if it is too long."""
    if any(spec.dtype not in DATATYPES for spec in specs.values()):
        return {}
    if sum(tensor.numel() for tensor in row.values()) > _MAX_ELEMENTS:
        return {}
    values = {name: _value_of(specs[name], tensor) for name, tensor in row.items()}
    return values if len(msgspec.json.encode(values)) <= _MAX_EXAMPLE_BYTES else {}


def _value_of(spec: TensorSpec, tensor: Tensor) -> Any:
    if spec.encoding is not None:
        # A category for each element, or a text of all of them.
        is_text = bool(spec.encoding.shape)
        numbers = tensor.tolist()
        return (
            [spec.encoding.decode(n) for n in numbers] if spec.shape and not is_text else spec.encoding.decode(numbers)
        )
    array = tensor.numpy()
    if not spec.dtype.startswith("float"):
        return array.tolist()
    # The shortest decimals that mean these numbers; a missing one is null.
    numbers = [float(str(number)) for number in array.ravel()]
    shortest = [None if math.isnan(n) else int(n) if n.is_integer() and abs(n) < _MAX_WHOLE else n for n in numbers]
    return np.asarray(shortest, object).reshape(array.shape).tolist()


def _problem_of(row: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> str | None:
    """Return why a server would not take a row, or None."""
    inputs, encodings = client_specs(specs)
    model = ModelSpec(name="model", version="1", inputs=inputs, outputs={}, encodings=encodings)
    try:
        to_inputs(columns_of([to_record(model, row)]), model)
    except CellError as error:
        return str(error)
    return None


def _limit_indices(inference: InferenceSignature) -> dict[str, TensorSpec]:
    """Return the inputs with ranges of indices: one out of range would fail in an embedding of the model."""
    sizes: dict[str, int] = {}
    inputs: dict[str, Tensor] = {}

    def observe(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        for name, tensor in inputs.items():
            given = arguments[0] if arguments else None
            is_same = isinstance(given, Tensor) and given.data_ptr() == tensor.data_ptr()
            if isinstance(module, nn.Embedding) and is_same:
                sizes[name] = min(sizes.get(name, module.num_embeddings), module.num_embeddings)

    hooks = [module.register_forward_pre_hook(observe) for module in inference.module.modules()]
    try:
        inputs |= {name: torch.from_numpy(example(spec, 2)) for name, spec in inference.inputs.items()}
        with torch.no_grad():
            inference.module(*inputs.values())
    except Exception:  # the user's model may not take these rows, and any that it takes are compared anyway
        return dict(inference.inputs)
    finally:
        for hook in hooks:
            hook.remove()
    specs = dict(inference.inputs)
    for name, size in sizes.items():
        spec = specs[name]
        if spec.encoding is not None and spec.encoding.size > size:
            raise ExportError(
                f"the input {name!r} is encoded as numbers up to {spec.encoding.size - 1}, but the model has an "
                f"embedding of {size}. Build the model with the size of the encoding, and train it again."
            )
        if spec.minimum is None and spec.maximum is None:
            specs[name] = replace(spec, minimum=0, maximum=size - 1)
    return specs


def _code(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return "`" + (text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "...").replace("`", "'") + "`"
