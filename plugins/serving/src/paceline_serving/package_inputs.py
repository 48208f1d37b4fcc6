"""``inputs.json`` of a package: units, columns and encodings of the inputs, the ranges in the data, and an example.

The manifest describes the program's tensors; this file describes the inputs as clients send them. All of it is data:
nothing in it can run code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from paceline.core.errors import ConfigError, PackageError
from paceline.core.inference import Encoding, TensorSpec
from paceline.runs.package import Package
from paceline.runs.package_manifest import INPUTS
from paceline_serving.encodings import Categories, Dates, Tokenizer, Vocabulary

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
        encoding = {"kind": kind, **dataclasses.asdict(spec.encoding)}
    return _Input(unit=spec.unit, columns=dict(spec.columns), allow_missing=spec.allow_missing, encoding=encoding)
