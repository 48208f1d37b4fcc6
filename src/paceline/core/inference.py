"""The inference signature of a trained model: inputs, outputs, and the function between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import nn


class Encoding(ABC):
    """A mapping of values to whole numbers, such as those of categories or words.

    A task builds its data with the object that it declares in its inference signature, and a package keeps that object
    as data: so a server encodes as the training did, without the task's code.
    """

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Of the numbers of one value."""

    @property
    @abstractmethod
    def size(self) -> int:
        """The largest number plus one: the rows of an ``nn.Embedding`` for them."""

    @property
    def takes_missing(self) -> bool:
        """Whether a value may be missing; a missing text is an empty one."""
        return True

    @abstractmethod
    def encode(self, values: Sequence[Any]) -> NDArray[np.int64]:
        """Return the numbers of values, one row for each.

        Raises:
            DataError: a value cannot be encoded; says which and why.
        """

    @abstractmethod
    def decode(self, numbers: Any) -> str:
        """Return a value that has these numbers, or about these if there is none."""

    def describe(self, numbers: Any) -> str:
        """Return what is known of a value that has these numbers, for people."""
        return self.decode(numbers)


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """The dtype and shape of a tensor, and what people who send it should know.

    Attributes:
        dtype: torch's name for it, such as "float32".
        shape: of one sample, without the leading batch dimension, which may have any size. None marks a dimension of
            variable size.
        minimum: smallest value of an element; None if any is valid.
        maximum: largest value of an element, such as the last index of an embedding.
        max_size: largest size of the dimensions of variable size.
        unit: of the numbers, such as "years".
        columns: of shape (n,): the names of the elements, each with its unit or "". Tables and requests give an input
            by them, and predictions in a table have them as columns.
        allow_missing: whether a float input takes a missing value; the module gets a NaN.
        encoding: :class:`Categories`, :class:`Dates`, :class:`Vocabulary` or :class:`Tokenizer`: clients send texts,
            and the module gets their numbers, int64.
    """

    dtype: str
    shape: tuple[int | None, ...] = ()
    minimum: int | None = None
    maximum: int | None = None
    max_size: int | None = None
    unit: str = ""
    columns: Mapping[str, str] = field(default_factory=dict, hash=False)
    allow_missing: bool = False
    encoding: Encoding | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if self.columns and self.shape != (len(self.columns),):
            raise ConfigError(
                f"a TensorSpec with the columns {', '.join(self.columns):.200} must have the shape "
                f"({len(self.columns)},), but has {self.shape}."
            )
        if self.allow_missing and self.encoding is None and not self.dtype.startswith(("float", "str")):
            raise ConfigError(f"allow_missing is for float inputs, which have NaN, and not for {self.dtype}.")
        if self.encoding is None:
            return
        is_category = not self.encoding.shape  # one number, which may be that of each column
        fits = len(self.shape) <= 1 and None not in self.shape if is_category else self.shape == self.encoding.shape
        if self.dtype != "int64" or not fits:
            shape = "() or (n,)" if is_category else f"({', '.join(map(str, self.encoding.shape))},)"
            raise ConfigError(
                f"a TensorSpec with {type(self.encoding).__name__} must be int64 of the shape {shape}, but is "
                f"{self.dtype} {self.shape}."
            )


def name_with_unit(name: str, unit: str) -> str:
    """Return the name of an input, an output or an element for people, such as "age (years)"."""
    return f"{name} ({unit})" if unit else name


@dataclass(frozen=True, kw_only=True)
class InferenceSignature:
    """A function from a batch of inputs to a batch of outputs, with everything needed to call it.

    Export, serving and analysis use the signature rather than the bare model, because it includes preprocessing.

    Attributes:
        module: called with the tensors of ``inputs`` in their order, returns those of ``outputs`` as a dict.
            No output of a sample depends on other samples.
        inputs: by name.
        outputs: by name.
        labels: the class names, by number; empty if there are none.
        probabilities: the output, float (B, number of classes), that holds each class's probability.
        label: the output, int64 (B,), that holds the most likely class.
        example: a row as a client sends it, with a value for each input or column, for the package to show; None: the
            package has the first sample of the test split.
    """

    module: nn.Module
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    labels: tuple[str, ...] = field(default=())
    probabilities: str | None = None
    label: str | None = None
    example: Mapping[str, Any] | None = None
