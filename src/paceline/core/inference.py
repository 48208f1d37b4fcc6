"""The inference signature of a trained model: inputs, outputs, and the function between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """The dtype and shape of a tensor.

    Attributes:
        dtype: torch's name for it, such as "float32".
        shape: of one sample, without the leading batch dimension, which may have any size. None marks a dimension of
            variable size.
        minimum: smallest value of an element; None if any is valid.
        maximum: largest value of an element, such as the last index of an embedding.
        max_size: largest size of the dimensions of variable size.
    """

    dtype: str
    shape: tuple[int | None, ...] = ()
    minimum: int | None = None
    maximum: int | None = None
    max_size: int | None = None


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
    """

    module: nn.Module
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    labels: tuple[str, ...] = field(default=())
    probabilities: str | None = None
    label: str | None = None
