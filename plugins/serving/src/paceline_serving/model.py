"""Served models, their options, and what a package says of its inputs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import ConfigError, PackageError
from paceline.core.inference import Encoding, TensorSpec
from paceline.runs.package import Package
from paceline.runs.package_manifest import INPUTS, PackageManifest
from paceline_serving.encodings import EXAMPLE_DATE, Categories, Dates, Tokenizer, Vocabulary, show_category

# --- The protocol's datatypes ---


# By torch's and numpy's name. https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol
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
    "str": "BYTES",
}


# --- Options for batching, queueing and timeouts ---


UNBOUNDED = 10**7
"""Size of the queue if waiting times do not matter, as in ``paceline predict``."""

_MAX_REPLICAS = 256
_DURATIONS = ("max_wait", "timeout", "receive_timeout", "startup_timeout", "hang_timeout", "drain_delay")


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """The options of ``paceline serve`` that several parts share; its help describes them."""

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
    exact: bool = False

    def __post_init__(self) -> None:
        self._check("replicas", self.replicas, 1, _MAX_REPLICAS)
        self._check("max-batch", self.max_batch, 1, 65536)
        self._check("max-queue", self.max_queue, 1, UNBOUNDED)
        self._check("threads", self.threads, 1, 1024)
        self._check("max-body", self.max_body_bytes, 1024, 2**32)
        self._check("max-wait", self.max_wait_s, 0, 60)
        for name in ("timeout", "receive-timeout", "startup-timeout", "hang-timeout"):
            self._check(name, getattr(self, name.replace("-", "_") + "_s"), 0.001, 86400)
        self._check("drain-delay", self.drain_delay_s, 0, 600)
        for device in self.devices:
            kind, _, index = device.partition(":")
            if kind not in ("cpu", "cuda") or (index and not index.isdecimal()) or device == "cuda:":
                raise ConfigError(f"--devices must be cpu, cuda or cuda:N, but is {device!r}.")
        if self.exact and len({device.partition(":")[0] for device in self.devices}) > 1:
            raise ConfigError("--exact: a CPU and a GPU compute other bits. Give --devices of one kind.")

    def words(self) -> tuple[str, ...]:
        """Return the options that are not the default as command-line arguments, without replicas and devices."""
        words: list[str] = []
        for name in ("threads", "max_batch", "max_queue", *(f"{each}_s" for each in _DURATIONS)):
            value = getattr(self, name)
            if value != getattr(ServingOptions, name):
                text = f"{1000 * value:.15g}ms" if name.endswith("_s") else str(value)
                words += [f"--{name.removesuffix('_s').replace('_', '-')}", text]
        if self.max_body_bytes != ServingOptions.max_body_bytes:
            words += ["--max-body", str(self.max_body_bytes // 2**20)]
        if self.exact:
            words.append("--exact")
        return tuple(words)

    def _check(self, name: str, value: Any, least: float, most: float) -> None:
        if not least <= value <= most:
            raise ConfigError(f"--{name} must be between {least} and {most}, but is {value}.")


def parse_replicas(text: str) -> tuple[int, int]:
    """Return the smallest and largest number of replicas of "2" or "1:4".

    Raises:
        ConfigError: the text has another form.
    """
    match = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text.strip())
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most <= _MAX_REPLICAS:
        raise ConfigError(f"--replicas must be between 1 and {_MAX_REPLICAS}, or MIN:MAX such as 1:4, but is {text}.")
    return least, most


# --- ``inputs.json`` of a package ---
#
# The manifest describes the program's tensors; this file describes the inputs as clients send them. All of it is
# data: nothing in it can run code.


NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not JSON, or not of the type."""

_MAX_BYTES = 64 * 2**20
_ENCODINGS: Mapping[str, type[Encoding]] = {
    "categories": Categories,
    "dates": Dates,
    "vocabulary": Vocabulary,
    "tokenizer": Tokenizer,
}

