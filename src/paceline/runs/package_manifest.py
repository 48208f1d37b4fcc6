"""The manifest of a package, and its checked parsing."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from paceline.core.errors import CheckpointError, PackageError
from paceline.core.inference import TensorSpec
from paceline.runs.checkpoint_manifest import MANIFEST, MAX_MANIFEST_BYTES, FileRecord, canonical_json, parse_json

INFERRED = "inferred_signature"
"""In ``provenance.data``: true if the task declares no signature, and the export inferred it."""

# --- Checked access to the fields of an untrusted JSON document ---


_MAX_TEXT = 65_536


class JsonReader:
    """The fields of a JSON object, each taken once; :meth:`end` rejects the rest.

    Args:
        document: the parsed JSON.
        where: its path in the whole document, for messages.

    Raises:
        PackageError: it is not an object; all methods raise it for an invalid value.
    """

    def __init__(self, document: Any, where: str) -> None:
        if not isinstance(document, dict):
            raise PackageError(f"{where} must be a JSON object, but is {document!r:.80}")
        self._remaining: dict[str, Any] = dict(document)
        self._where = where

    def __contains__(self, name: str) -> bool:
        return name in self._remaining

    def take(self, name: str) -> Any:
        """Return the value of a required field."""
        if name not in self._remaining:
            raise PackageError(f"{self._where} has no field {name!r}")
        return self._remaining.pop(name)

    def text(self, name: str) -> str:
        """Return a text of at most 65,536 characters."""
        return _text(self.take(name), f"{self._where}.{name}")

    def optional_text(self, name: str) -> str | None:
        value = self.take(name)
        return None if value is None else _text(value, f"{self._where}.{name}")

    def count(self, name: str) -> int:
        """Return a whole number of at least 0."""
        value = self.take(name)
        if type(value) is not int or not 0 <= value < 2**63:
            raise PackageError(f"{self._where}.{name} must be an integer from 0 to 2**63 - 1, but is {value!r:.80}")
        return value

    def number(self, name: str) -> float:
        return _number(self.take(name), f"{self._where}.{name}")

    def texts(self, name: str) -> tuple[str, ...]:
        return tuple(_text(item, f"{self._where}.{name}") for item in self.items(name))

    def items(self, name: str) -> list[Any]:
        value = self.take(name)
        if not isinstance(value, list):
            raise PackageError(f"{self._where}.{name} must be a list, but is {value!r:.80}")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.take(name)
        if not isinstance(value, dict):
            raise PackageError(f"{self._where}.{name} must be a JSON object, but is {value!r:.80}")
        return value

    def numbers(self, name: str) -> dict[str, float]:
        return {key: _number(v, f"{self._where}.{name}.{key}") for key, v in self.mapping(name).items()}

    def named_texts(self, name: str) -> dict[str, str]:
        return {key: _text(v, f"{self._where}.{name}.{key}") for key, v in self.mapping(name).items()}

    def end(self) -> None:
        """Reject remaining fields."""
        if self._remaining:
            raise PackageError(f"{self._where} has an unknown field {min(self._remaining)!r:.80}")


def parse_object(content: bytes, where: str) -> JsonReader:
    """Parse a JSON object strictly: no NaN, no duplicate keys, no nesting beyond Python's stack.

    Raises:
        PackageError: it is not such JSON.
    """
    try:
        return JsonReader(parse_json(content, where), where)
    except CheckpointError as error:
        raise PackageError(str(error)) from error


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise PackageError(f"{where} must be a text of at most {_MAX_TEXT:,} characters, but is {value!r:.80}")
    return value


def _number(value: Any, where: str) -> float:
    # An integer too large for a float would raise at its first use.
    if type(value) not in (int, float) or not abs(value) < 1e300:
        raise PackageError(f"{where} must be a number, but is {value!r:.80}")
    return value if isinstance(value, float) else float(value)


# --- ``manifest.json``: a package's signature, its provenance, and the SHA-256 of each of its files ---


INPUTS = "inputs.json"
"""How clients send the inputs; the manifest describes the program's tensors."""
FORMAT = 1
PROGRAMS = ("pt2", "onnx")
"""The formats that run without the task's code."""

