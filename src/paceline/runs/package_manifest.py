"""The manifest of a package, and its checked parsing."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from paceline.core.errors import CheckpointError, PackageError
from paceline.core.inference import TensorSpec
from paceline.runs.checkpoint_manifest import MANIFEST, MAX_MANIFEST_BYTES, FileRecord, canonical_json, parse_json

INFERRED = "inferred_signature"
"""In ``provenance.data``: true if the task declares no signature, and the export inferred it."""

# --- Checked parsing of an untrusted JSON document ---


Text = Annotated[str, msgspec.Meta(max_length=65_536)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Number = Annotated[float, msgspec.Meta(gt=-1e300, lt=1e300)]
_T = TypeVar("_T")


class StrictStruct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON object with these fields and no others."""


def parse_document(content: bytes, where: str, document_type: type[_T]) -> _T:
    """Parse JSON strictly: the fields of a type, no NaN, no duplicate keys, no nesting beyond Python's stack.

    Raises:
        PackageError: it is something else; names the field.
    """
    try:
        document = parse_json(content, where)
    except CheckpointError as error:
        raise PackageError(str(error)) from error
    return _convert(document, where, document_type)


def _convert(document: Any, where: str, document_type: type[_T]) -> _T:
    try:
        return msgspec.convert(document, document_type)
    except (CheckpointError, msgspec.ValidationError) as error:
        raise PackageError(f"{where}: {error}") from error


# --- ``manifest.json``: a package's signature, its provenance, and the SHA-256 of each of its files ---


INPUTS = "inputs.json"
"""How clients send the inputs; the manifest describes the program's tensors."""
FORMAT = 1
PROGRAMS = ("pt2", "onnx")
"""The formats that run without the task's code."""

Dtype = Literal[
    "float64", "float32", "float16", "bfloat16",
    "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool",
]  # fmt: skip
"""The dtypes of inputs and outputs, by torch's names."""

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
"""Valid names of packages and tags, which become file names and parts of URLs."""

_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
_Limit = Annotated[int, msgspec.Meta(ge=1 - 2**63, le=2**63 - 1)]


FLOAT_WEIGHTS_BYTES = "float_weights_bytes"
"""In ``provenance.data`` of a quantized package: the size that the weights would have without quantization."""


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """The origin of a package's model.

    Attributes:
        task: as ``paceline train TASK`` names it.
        fields: the task's hyperparameters, JSON types.
        step: optimizer steps of the model.
        state_version: of the checkpoint.
        model_sha256: of the trained model's state, before any quantization.
        data: a description of the data, JSON types.
        versions: of paceline, torch and Python at the export.
        code_sha256: of the file that defines the task, or None.
        purity: whether the run was checked by the purity guard, and what it found; None if unknown.
    """

    run: Text
    task: Text
    fields: Mapping[str, Any]
    step: Count
    state_version: Count
    model_sha256: _Sha256
    data: Mapping[str, Any]
    versions: Mapping[str, Text]
    code_sha256: Text | None = None
    purity: Text | None = None


@dataclass(frozen=True, kw_only=True)
class FormatDifference:
    """The difference of a format's outputs from the trained model's, over the test split.

    Attributes:
        largest: the largest absolute difference of an element of a floating-point output.
        equal_labels: the share of samples with the same label; None without labels.
        samples: number of samples compared.
    """

    largest: Number
    equal_labels: Annotated[float, msgspec.Meta(ge=0, le=1)] | None
    samples: Count


class _Tensor(StrictStruct, frozen=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=65_536)]
    dtype: Dtype
    shape: tuple[Annotated[int, msgspec.Meta(ge=1, lt=2**40)] | None, ...]
    minimum: _Limit | None = None
    maximum: _Limit | None = None
    max_size: _Limit | None = None


class _Column(StrictStruct, frozen=True):
    name: Text
    unit: Text


class _Output(_Tensor, frozen=True):
    unit: Text = ""
    columns: tuple[_Column, ...] = ()


class _ManifestDocument(StrictStruct, frozen=True):
    """The fields of ``manifest.json``; :class:`PackageManifest` describes them."""

    format: int
    name: Text
    created: Text
    inputs: tuple[_Tensor, ...]
    outputs: tuple[_Output, ...]
    provenance: Provenance
    files: dict[str, FileRecord]
    labels: tuple[Text, ...]
    probabilities: Text | None
    label: Text | None
    metrics: dict[str, Number]
    weights: Text
    programs: dict[str, Text]
    quantization: Text | None
    differences: dict[str, FormatDifference]


