"""What a package says of itself, and the checks of that."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

from paceline.core.errors import CheckpointError, PackageError
from paceline.core.inference import TensorSpec
from paceline.runs.checkpoint_manifest import FileRecord

# --- Fields of a JSON document from somewhere else, taken out one by one and checked ---


_MAX_TEXT = 65_536


class JsonReader:
    """The fields of a JSON object; each is taken once, and none may be left over.

    Args:
        document: what should be a JSON object.
        where: its place in the whole, for messages.

    Raises:
        PackageError: it is none; all methods raise it where a value is not what it must be.
    """

    def __init__(self, document: Any, where: str) -> None:
        if not isinstance(document, dict):
            raise PackageError(f"{where} must be a JSON object, but is {document!r:.80}")
        self._left: dict[str, Any] = dict(document)
        self._where = where

    def take(self, name: str) -> Any:
        """The value of a field that must be there."""
        if name not in self._left:
            raise PackageError(f"{self._where} has no field {name!r}")
        return self._left.pop(name)

    def text(self, name: str) -> str:
        """A text of at most 65,536 characters."""
        return _text(self.take(name), f"{self._where}.{name}")

    def optional_text(self, name: str) -> str | None:
        """A text or null."""
        value = self.take(name)
        return None if value is None else _text(value, f"{self._where}.{name}")

    def count(self, name: str) -> int:
        """A whole number from 0."""
        value = self.take(name)
        if type(value) is not int or not 0 <= value < 2**63:
            raise PackageError(f"{self._where}.{name} must be an integer from 0 to 2**63 - 1, but is {value!r:.80}")
        return value

    def number(self, name: str) -> float:
        """A finite number."""
        return _number(self.take(name), f"{self._where}.{name}")

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts."""
        return tuple(_text(item, f"{self._where}.{name}") for item in self.items(name))

    def items(self, name: str) -> list[Any]:
        """A list."""
        value = self.take(name)
        if not isinstance(value, list):
            raise PackageError(f"{self._where}.{name} must be a list, but is {value!r:.80}")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        """A JSON object with any content."""
        value = self.take(name)
        if not isinstance(value, dict):
            raise PackageError(f"{self._where}.{name} must be a JSON object, but is {value!r:.80}")
        return value

    def numbers(self, name: str) -> dict[str, float]:
        """Finite numbers by name."""
        return {key: _number(v, f"{self._where}.{name}.{key}") for key, v in self.mapping(name).items()}

    def named_texts(self, name: str) -> dict[str, str]:
        """Texts by name."""
        return {key: _text(v, f"{self._where}.{name}.{key}") for key, v in self.mapping(name).items()}

    def end(self) -> None:
        """Refuse what is left over."""
        if self._left:
            raise PackageError(f"{self._where} has an unknown field {min(self._left)!r:.80}")


def parse_object(content: bytes, where: str) -> JsonReader:
    """The fields of a JSON object: no NaN, no key twice, no nesting beyond Python's stack.

    Raises:
        PackageError: it is not such JSON.
    """

    def refuse(constant: str) -> NoReturn:
        raise PackageError(f"{where} holds {constant}")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) != len(pairs):
            raise PackageError(f"{where} holds a key twice")
        return mapping

    try:
        return JsonReader(json.loads(content, parse_constant=refuse, object_pairs_hook=unique), where)
    except (ValueError, RecursionError) as error:
        raise PackageError(f"{where} is not JSON: {error}") from error


def canonical_json(document: Mapping[str, Any]) -> bytes:
    """The one text of a document."""
    return (json.dumps(document, sort_keys=True, indent=2, allow_nan=False) + "\n").encode()


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise PackageError(f"{where} must be a text of at most {_MAX_TEXT:,} characters, but is {value!r:.80}")
    return value


def _number(value: Any, where: str) -> float:
    # An integer too large for a float would raise at the first use of it.
    if type(value) not in (int, float) or not abs(value) < 1e300:
        raise PackageError(f"{where} must be a number, but is {value!r:.80}")
    return value if isinstance(value, float) else float(value)


# --- ``manifest.json``: what a package computes, where it comes from, and the SHA-256 of each of its files


MANIFEST = "manifest.json"
FORMAT = 1
MAX_MANIFEST_BYTES = 4 * 2**20
PROGRAMS = ("pt2", "onnx")
"""The formats that run without the task's code."""