Range = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class PackageInputs:
    """A package's inputs.

    Attributes:
        specs: by name, with units, columns and encodings.
        ranges: the smallest and largest number that the export saw in an input or a column, by its name.
        example: a row as a client sends it, by input; empty if there is none.
    """

    specs: Mapping[str, TensorSpec]
    ranges: Mapping[str, Range] = field(default_factory=dict)
    example: Mapping[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        inputs = {name: _describe(spec) for name, spec in self.specs.items()}
        document = _Document(inputs={name: each for name, each in inputs.items() if each != _Input()})
        document.ranges = dict(self.ranges)
        document.example = dict(self.example)
        return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


def read_inputs(package: Package) -> PackageInputs:
    """Return the inputs of a package; of one without the file, what the manifest has.

    Raises:
        PackageError: the file is invalid; says which part.
    """
    manifest = package.manifest
    if INPUTS not in manifest.files:
        return PackageInputs(specs=manifest.inputs)
    if manifest.files[INPUTS].size > _MAX_BYTES:
        raise PackageError(f"package {package.path}: {INPUTS} has more than {_MAX_BYTES:,} bytes.")
    try:
        document = msgspec.json.decode(package.read(INPUTS), type=_Document)
        if unknown := (document.inputs.keys() | document.example.keys()) - manifest.inputs.keys():
            raise ConfigError(f"{min(unknown)!r:.80} is not an input")
        specs = {
            name: spec if name not in document.inputs else document.inputs[name].complete(spec)
            for name, spec in manifest.inputs.items()
        }
    except (*NOT_JSON, ConfigError) as error:
        raise PackageError(f"package {package.path}: {INPUTS} is invalid: {error}") from error
    return PackageInputs(specs=specs, ranges=document.ranges, example=document.example)


class _Input(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    unit: str = ""
    columns: dict[str, str] = {}
    allow_missing: bool = False
    encoding: dict[str, Any] | None = None

    def complete(self, spec: TensorSpec) -> TensorSpec:
        encoding = None
        if self.encoding is not None:
            fields = dict(self.encoding)
            kind = _ENCODINGS.get(str(fields.pop("kind", None)))
            if kind is None:
                raise ConfigError(f"an encoding must be of {', '.join(_ENCODINGS)}")
            encoding = msgspec.convert(fields, kind)
        return replace(spec, unit=self.unit, columns=self.columns, allow_missing=self.allow_missing, encoding=encoding)


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    inputs: dict[str, _Input] = {}
    ranges: dict[str, tuple[float, float]] = {}
    example: dict[str, Any] = {}


def _describe(spec: TensorSpec) -> _Input:
    encoding = None
    if isinstance(spec.encoding, Categories | Dates | Vocabulary | Tokenizer):
        kind = next(kind for kind, type_ in _ENCODINGS.items() if isinstance(spec.encoding, type_))
        encoding = {"kind": kind, **asdict(spec.encoding)}
    return _Input(unit=spec.unit, columns=dict(spec.columns), allow_missing=spec.allow_missing, encoding=encoding)


# --- Models: named arrays in, named arrays out ---


Array = NDArray[Any]
Arrays = Mapping[str, Array]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MAX_CHOICES = 1000
_FORMATS = {"date": "date", "date-time": "date and time"}
_MAX_NAMED = 8  # choices, for people
_EXAMPLE_SIZE = 8  # of a dimension of any size
_MAX_EXAMPLE = 1000  # characters of a value that is shown in a list


@dataclass(frozen=True, kw_only=True)
class InputField:
    """A value of a row: an input, or one of its columns.

    Attributes:
        name: the column's, or the input's.
        shape: of the value; -1 is a variable size.
        observed: the smallest and largest number that the export saw, or None.
        choices: the categories, if it has some and they are few.
        is_open: whether it takes other texts than the choices.
        format: "date" or "date-time" (JSON Schema's words) if its texts are dates, or "".
        allow_missing: whether it may be missing: null in JSON, empty in a CSV.
        example: a value, or None if it is long.
    """

    input: str
    name: str
    datatype: str
    shape: tuple[int, ...] = ()
    unit: str = ""
    minimum: int | None = None
    maximum: int | None = None
    observed: tuple[float, float] | None = None
    choices: tuple[str, ...] = ()
    is_open: bool = False
    format: str = ""
    allow_missing: bool = False
    example: Any = None

    @property
    def type_text(self) -> str:
        if self.datatype == "BYTES":
            kind = _FORMATS[self.format] if self.format else "category" if self.choices else "text"
            return ", ".join(filter(None, (kind, describe_sizes(self.shape, " x "))))
        return _number_text(self.datatype, self.shape)

    @property
    def values_text(self) -> str:
        """The values that it takes, as far as they are known, for people."""
        parts = []
        if self.choices:
            named, more = ", ".join(map(show_category, self.choices[:_MAX_NAMED])), len(self.choices) - _MAX_NAMED
            named = f"{named} and {more} more" if more > 0 else named
            parts.append(f"{named} or any other" if self.is_open else named)
        elif self.minimum is not None or self.maximum is not None:
            least, most = ("any" if end is None else str(end) for end in (self.minimum, self.maximum))
            parts.append(f"{least} to {most}")
        if self.observed is not None:
            parts.append("seen: {:g} to {:g}".format(*self.observed))
        if self.allow_missing:
            parts.append("may be missing")
        return "; ".join(parts)


@dataclass(frozen=True, kw_only=True)
class OutputField:
    """A value of a prediction: an output, or one of its elements that has a name.

    Attributes:
        name: the element's, or the output's.
        shape: of the value; -1 is a variable size.
    """

    output: str
    name: str
    datatype: str
    shape: tuple[int, ...] = ()
    unit: str = ""

    @property
    def type_text(self) -> str:
        return _number_text(self.datatype, self.shape)


def _number_text(datatype: str, shape: Sequence[int]) -> str:
    if shape:
        return f"{datatype.lower()}, {describe_sizes(shape, ' x ')}"
    return "true or false" if datatype == "BOOL" else "number" if "F" in datatype else "whole number"


def describe_sizes(shape: Sequence[int | None], separator: str = ", ") -> str:
    """Return the sizes of a shape for people; one that is variable is -1 for clients, and None in a signature."""
    return separator.join("any" if size in (None, -1) else str(size) for size in shape)


def fits_shape(actual: Sequence[int], expected: Sequence[int | None]) -> bool:
    """Return whether an array's sizes are those of a signature."""
    return len(actual) == len(expected) and all(
        size in (None, given) for given, size in zip(actual, expected, strict=True)
    )


def client_shape(shape: Sequence[int | None]) -> tuple[int, ...]:
    """Return a signature's shape as clients get it: a variable size is -1."""
    return tuple(-1 if size is None else size for size in shape)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The description of a model for clients.

    Attributes:
        name: in the server's addresses.
        version: in the server's addresses; the start of the package's digest.
        inputs: by name; shapes are of one row, without the batch. Texts have the dtype "str".
        labels: names of the classes, by index.
        probabilities: name of the output with the classes' probabilities.
        label: name of the output with the most likely class.
        encodings: of those inputs that are texts, by name; a client of another server has none.
        ranges: the smallest and largest number that the export saw, by input or column.
        example: a row, by input; empty if there is none.
    """

    name: str
    version: str
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    labels: tuple[str, ...] = ()
    probabilities: str | None = None
    label: str | None = None
    platform: str = "pytorch"
    encodings: Mapping[str, Encoding] = field(default_factory=dict)
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    example: Mapping[str, Any] = field(default_factory=dict)

    @property
    def program(self) -> ModelSpec:
        """The same model as its program takes it: every input is a tensor of numbers."""
        tensors = {
            name: tensor
            if name not in self.encodings
            else TensorSpec(dtype="int64", shape=(*tensor.shape, *self.encodings[name].shape))
            for name, tensor in self.inputs.items()
        }
        return replace(self, inputs=tensors, encodings={}, ranges={}, example={})

    @cached_property
    def row(self) -> Mapping[str, Any]:
        """A valid row as a client sends it, by input: the package's own, or else one of zeros if possible."""
        row: dict[str, Any] = {}
        for name, tensor in self.inputs.items():
            if name in self.example:
                row[name] = self.example[name]
            elif tensor.dtype == "str":
                text = next(iter(self.choices(name)), EXAMPLE_DATE if self.format(name) else "")
                row[name] = text if not tensor.shape else [text] * (tensor.shape[0] or 1)
            else:
                row[name] = example(tensor, 1)[0].tolist()
        return row

    @cached_property
    def fields(self) -> Sequence[InputField]:
        """The values of a row in their order."""
        return [field for name in self.inputs for field in self._fields_of(name)]

    def _fields_of(self, name: str) -> Iterator[InputField]:
        tensor, encoding = self.inputs[name], self.encodings.get(name)
        columns = list(tensor.columns)
        for number, column in enumerate(columns or [name]):
            value = self.row[name][number] if columns else self.row[name]
            yield InputField(
                input=name,
                name=column,
                datatype=DATATYPES[tensor.dtype],
                shape=() if columns else client_shape(tensor.shape),
                unit=tensor.columns.get(column, tensor.unit),
                minimum=tensor.minimum,
                maximum=tensor.maximum,
                observed=self.ranges.get(column),
                choices=self.choices(name),
                is_open=isinstance(encoding, Categories) and encoding.unknown is not None,
                format=self.format(name),
                allow_missing=tensor.allow_missing,
                example=value if len(repr(value)) <= _MAX_EXAMPLE else None,
            )

    @cached_property
    def output_fields(self) -> Sequence[OutputField]:
        """The values of a prediction in their order."""
        return [
            OutputField(
                output=name,
                name=each,
                datatype=DATATYPES[tensor.dtype],
                shape=() if tensor.columns else client_shape(tensor.shape),
                unit=tensor.columns.get(each, tensor.unit),
            )
            for name, tensor in self.outputs.items()
            for each in tensor.columns or [name]
        ]

    def format(self, name: str) -> str:
        """Return "date" or "date-time" for an input of dates; else an empty text."""
        encoding = self.encodings.get(name)
        return "" if not isinstance(encoding, Dates) else "date-time" if encoding.has_time else "date"

    def choices(self, name: str) -> tuple[str, ...]:
        """Return the categories of an input; empty if it has none, or too many to list."""
        encoding = self.encodings.get(name)
        if not isinstance(encoding, Categories) or len(encoding.codes) > _MAX_CHOICES:
            return ()
        return tuple(encoding.codes)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"a model's name must consist of letters, digits, '.', '_' and '-', but is {self.name!r}."
            )
        for kind, specs in (("input", self.inputs), ("output", self.outputs)):
            for name, spec in specs.items():
                if spec.dtype not in DATATYPES:
                    known = ", ".join(DATATYPES)
                    raise ConfigError(
                        f"{self.name}: {kind} {name} is {spec.dtype}, which cannot be served. Supported are: {known}."
                    )


@dataclass(frozen=True, kw_only=True)
class ModelLocation:
    """The location of a replica's model; JSON, since it is sent to another process.

    Attributes:
        digest: of the opened package; another one in its place is refused.
        kind: ``pt2`` a torch.export program, ``onnx`` a model for onnxruntime, ``task`` weights with the task's
            own code.
        task: ``file.py:Name`` or a built-in task, for ``task``.
    """

    package: str
    digest: str
    kind: Literal["pt2", "onnx", "task"]
    task: str = ""


@dataclass(frozen=True)
class ServedModel:
    """A verified package: how replicas load it, and what clients see of it."""

    source: ModelLocation
    spec: ModelSpec


class Servable(Protocol):
    """A loaded model."""

    def predict(self, inputs: Arrays) -> dict[str, Array]:
        """Return outputs by name for a batch of inputs by name; rows are the first dimension, in the same order."""
        ...


def rows_of(arrays: Arrays) -> int:
    """Return the number of rows of a batch."""
    return int(next(iter(arrays.values())).shape[0])


_VERSION_DIGITS = 12  # of a package's digest


def make_spec(
    manifest: PackageManifest, about: PackageInputs, digest: str = "", platform: str = "pytorch"
) -> ModelSpec:
    """Describe a package's model for clients."""
    inputs, encodings = client_specs(about.specs)
    return ModelSpec(
        name=manifest.name,
        version=digest[:_VERSION_DIGITS],
        inputs=inputs,
        outputs=manifest.outputs,
        labels=manifest.labels,
        probabilities=manifest.probabilities,
        label=manifest.label,
        platform=platform,
        encodings=encodings,
        ranges=about.ranges,
        example=about.example,
    )


def client_specs(tensors: Mapping[str, TensorSpec]) -> tuple[dict[str, TensorSpec], dict[str, Encoding]]:
    """Return a program's inputs as clients send them, and the encodings of those that are texts."""
    encodings = {name: tensor.encoding for name, tensor in tensors.items() if tensor.encoding is not None}
    inputs = dict(tensors)
    for name, encoding in encodings.items():
        tensor = tensors[name]
        inputs[name] = TensorSpec(
            dtype="str",
            shape=tensor.shape[: len(tensor.shape) - len(encoding.shape)],
            unit=tensor.unit,
            columns=tensor.columns,
            allow_missing=encoding.takes_missing,
        )
    return inputs, encodings


def example(spec: TensorSpec, rows: int) -> Array:
    """Return ``rows`` valid rows, of zeros if possible; dimensions of any size are short."""
    size_of_any = _EXAMPLE_SIZE if spec.max_size is None else min(_EXAMPLE_SIZE, spec.max_size)
    value = max(0, spec.minimum or 0) if spec.maximum is None else min(max(0, spec.minimum or 0), spec.maximum)
    return np.full((rows, *(size_of_any if size is None else size for size in spec.shape)), value, dtype=spec.dtype)