@dataclass(frozen=True, kw_only=True)
class PackageManifest:
    """The manifest of a package.

    Attributes:
        created: time in ISO 8601.
        inputs: of the program, by name, in the order of its arguments.
        labels: the class names, by number.
        probabilities: the output that holds each class's probability.
        label: the output that holds the most likely class.
        metrics: of the trained model on the test split.
        files: all files but the manifest, by name.
        weights: the file with the model's state.
        programs: format ("pt2", "onnx") -> file.
        quantization: "int8", "bf16" or None.
        differences: format -> its difference from the trained model.
    """

    name: str
    created: str
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    provenance: Provenance
    files: Mapping[str, FileRecord]
    labels: tuple[str, ...] = ()
    probabilities: str | None = None
    label: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    weights: str = "weights.safetensors"
    programs: Mapping[str, str] = field(default_factory=dict)
    quantization: str | None = None
    differences: Mapping[str, FormatDifference] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the canonical text of this manifest; its SHA-256 is the package's digest."""
        document = asdict(replace(self, inputs={}, outputs={}))
        # Lists, because their order is that of the program's arguments.
        for side, specs in (("inputs", self.inputs), ("outputs", self.outputs)):
            describe = _spec_document if side == "inputs" else _output_document
            document[side] = [{"name": name, **describe(spec)} for name, spec in specs.items()]
        return canonical_json({"format": FORMAT, **document})

    @property
    def digest(self) -> str:
        """The package's digest, in hexadecimal."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @property
    def inferred_signature(self) -> str | None:
        """The inputs and outputs as text, if they were inferred; None if the task declares them."""
        if not self.provenance.data.get(INFERRED):
            return None
        sides = (
            ", ".join(f"{name} {spec.dtype} ({', '.join(['batch', *map(str, spec.shape)])})" for name, spec in side)
            for side in (self.inputs.items(), self.outputs.items())
        )
        return " -> ".join(sides)

    @property
    def size_bytes(self) -> int:
        """The size of all files but the manifest."""
        return sum(record.size for record in self.files.values())

    @property
    def quantized_size(self) -> str:
        """What quantization does to the weights' size: those of small models may grow; "" if it is not recorded."""
        before, now = self.provenance.data.get(FLOAT_WEIGHTS_BYTES), self.files[self.weights].size
        if type(before) is not int:
            return ""
        sizes = f"{now:,} bytes of weights instead of {before:,}"
        return sizes if now < before else f"{sizes}: it saves nothing here. Export without --quantize"

    @classmethod
    def from_bytes(cls, content: bytes) -> PackageManifest:
        """Parse and check every field.

        Raises:
            PackageError: it differs from the result of :meth:`to_bytes`; names the field.
        """
        if len(content) > MAX_MANIFEST_BYTES:
            raise PackageError(f"{MANIFEST} has more than {MAX_MANIFEST_BYTES} bytes")
        untrusted = parse_document(content, MANIFEST, dict[str, Any])
        if (version := untrusted.get("format")) != FORMAT:
            raise PackageError(f"{MANIFEST} has format {version!r:.80}; this version of Paceline reads {FORMAT}")
        document = _convert(untrusted, MANIFEST, _ManifestDocument)
        plain_name(document.name, f"{MANIFEST}.name")
        for name in document.files:
            if not _FILE.fullmatch(name) or name == MANIFEST:
                raise PackageError(f"{MANIFEST}.files has {name!r:.200}, which is not a plain file name")
        fields = msgspec.structs.asdict(document)
        del fields["format"]
        specs = {side: _specs(fields[side], side) for side in ("inputs", "outputs")}
        manifest = cls(**{**fields, **specs})
        manifest._check_references()
        if manifest.to_bytes() != content:
            raise PackageError(f"{MANIFEST} is not in its canonical form, so it was edited")
        return manifest

    def _check_references(self) -> None:
        """Check the references between the parts."""
        for what in ("probabilities", "label"):
            name = getattr(self, what)
            if name is not None and name not in self.outputs:
                raise PackageError(f"{MANIFEST}.{what} is {name!r:.80}, which is not an output")
        if unknown := self.programs.keys() - set(PROGRAMS):
            raise PackageError(f"{MANIFEST}.programs has {min(unknown)!r:.80}; known are {', '.join(PROGRAMS)}")
        for file in (self.weights, *self.programs.values()):
            if file not in self.files:
                raise PackageError(f"{MANIFEST} names the file {file!r:.80}, which is not in its files")


def plain_name(name: str, what: str) -> str:
    """Return the name of a package or tag, checked.

    Raises:
        PackageError: it has other characters, or is too long.
    """
    if not NAME.fullmatch(name):
        raise PackageError(
            f"{what} must be 1 to 64 lower-case letters, digits, dots, dashes and underscores, and begin "
            f"with a letter or digit, but is {name!r:.80}."
        )
    return name


_LIMITS = ("minimum", "maximum", "max_size")


def _spec_document(spec: TensorSpec) -> dict[str, Any]:
    """Describe a tensor of the program; an input's unit, columns and encoding are in a file of their own."""
    limits = {name: value for name in _LIMITS if (value := getattr(spec, name)) is not None}
    return {"dtype": spec.dtype, "shape": spec.shape, **limits}


def _output_document(spec: TensorSpec) -> dict[str, Any]:
    # A list: the canonical form sorts keys, and columns have an order.
    columns = [{"name": name, "unit": unit} for name, unit in spec.columns.items()]
    names = {"unit": spec.unit, "columns": columns}
    return {**_spec_document(spec), **{name: value for name, value in names.items() if value}}


def _specs(tensors: Sequence[_Tensor], side: str) -> dict[str, TensorSpec]:
    specs: dict[str, TensorSpec] = {}
    for tensor in tensors:
        fields = msgspec.structs.asdict(tensor)
        name, listed = fields.pop("name"), fields.pop("columns", ())
        columns = {column.name: column.unit for column in listed}
        if name in specs or len(columns) < len(listed):
            raise PackageError(f"{MANIFEST}.{side} names {name!r:.80}, or a column of it, twice")
        if columns and tensor.shape != (len(columns),):
            raise PackageError(
                f"{MANIFEST}.{side}: {name!r:.80} has {len(columns)} columns, but the shape {tensor.shape!r:.80}"
            )
        specs[name] = TensorSpec(**fields, columns=columns)
    if not specs:
        raise PackageError(f"{MANIFEST}.{side} is empty")
    return specs