DTYPES = (
    *("float64", "float32", "float16", "bfloat16"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
)
"""The dtypes of inputs and outputs, by torch's names."""

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
"""Valid names of packages and tags, which become file names and parts of URLs."""

_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


FLOAT_WEIGHTS_BYTES = "float_weights_bytes"
"""In ``provenance.data`` of a quantized package: the size that the weights would have without quantization."""


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """The origin of a package's model.

    Attributes:
        run: the run's id.
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

    run: str
    task: str
    fields: Mapping[str, Any]
    step: int
    state_version: int
    model_sha256: str
    data: Mapping[str, Any]
    versions: Mapping[str, str]
    code_sha256: str | None = None
    purity: str | None = None


@dataclass(frozen=True, kw_only=True)
class FormatDifference:
    """The difference of a format's outputs from the trained model's, over the test split.

    Attributes:
        largest: the largest absolute difference of an element of a floating-point output.
        equal_labels: the share of samples with the same label; None without labels.
        samples: number of samples compared.
    """

    largest: float
    equal_labels: float | None
    samples: int


@dataclass(frozen=True, kw_only=True)
class PackageManifest:
    """The manifest of a package.

    Attributes:
        name: of the model.
        created: time in ISO 8601.
        inputs: of the program, by name, in the order of its arguments.
        outputs: by name.
        labels: the class names, by number.
        probabilities: the output that holds each class's probability.
        label: the output that holds the most likely class.
        metrics: of the trained model on the test split.
        provenance: the origin of the model.
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
        fields = parse_object(content, MANIFEST)
        if (version := fields.take("format")) != FORMAT:
            raise PackageError(f"{MANIFEST} has format {version!r:.80}; this version of Paceline reads {FORMAT}")
        manifest = cls(
            name=plain_name(fields.text("name"), f"{MANIFEST}.name"),
            created=fields.text("created"),
            inputs=_specs(fields, "inputs"),
            outputs=_specs(fields, "outputs"),
            provenance=_provenance(JsonReader(fields.take("provenance"), f"{MANIFEST}.provenance")),
            files={name: _record(name, v) for name, v in fields.mapping("files").items()},
            labels=fields.texts("labels"),
            probabilities=fields.optional_text("probabilities"),
            label=fields.optional_text("label"),
            metrics=fields.numbers("metrics"),
            weights=fields.text("weights"),
            programs=fields.named_texts("programs"),
            quantization=fields.optional_text("quantization"),
            differences={name: _difference(name, v) for name, v in fields.mapping("differences").items()},
        )
        fields.end()
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


def _specs(fields: JsonReader, side: str) -> dict[str, TensorSpec]:
    specs: dict[str, TensorSpec] = {}
    for number, item in enumerate(fields.items(side)):
        entry = JsonReader(item, f"{MANIFEST}.{side}[{number}]")
        name, dtype, shape = entry.text("name"), entry.text("dtype"), entry.items("shape")
        limits = {limit: entry.take(limit) for limit in _LIMITS if limit in entry}
        is_output = side == "outputs"
        unit = entry.text("unit") if is_output and "unit" in entry else ""
        columns = _columns(entry, f"{MANIFEST}.{side}[{number}].columns") if is_output and "columns" in entry else {}
        entry.end()
        if not all(type(value) is int and abs(value) < 2**63 for value in limits.values()):
            raise PackageError(f"{MANIFEST}.{side}: {name!r:.80} has the limits {limits!r:.200}")
        if dtype not in DTYPES:
            raise PackageError(f"{MANIFEST}.{side}: {name!r:.80} is of {dtype!r:.80}, which is not a dtype")
        if not all(size is None or (type(size) is int and 0 < size < 2**40) for size in shape):
            raise PackageError(f"{MANIFEST}.{side}: {name!r:.80} has the shape {shape!r:.80}")
        if not name or name in specs:
            raise PackageError(f"{MANIFEST}.{side} names {name!r:.80} twice or not at all")
        if columns and list(shape) != [len(columns)]:
            raise PackageError(
                f"{MANIFEST}.{side}: {name!r:.80} has {len(columns)} columns, but the shape {shape!r:.80}"
            )
        specs[name] = TensorSpec(dtype=dtype, shape=tuple(shape), unit=unit, columns=columns, **limits)
    if not specs:
        raise PackageError(f"{MANIFEST}.{side} is empty")
    return specs


def _columns(fields: JsonReader, where: str) -> dict[str, str]:
    columns: dict[str, str] = {}
    for item in fields.items("columns"):
        column = JsonReader(item, where)
        name, unit = column.text("name"), column.text("unit")
        column.end()
        if name in columns:
            raise PackageError(f"{where} names {name!r:.80} twice")
        columns[name] = unit
    return columns


def _provenance(fields: JsonReader) -> Provenance:
    provenance = Provenance(
        run=fields.text("run"),
        task=fields.text("task"),
        fields=fields.mapping("fields"),
        step=fields.count("step"),
        state_version=fields.count("state_version"),
        model_sha256=_sha256(fields.text("model_sha256"), "provenance.model_sha256"),
        data=fields.mapping("data"),
        versions=fields.named_texts("versions"),
        code_sha256=fields.optional_text("code_sha256"),
        purity=fields.optional_text("purity") if "purity" in fields else None,
    )
    fields.end()
    return provenance


def _difference(name: str, document: Any) -> FormatDifference:
    fields = JsonReader(document, f"{MANIFEST}.differences.{name}")
    share = fields.take("equal_labels")
    if share is not None and not (type(share) in (int, float) and 0 <= share <= 1):
        raise PackageError(f"{MANIFEST}.differences.{name}.equal_labels must be between 0 and 1, but is {share!r:.80}")
    difference = FormatDifference(largest=fields.number("largest"), equal_labels=share, samples=fields.count("samples"))
    fields.end()
    return difference


def _record(name: str, document: Any) -> FileRecord:
    if not _FILE.fullmatch(name) or name == MANIFEST:
        raise PackageError(f"{MANIFEST}.files has {name!r:.200}, which is not a plain file name")
    fields = JsonReader(document, f"{MANIFEST}.files.{name}")
    size, sha256 = fields.count("size"), fields.text("sha256")
    fields.end()
    try:
        return FileRecord(size, sha256)
    except CheckpointError as error:
        raise PackageError(f"{MANIFEST}.files.{name}: {error}") from error


def _sha256(text: str, what: str) -> str:
    if not _SHA256.fullmatch(text):
        raise PackageError(f"{MANIFEST}.{what} must be 64 hexadecimal digits, but is {text!r:.80}")
    return text
