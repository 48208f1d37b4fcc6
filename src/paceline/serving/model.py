"""What is served: a package, opened, with its options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import ConfigError
from paceline.core.inference import TensorSpec

# --- The protocol's names of data types, and torch's and numpy's ---


# By torch's name, which is numpy's too. https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol
DATATYPES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
}


# --- How a server batches, bounds and times what it is asked ---


UNBOUNDED = 10**7
"""Rows that may wait where it does not matter how long: ``paceline predict`` asks for them itself."""

_MOST_REPLICAS = 256
_DURATIONS = ("max_wait", "timeout", "receive_timeout", "startup_timeout", "hang_timeout", "drain_delay")


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """The options of ``paceline serve`` that its parts share.

    Attributes:
        replicas: processes for each model.
        devices: where they compute, in turns.
        max_batch: rows of a batch.
        max_wait_s: how long a batch may wait to fill while every replica computes. It never waits for an idle
            one.
        max_queue: rows that may wait while replicas are as fast as at best; fewer while they are slower. What
            comes beyond is refused with 429.
        timeout_s: how long a request may take, unless it says less itself.
        receive_timeout_s: how long a client may take to send one request.
        max_body_bytes: of a request.
        drain_delay_s: after SIGTERM, how long "not ready" is shown before connections are refused.
        startup_timeout_s: how long a replica may take to load its model.
        hang_timeout_s: a replica that computes one batch for longer is killed.
        threads: of a replica, on a CPU.
    """

    replicas: int = 1
    devices: tuple[str, ...] = ("cpu",)
    max_batch: int = 32
    max_wait_s: float = 0.002
    max_queue: int = 256
    timeout_s: float = 30.0
    receive_timeout_s: float = 10.0
    max_body_bytes: int = 64 * 2**20
    drain_delay_s: float = 1.0
    startup_timeout_s: float = 120.0
    hang_timeout_s: float = 60.0
    threads: int = 1

    def __post_init__(self) -> None:
        self._check("replicas", self.replicas, 1, _MOST_REPLICAS)
        self._check("max-batch", self.max_batch, 1, 65536)
        self._check("max-queue", self.max_queue, 1, UNBOUNDED)
        self._check("threads", self.threads, 1, 1024)
        self._check("max-body", self.max_body_bytes, 1024, 2**32)
        self._check("max-wait", self.max_wait_s, 0, 60)
        for name in ("timeout", "receive-timeout", "startup-timeout", "hang-timeout"):
            self._check(name, getattr(self, name.replace("-", "_") + "_s"), 0.001, 86400)
        self._check("drain-notice", self.drain_delay_s, 0, 600)
        for device in self.devices:
            kind, _, index = device.partition(":")
            if kind not in ("cpu", "cuda") or (index and not index.isdecimal()) or device == "cuda:":
                raise ConfigError(f"--devices are cpu, cuda or cuda:N, not {device!r}.")

    def words(self) -> tuple[str, ...]:
        """What is not the default, as the command line says it; but for replicas and devices."""
        words: list[str] = []
        for name in ("threads", "max_batch", "max_queue"):
            if getattr(self, name) != getattr(ServingOptions, name):
                words += [f"--{name.replace('_', '-')}", str(getattr(self, name))]
        for name in _DURATIONS:
            seconds = getattr(self, f"{name}_s")
            if seconds != getattr(ServingOptions, f"{name}_s"):
                words += [f"--{name.replace('_', '-')}", f"{1000 * seconds:.15g}ms"]
        if self.max_body_bytes != ServingOptions.max_body_bytes:
            words += ["--max-body", str(self.max_body_bytes // 2**20)]
        return tuple(words)

    def _check(self, name: str, value: Any, least: float, most: float) -> None:
        if not least <= value <= most:
            raise ConfigError(f"--{name} must be between {least} and {most}, but is {value}.")


def parse_replicas(text: str) -> tuple[int, int]:
    """The least and the greatest number of replicas of "2" or "1:4".

    Raises:
        ConfigError: it is neither.
    """
    match = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text.strip())
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most <= _MOST_REPLICAS:
        raise ConfigError(f"--replicas must be between 1 and {_MOST_REPLICAS}, or MIN:MAX such as 1:4, but is {text}.")
    return least, most


# --- What is served: named arrays in, named arrays out ---


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
                f"a model's name is in addresses, so it is letters, digits, '.', '_' and '-', but is {self.name!r}."
            )
        for kind, specs in (("input", self.inputs), ("output", self.outputs)):
            for name, spec in specs.items():
                if spec.dtype not in DATATYPES:
                    known = ", ".join(DATATYPES)
                    raise ConfigError(
                        f"{self.name}: {kind} {name} is {spec.dtype}, which cannot be served. These can: {known}."
                    )


@dataclass(frozen=True, kw_only=True)
class ModelLocation:
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
class ServedModel:
    """A package that was verified, as replicas load it and clients see it."""

    source: ModelLocation
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
