"""Answers that depend on a row alone: batches of fixed shapes, which are proved to compute each row in the same way.

A kernel may add in another order in a batch of another size, or at another place in the batch. So a row that is sent
alone has other bits than the same row in a batch of 32, and an answer depends on the other requests. Here a model
computes only batches of sizes at which test rows had the same bits in every place, next to other rows and to padding,
and at each of these sizes. A size of one row is always among the candidates. Then the bits depend on the package, the
kind of processor, the libraries and the number of threads.

vLLM and batch_invariant_ops (https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference) replace the
kernels instead; that is as exact, but needs a kernel for each operation and device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np

from paceline.core.inference import TensorSpec
from paceline_serving.model import Array, Arrays, ModelSpec, Servable, example, rows_of

# They do not depend on --max-batch, so that no option of the server changes a bit.
_SIZES = (32, 24, 16, 12, 8, 4, 2, 1)
_SIZES_OF_OPEN_SHAPES = (8, 4, 2, 1)  # proved again for each shape that is sent
_ORDERS = 8  # in which the test rows are computed
_KNOWN_SHAPES = 64
_ALIGNMENT = 64  # bytes
_MOST_INTEGERS = 256  # of an input without bounds: a token or a category that the model surely has is small

Shape = tuple[tuple[int, ...], ...]
"""The shapes of a row's inputs."""


class ExactServable:
    """A model that answers each row with the same bits, whatever else is in its batch."""

    def __init__(self, servable: Servable, spec: ModelSpec) -> None:
        self._servable = servable
        self._spec = spec
        self._sizes = lru_cache(_KNOWN_SHAPES)(self._find_sizes)

    @property
    def example_sizes(self) -> tuple[int, ...]:
        """The sizes of the batches in which rows of the example's shape are computed, the largest first."""
        return self.sizes({name: example(tensor, 1) for name, tensor in self._spec.inputs.items()})

    def sizes(self, inputs: Arrays) -> tuple[int, ...]:
        return self._sizes(tuple(inputs[name].shape[1:] for name in self._spec.inputs))

    def _find_sizes(self, shape: Shape) -> tuple[int, ...]:
        is_open = any(None in tensor.shape for tensor in self._spec.inputs.values())
        return find_exact_sizes(self._servable, self._spec.inputs, shape, _SIZES_OF_OPEN_SHAPES if is_open else _SIZES)

    def predict(self, inputs: Arrays) -> dict[str, Array]:
        """Return outputs by name for a batch of any number of rows."""
        answers: list[dict[str, Array]] = []
        start = 0
        for size in _batches(rows_of(inputs), self.sizes(inputs)):
            piece = {name: array[start : start + size] for name, array in inputs.items()}
            answers.append(_compute(self._servable, piece, size))
            start += size
        if len(answers) == 1:
            return answers[0]
        return {name: np.concatenate([answer[name] for answer in answers]) for name in answers[0]}


def find_exact_sizes(
    servable: Servable, inputs: Mapping[str, TensorSpec], shape: Shape, candidates: Sequence[int]
) -> tuple[int, ...]:
    """Return the sizes at which test rows have the same bits in each place, with any neighbours, and at each size.

    Args:
        candidates: descending; the last one is 1.

    Returns:
        The largest size at which a row's bits depend on the row alone, and the smaller ones with the same bits.
    """
    generator = np.random.default_rng(0)
    rows = {
        name: _random_rows(generator, spec, (candidates[0], *sizes))
        for (name, spec), sizes in zip(inputs.items(), shape, strict=True)
    }
    try:
        _bits_in_order(servable, rows, np.arange(candidates[0]), 1)
    except Exception:  # the model knows fewer categories, or has conditions that a signature cannot tell
        return (1,)
    found: list[int] = []
    bits: Sequence[bytes] = ()
    for size in candidates:
        expected = _bits_in_order(servable, rows, np.arange(candidates[0]), size)
        if found and expected != bits:
            continue
        if size == 1 or _depends_on_rows_alone(servable, rows, size, expected):
            found.append(size)
            bits = expected
    return tuple(found)


def _depends_on_rows_alone(servable: Servable, rows: Arrays, size: int, expected: Sequence[bytes]) -> bool:
    number = rows_of(rows)
    for turn in range(1, _ORDERS):
        # An odd factor gives each row other neighbours, and the offset another place.
        order = (np.arange(number) * (2 * turn + 1) + turn) % number
        if _bits_in_order(servable, rows, order, size) != [expected[row] for row in order.tolist()]:
            return False
    for length in {1, size // 2, size - 1}:  # a batch that is not full
        piece = {name: array[:length] for name, array in rows.items()}
        if _bits_of(_compute(servable, piece, size)) != list(expected[:length]):
            return False
    return True


def _bits_in_order(servable: Servable, rows: Arrays, order: Array, size: int) -> list[bytes]:
    """Compute rows in an order, in batches of a size; return the bits of each row's outputs."""
    bits: list[bytes] = []
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        bits += _bits_of(_compute(servable, {name: array[chosen] for name, array in rows.items()}, size))
    return bits


def _bits_of(outputs: Arrays) -> list[bytes]:
    return [b"".join(array[row].tobytes() for array in outputs.values()) for row in range(rows_of(outputs))]


def _batches(rows: int, sizes: Sequence[int]) -> Iterator[int]:
    """Yield the sizes of the batches for a number of rows; the last one may have room for more."""
    while rows > 0:
        size = min((size for size in sizes if size >= rows), default=sizes[0])
        yield size
        rows -= size


def _compute(servable: Servable, inputs: Arrays, size: int) -> dict[str, Array]:
    """Compute rows in a batch of ``size``, filled with copies of the first row, which the model surely accepts."""
    rows = rows_of(inputs)
    batch = {name: _in_new_memory(array, size) for name, array in inputs.items()}
    return {name: array[:rows] for name, array in servable.predict(batch).items()}


def _in_new_memory(array: Array, size: int) -> Array:
    """Copy rows into memory that is aligned as torch's own: a kernel's choice may depend on it, and so do the bits."""
    length = size * math.prod(array.shape[1:]) * array.itemsize
    memory = np.empty(length + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    batch = memory[start : start + length].view(array.dtype).reshape(size, *array.shape[1:])
    batch[: len(array)] = array
    batch[len(array) :] = array[:1]
    return batch


def _random_rows(generator: np.random.Generator, spec: TensorSpec, shape: tuple[int, ...]) -> Array:
    kind = np.dtype(spec.dtype)
    if kind.kind == "f":
        values = generator.standard_normal(shape)
        return np.clip(values, spec.minimum, spec.maximum).astype(kind)
    if kind.kind == "b":
        return generator.integers(2, size=shape).astype(kind)
    least = int(max(0, spec.minimum or 0))
    most = least + _MOST_INTEGERS - 1 if spec.maximum is None else int(spec.maximum)
    return generator.integers(least, min(most, np.iinfo(kind).max), size=shape, endpoint=True).astype(kind)
