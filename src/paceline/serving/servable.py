"""What is served: named arrays in, named arrays out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError
from paceline.inference import TensorSpec
from paceline.serving.datatypes import DATATYPES

Array = NDArray[Any]
Arrays = Mapping[str, Array]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What clients are told of a model.

    Attributes:
        name: in the server's addresses.
        version: likewise; of a package, the start of its digest.
        inputs: by name; shapes are those of one row, without the batch.
        outputs: by name.
        labels: the classes' names, by number.
        probabilities: the output that holds each class's probability.
        label: the output that holds the most likely class.
        platform: who computes it, as the protocol's metadata say.
    """

    name: str
    version: str
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    labels: tuple[str, ...] = ()
    probabilities: str | None = None
    label: str | None = None
    platform: str = "pytorch"

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                "a model's name is in addresses, so it is letters, digits, '.', '_' and '-', "
                f"but is {self.name!r}."
            )
        for kind, specs in (("input", self.inputs), ("output", self.outputs)):
            for name, spec in specs.items():
                if spec.dtype not in DATATYPES:
                    known = ", ".join(DATATYPES)
                    raise ConfigError(
                        f"{self.name}: {kind} {name} is {spec.dtype}, which cannot be served. "
                        f"These can: {known}."
                    )


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a replica finds its model; small and JSON, since it travels to another process.

    Attributes:
        package: the package's directory.
        digest: of the package that was opened; another one in its place is refused.
        kind: ``pt2`` a torch.export program, ``onnx`` a model for onnxruntime, ``task`` weights with the
            task's own code.
        task: ``file.py:Name`` or a recipe, for ``task``.
    """

    package: str
    digest: str
    kind: Literal["pt2", "onnx", "task"]
    task: str = ""


@dataclass(frozen=True)
class Opened:
    """A package that was verified, as replicas load it and clients see it."""

    source: Source
    spec: ModelSpec


class Servable(Protocol):
    """A loaded model."""

    def predict(self, inputs: Arrays) -> dict[str, Array]:
        """Outputs by name for a batch of inputs by name; rows come first, and keep their order."""
        ...


def rows_of(arrays: Arrays) -> int:
    """How many rows a batch has; all of its arrays have as many."""
    return int(next(iter(arrays.values())).shape[0])


def example(spec: TensorSpec, rows: int, *, free: int = 8) -> Array:
    """Zeros of ``rows`` rows; dimensions that may have any size have ``free``."""
    return np.zeros((rows, *(free if size is None else size for size in spec.shape)), dtype=spec.dtype)
