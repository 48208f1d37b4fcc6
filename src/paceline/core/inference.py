"""What a trained model does for others: inputs, outputs, and the function between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """What a tensor is like.

    Attributes:
        dtype: as torch calls it, such as "float32".
        shape: of one sample, without the batch, which comes first and may have any size; None where a
            dimension may, too.
    """

    dtype: str
    shape: tuple[int | None, ...] = ()


@dataclass(frozen=True, kw_only=True)
class InferenceSignature:
    """A function from a batch of inputs to a batch of outputs, with all that it takes to call it.

    What is exported, served and analysed is this, and not the bare model: preprocessing belongs to it.

    Attributes:
        module: called with the tensors of ``inputs`` in their order, returns those of ``outputs`` as a dict.
            No output of a sample depends on other samples.
        inputs: by name.
        outputs: by name.
        labels: the classes' names, by number; empty where there are none.
        probabilities: the output, float (B, number of classes), that holds each class's probability.
        label: the output, int64 (B,), that holds the most likely class.
    """

    module: nn.Module
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    labels: tuple[str, ...] = field(default=())
    probabilities: str | None = None
    label: str | None = None