DTYPES = (
    *("float64", "float32", "float16", "bfloat16"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
)
"""What inputs and outputs may be of, as torch calls it."""

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
"""The names of packages and tags: they become file names and parts of URLs."""

_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where a package's model comes from.

    Attributes:
        run: the run's id.
        task: as ``paceline train TASK`` names it.
        fields: the task's hyperparameters, JSON types.
        step: optimizer steps that the model was trained for.
        state_version: of the checkpoint.
        model_sha256: of the trained model's state, before any quantization.
        data: what is known of the data, JSON types.
        versions: of paceline, torch and Python at the export.
        code_sha256: of the file that defines the task; None where it has none.
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


@dataclass(frozen=True, kw_only=True)
class FormatDifference:
    """How far a format's outputs are from the trained model's, over the test split.

    Attributes:
        largest: the largest absolute difference of an element of a floating-point output.
        equal_labels: the share of samples with the same label; None where there are no labels.
        samples: so many were compared.
    """

    largest: float
    equal_labels: float | None
    samples: int


@dataclass(frozen=True, kw_only=True)
class PackageManifest:
    """All that a package says of itself.

    Attributes:
        name: of the model.
        created: when, in ISO 8601.
        inputs: of the program, by name, in the order of its arguments.
        outputs: by name.
        labels: the classes' names, by number.
        probabilities: the output that holds each class's probability.
        label: the output that holds the most likely class.
        metrics: of the trained model on the test split.
        provenance: where it comes from.
        files: all files but the manifest, by name.
        weights: the file with the model's state.
        programs: format ("pt2", "onnx") -> file.
        quantization: "int8", "bf16" or None.
        differences: format -> how far it is from the trained model.
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
        """The one text that this manifest has; its SHA-256 is the package's digest."""
        document = asdict(self)
        # In lists, because their order is that of the program's arguments.
        for side in ("inputs", "outputs"):
            document[side] = [{"name": name, **spec} for name, spec in document[side].items()]
        return canonical_json({"format": FORMAT, **document})

    @property
    def digest(self) -> str:
        """The package's digest, in hexadecimal."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @property
    def size_bytes(self) -> int:
        """Of all files but the manifest."""
        return sum(record.size for record in self.files.values())

    @classmethod
    def from_bytes(cls, content: bytes) -> PackageManifest:
        """Parse and check every field.

        Raises:
            PackageError: it is not what :meth:`to_bytes` of some manifest gives; names the field.
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
            raise PackageError(f"{MANIFEST} is not in its canonical form: it was edited")
        return manifest

    def _check_references(self) -> None:
        """Hold the parts against each other."""
        for what in ("probabilities", "label"):
            name = getattr(self, what)
            if name is not None and name not in self.outputs:
                raise PackageError(f"{MANIFEST}.{what} is {name!r:.80}, which is no output")
        if unknown := self.programs.keys() - set(PROGRAMS):
            raise PackageError(f"{MANIFEST}.programs has {min(unknown)!r:.80}; known are {', '.join(PROGRAMS)}")
        for file in (self.weights, *self.programs.values()):
            if file not in self.files:
                raise PackageError(f"{MANIFEST} names the file {file!r:.80}, which is not in its files")


def plain_name(name: str, what: str) -> str:
    """The name of a package or tag, checked.

    Raises:
        PackageError: it could be a path, or is hard to type.
    """
    if not NAME.fullmatch(name):
        raise PackageError(
            f"{what} must be 1 to 64 lower-case letters, digits, dots, dashes and underscores, and begin "
            f"with a letter or digit, but is {name!r:.80}."
        )
    return name


def _specs(fields: JsonReader, side: str) -> dict[str, TensorSpec]:
    specs: dict[str, TensorSpec] = {}
    for number, item in enumerate(fields.items(side)):
        entry = JsonReader(item, f"{MANIFEST}.{side}[{number}]")
        name, dtype, shape = entry.text("name"), entry.text("dtype"), entry.items("shape")
        entry.end()
        if dtype not in DTYPES:
            raise PackageError(f"{MANIFEST}.{side}: {name!r:.80} is of {dtype!r:.80}, which is no dtype")
        if not all(size is None or (type(size) is int and 0 < size < 2**40) for size in shape):
            raise PackageError(f"{MANIFEST}.{side}: {name!r:.80} has the shape {shape!r:.80}")
        if not name or name in specs:
            raise PackageError(f"{MANIFEST}.{side} names {name!r:.80} twice or not at all")
        specs[name] = TensorSpec(dtype=dtype, shape=tuple(shape))
    if not specs:
        raise PackageError(f"{MANIFEST}.{side} is empty")
    return specs


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
    )
    fields.end()
    return provenance


def _difference(name: str, document: Any) -> FormatDifference:
    fields = JsonReader(document, f"{MANIFEST}.differences.{name}")
    share = fields.take("equal_labels")
    if share is not None and not (type(share) in (int, float) and 0 <= share <= 1):
        raise PackageError(f"{MANIFEST}.differences.{name}.equal_labels is {share!r:.80}, no share")
    difference = FormatDifference(largest=fields.number("largest"), equal_labels=share, samples=fields.count("samples"))
    fields.end()
    return difference


def _record(name: str, document: Any) -> FileRecord:
    if not _FILE.fullmatch(name) or name == MANIFEST:
        raise PackageError(f"{MANIFEST}.files has {name!r:.200}, which is no plain file name")
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
