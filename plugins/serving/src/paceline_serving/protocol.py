"""The Open Inference Protocol v2: requests, responses and metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import orjson

from paceline.core.inference import TensorSpec
from paceline_serving.batching import Deployment, InvalidRequest
from paceline_serving.connection import JSON_TYPE, LARGE_BYTES, Headers
from paceline_serving.model import (
    DATATYPES,
    NOT_JSON,
    Array,
    Arrays,
    ModelSpec,
    client_shape,
    describe_sizes,
    fits_shape,
)
from paceline_serving.tables import (
    CellError,
    check_length,
    columns_of,
    encode_texts,
    table_records,
    text_array,
    to_dtype,
    to_inputs,
    to_record,
)

# --- Inference requests: JSON, and the extension for binary tensors ---
#
# Everything that a client sends is checked here against the model's schema, so replicas get only valid names,
# types and shapes.


MAX_TENSORS = 64
_MAX_DIMENSIONS = 16
MAX_ID_LENGTH = 256
_LARGE_TEXT_BYTES = 16 * 1024
_MAX_TEXTS = 2**20  # of a tensor; as Python objects they take several times their bytes
_PIECE_BYTES = 64 * 1024  # of a large tensor's text; parsing it keeps the interpreter for a few milliseconds


class InputParameters(msgspec.Struct):
    """The parameters of an input that count."""

    binary_data_size: int | None = None


class InputEntry(msgspec.Struct):
    """An element of ``inputs``, whose data is not parsed yet: as Python objects, it takes many times its bytes."""

    name: str
    datatype: str
    shape: list[int]
    parameters: InputParameters | None = None
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class ParsedInput(InputEntry):
    """An input whose data came as elements of its datatype, in row-major order."""

    elements: Sequence[Any] = ()


class OutputParameters(msgspec.Struct):
    """The parameters of a requested output that count."""

    binary_data: bool | msgspec.UnsetType = msgspec.UNSET
    classification: bool | int | None = None


class OutputEntry(msgspec.Struct):
    """An element of ``outputs``."""

    name: str
    parameters: OutputParameters | None = None


class RequestParameters(msgspec.Struct):
    """The parameters of a request that count; ``timeout`` is in microseconds, as in Triton's scheduling extension."""

    binary_data_output: bool = False
    timeout: int | None = None


class RequestDocument(msgspec.Struct):
    """The JSON of a request; unknown fields are skipped, so that they cost no memory."""

    inputs: list[InputEntry]
    id: str | None = None
    parameters: RequestParameters | None = None
    outputs: list[OutputEntry] | None = None


@dataclass(frozen=True, kw_only=True)
class InferRequest:
    """A valid request for a model.

    Attributes:
        inputs: of the model's program by name, rows first.
        outputs: requested name -> whether in binary.
        other_columns: of the plain form, which the answer repeats.
    """

    inputs: dict[str, Array]
    id: str | None = None
    outputs: dict[str, bool] = field(default_factory=dict)
    timeout_s: float = math.inf
    other_columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)


def takes_long(spec: ModelSpec, size: int) -> bool:
    """Return whether to parse a body of ``size`` bytes outside of the event loop; encoding texts takes longest."""
    return size > (_LARGE_TEXT_BYTES if spec.encodings else LARGE_BYTES)


def parse_request(spec: ModelSpec, body: bytes | bytearray, json_length: str | None) -> InferRequest:
    """Parse and check a request's body.

    Args:
        body: JSON, followed by binary tensors, if any.
        json_length: the header ``Inference-Header-Content-Length``, where the binary tensors begin.

    Raises:
        InvalidRequest: says which part breaks which rule.
    """
    header, binary = _split(body, json_length)
    try:
        document = msgspec.json.decode(header, type=RequestDocument)
    except NOT_JSON as error:
        raise _no_json(header, "not JSON of an inference request", error) from None
    return check_document(spec, document, binary)


def example_rows(spec: ModelSpec) -> str:
    """Return a request in the plain form, with one row."""
    return orjson.dumps({"rows": [to_record(spec, spec.row)]}).decode()


def example_request(spec: ModelSpec) -> dict[str, Any]:
    """Return a request in the protocol's form, with one row."""
    columns = columns_of([to_record(spec, spec.row)])
    # As the client would send it, so without encodings.
    arrays, _ = to_inputs(columns, replace(spec, encodings={}))
    return {
        "inputs": [
            {
                "name": name,
                "datatype": DATATYPES[spec.inputs[name].dtype],
                "shape": list(array.shape),
                # Numbers in their shortest decimals, and a missing one as None.
                "data": array.ravel().tolist() if array.dtype == object else orjson.loads(_dump(array.ravel())),
            }
            for name, array in arrays.items()
        ]
    }


def parse_rows(spec: ModelSpec, body: bytes | bytearray) -> InferRequest:
    """Parse the plain form of a request: ``{"rows": [{"age": 3, ...}, ...]}``.

    Raises:
        InvalidRequest: names the row and the value.
    """
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _no_json(body, "not JSON", error) from None
    rows = document.get("rows") if isinstance(document, dict) else None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        text = example_rows(spec)
        raise InvalidRequest(f"the body must be like {text if len(text) < 500 else text[:500] + '...'}")
    columns = columns_of(rows)
    try:
        inputs, used = to_inputs(columns, spec)
    except CellError as error:
        where = "rows" if error.row is None else f"rows[{error.row}]"
        raise InvalidRequest(f"{where}: {error.column} {error.problem}.") from None
    others = {name: cells for name, cells in columns.items() if name not in used}
    try:
        orjson.dumps([[others]])  # the answer repeats them as deep as this; orjson reads more levels than it writes
    except orjson.JSONEncodeError as error:
        raise InvalidRequest(f"rows: other values cannot be repeated in the answer: {error}.") from None
    return InferRequest(inputs=inputs, other_columns=others)


def _no_json(text: bytes | bytearray | memoryview, what: str, error: Exception) -> InvalidRequest:
    hint = " NaN is not JSON; a missing value is null." if b"NaN" in bytes(text) else ""
    return InvalidRequest(f"the body is {what}: {error}.{hint}")


def check_document(spec: ModelSpec, document: RequestDocument, binary: memoryview) -> InferRequest:
    """Check a request's document against the model's schema.

    Args:
        binary: concatenated bytes of the inputs that have ``binary_data_size``.
    """
    parameters = document.parameters or RequestParameters()
    if document.id is not None and len(document.id) > MAX_ID_LENGTH:
        raise InvalidRequest(f"id must be a string of at most {MAX_ID_LENGTH} characters.")
    timeout = parameters.timeout or 0
    if timeout < 0:
        raise InvalidRequest("parameter timeout must be a whole number of microseconds.")
    return InferRequest(
        id=document.id,
        inputs=_inputs(spec, document.inputs, binary),
        outputs=_outputs(spec, document.outputs or [], parameters.binary_data_output),
        timeout_s=min(timeout / 1e6, 86400.0) if timeout else math.inf,
    )


def _split(body: bytes | bytearray, json_length: str | None) -> tuple[memoryview, memoryview]:
    view = memoryview(body)
    if json_length is None:
        return view, view[:0]
    # str.isdecimal also accepts digits of other scripts, and a giant number is not a length.
    if not (json_length.isascii() and json_length.isdecimal() and len(json_length) <= 12):
        raise InvalidRequest(f"Inference-Header-Content-Length must be a number of bytes, not {json_length!r:.40}.")
    length = int(json_length)
    if length > len(view):
        raise InvalidRequest(f"Inference-Header-Content-Length is {length}, but the body has only {len(view)} bytes.")
    return view[:length], view[length:]


def _inputs(spec: ModelSpec, entries: Sequence[InputEntry], binary: memoryview) -> dict[str, Array]:
    if not entries:
        raise InvalidRequest("inputs must be a list with at least one tensor.")
    if len(entries) > MAX_TENSORS:
        raise InvalidRequest(f"inputs has {len(entries)} tensors; at most {MAX_TENSORS} are allowed.")
    arrays: dict[str, Array] = {}
    rows = None
    offset = 0
    for entry in entries:
        name = entry.name
        tensor_spec = spec.inputs.get(name)
        if tensor_spec is None:
            raise InvalidRequest(f"{spec.name} has no input {name!r:.80}; it has: {', '.join(spec.inputs)}.")
        if name in arrays:
            raise InvalidRequest(f"input {name} occurs twice.")
        shape = _shape(tensor_spec, entry)
        if rows not in (None, shape[0]):
            raise InvalidRequest(f"input {name} has {shape[0]} rows, but the previous inputs have {rows}.")
        rows = shape[0]
        if entry.parameters is not None and (size := entry.parameters.binary_data_size) is not None:
            if entry.data is not msgspec.UNSET:
                raise InvalidRequest(f"input {name} has both data and binary_data_size; remove one of them.")
            if not 0 <= size <= len(binary) - offset:
                raise InvalidRequest(f"input {name} has {size} bytes, but {len(binary) - offset} follow the JSON.")
            arrays[name] = _from_binary(name, tensor_spec, shape, binary[offset : offset + size])
            offset += size
        elif isinstance(entry, ParsedInput):
            arrays[name] = _from_elements(name, tensor_spec, shape, entry.elements)
        else:
            arrays[name] = _from_json(name, tensor_spec, shape, entry.data)
    if offset != len(binary):
        raise InvalidRequest(f"{len(binary) - offset} bytes after the JSON do not belong to any input.")
    missing = spec.inputs.keys() - arrays.keys()
    if missing:
        raise InvalidRequest(f"{spec.name} also needs the input {min(missing)}.")
    try:
        return encode_texts({name: arrays[name] for name in spec.inputs}, spec)
    except CellError as error:
        raise InvalidRequest(f"input {error.column}, row {error.row}: {error.problem}.") from None


def _to_dtype(name: str, numbers: Array, spec: TensorSpec) -> Array:
    try:
        return to_dtype(name, numbers, spec)
    except CellError as error:
        raise InvalidRequest(f"input {name}: data {error.problem}.") from None


def _shape(spec: TensorSpec, entry: InputEntry) -> tuple[int, ...]:
    name, shape = entry.name, entry.shape
    if entry.datatype != DATATYPES[spec.dtype]:
        raise InvalidRequest(
            f"input {name} must have the datatype {DATATYPES[spec.dtype]}, not {entry.datatype!r:.40}."
        )
    if len(shape) > _MAX_DIMENSIONS or any(size < 0 for size in shape):
        raise InvalidRequest(f"input {name}: shape must be a list of sizes.")
    expected_shape = (None, *spec.shape)
    if not fits_shape(shape, expected_shape):
        raise InvalidRequest(f"input {name} must have the shape [{describe_sizes(expected_shape)}], not {shape}.")
    largest = spec.max_size
    if largest is not None and any(
        size > largest for size, expected in zip(shape[1:], spec.shape, strict=True) if expected is None
    ):
        raise InvalidRequest(f"input {name} has the shape {shape}, but this model takes sizes of at most {largest}.")
    if 0 in shape:
        raise InvalidRequest(f"input {name} has the shape {shape}, which contains no elements.")
    if spec.dtype == "str" and math.prod(shape) > _MAX_TEXTS:
        raise InvalidRequest(f"input {name} has the shape {shape}, but at most {_MAX_TEXTS:,} texts are allowed.")
    return tuple(shape)


def _from_binary(name: str, spec: TensorSpec, shape: tuple[int, ...], content: memoryview) -> Array:
    dtype = spec.dtype
    if dtype == "str":
        return _texts_from_binary(name, shape, content)
    # Python's integers, so that a giant shape does not overflow.
    needed = math.prod(shape) * np.dtype(dtype).itemsize
    if len(content) != needed:
        raise InvalidRequest(f"input {name}: {shape} needs {needed} bytes, not {len(content)}.")
    if dtype == "bool" and np.frombuffer(content, np.uint8).max() > 1:
        raise InvalidRequest(f"input {name}: each BOOL must be a byte of value 0 or 1.")
    array = np.frombuffer(content, np.dtype(dtype).newbyteorder("<")).astype(dtype, copy=False)
    return _to_dtype(name, array.reshape(shape), spec)


def _texts_from_binary(name: str, shape: tuple[int, ...], content: memoryview) -> Array:
    """Read texts in UTF-8, each after its length: a uint32, little-endian, as the protocol has ``BYTES``."""
    texts = []
    position = 0
    for _ in range(math.prod(shape)):
        start = position + 4
        length = int.from_bytes(content[position:start], "little")
        position = start + length
        if position > len(content):
            raise InvalidRequest(f"input {name}: its bytes end within an element, or hold fewer elements than {shape}.")
        texts.append(decode_text(name, bytes(content[start:position])))
    if position != len(content):
        raise InvalidRequest(f"input {name}: {len(content) - position} bytes follow the last element.")
    return _check_texts(name, texts, shape)


def decode_text(name: str, content: bytes) -> str:
    """Return a text of UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"input {name}: each element must be UTF-8.") from None


def _check_texts(name: str, texts: Sequence[str], shape: tuple[int, ...]) -> Array:
    try:
        for number, text in enumerate(texts):
            check_length(number, name, text)
    except CellError as error:
        raise InvalidRequest(f"input {name}, element {error.row}: {error.problem}.") from None
    return text_array(texts, shape)


def _from_elements(name: str, spec: TensorSpec, shape: tuple[int, ...], elements: Sequence[Any]) -> Array:
    if len(elements) != math.prod(shape):
        raise _wrong_nesting(name, shape)
    if spec.dtype == "str":
        return _check_texts(name, elements, shape)
    numbers = np.asarray(elements, float) if spec.allow_missing else np.asarray(elements)
    return _to_dtype(name, numbers, spec).reshape(shape)


def _from_json(name: str, spec: TensorSpec, shape: tuple[int, ...], data: msgspec.Raw | msgspec.UnsetType) -> Array:
    """Read a tensor from valid JSON: nested lists, or one list in row-major order."""
    text = memoryview(b"" if isinstance(data, msgspec.UnsetType) else data)
    if bytes(text[:1]) != b"[":
        raise InvalidRequest(f"input {name}: data must be a list.")
    return _texts_from_json(name, shape, bytes(text)) if spec.dtype == "str" else _numbers(name, spec, shape, text)


def _texts_from_json(name: str, shape: tuple[int, ...], content: bytes) -> Array:
    """Read texts, whose number is bounded before they take their memory."""
    is_nested = content[1:].lstrip(b" \t\r\n").startswith(b"[")
    num_texts = (content.count(b'"') - content.count(b'\\"')) // 2
    if num_texts > _MAX_TEXTS or (is_nested and content.count(b"[") > _MAX_TEXTS):
        raise InvalidRequest(f"input {name}: data must be at most {_MAX_TEXTS:,} texts.")
    kind: Any = str
    for _ in shape if is_nested else (1,):
        kind = list[kind]
    try:
        texts = msgspec.json.decode(content, type=kind)
    except NOT_JSON as error:
        raise InvalidRequest(f"input {name}: data must be texts: {error}.") from None
    for size in shape[1:] if is_nested else ():
        if any(len(item) != size for item in texts):
            raise _wrong_nesting(name, shape)
        texts = list(chain.from_iterable(texts))
    return _from_elements(name, TensorSpec(dtype="str"), shape, texts)


def _wrong_nesting(name: str, shape: tuple[int, ...]) -> InvalidRequest:
    return InvalidRequest(
        f"input {name}: data must be {math.prod(shape)} elements in one list, or lists nested like {list(shape)}."
    )


def _numbers(name: str, spec: TensorSpec, shape: tuple[int, ...], text: memoryview) -> Array:
    """Read numbers or booleans from a JSON list, a piece at a time: memory is a small multiple of the text's.

    The brackets and commas of all pieces together are compared with those of the shape.
    """
    count = math.prod(shape)
    if 2 * count > len(text):  # an element takes a character and a comma
        raise _wrong_nesting(name, shape)
    structure = bytearray()
    array = np.empty(count, spec.dtype)
    element_marks = b"truefals" if spec.dtype == "bool" else b"+-.0123456789eE" + b"nul" * spec.allow_missing
    start = filled = 0
    size = _PIECE_BYTES
    while start < len(text):
        piece = bytes(text[start : start + size])
        if start + size < len(text):
            end = piece.rfind(b",")
            if end < 0:  # within a very long number or white space
                size *= 2
                continue
            piece = piece[:end]
        marks = piece.translate(None, b" \t\r\n" + element_marks)
        if marks.strip(b"[],"):
            kind = "true or false" if spec.dtype == "bool" else "numbers"
            raise InvalidRequest(f"input {name}: data must be {kind}.")
        structure += marks
        try:
            elements = orjson.loads(b"[" + piece.translate(None, b"[]") + b"]")
        except orjson.JSONDecodeError as error:
            if "infinity" in str(error):
                raise InvalidRequest(f"input {name}: {error}.") from None
            raise _wrong_nesting(name, shape) from None  # commas around an empty list
        if filled + len(elements) > count:
            raise _wrong_nesting(name, shape)
        if elements:
            numbers = np.asarray(elements, float) if spec.allow_missing else np.asarray(elements)
            array[filled : filled + len(elements)] = _to_dtype(name, numbers, spec)
        filled += len(elements)
        start += len(piece) + 1
        size = _PIECE_BYTES
        if start < len(text):
            structure += b","
    is_flat = structure == b"[" + b"," * (count - 1) + b"]"
    if filled != count or not (is_flat or _is_nested_like(structure, shape)):
        raise _wrong_nesting(name, shape)
    return array.reshape(shape)


def _is_nested_like(structure: bytearray, shape: tuple[int, ...]) -> bool:
    """Return whether brackets and commas are those of lists nested like ``shape``."""
    length = 0
    for size in reversed(shape):
        length = size * length + (size - 1) + len("[]")
    if length != len(structure):
        return False
    nested = b""
    for size in reversed(shape):
        nested = b"[" + b",".join([nested] * size) + b"]"
    return structure == nested


def _outputs(spec: ModelSpec, entries: Sequence[OutputEntry], binary_by_default: bool) -> dict[str, bool]:
    if not entries:
        return dict.fromkeys(spec.outputs, binary_by_default)
    if len(entries) > MAX_TENSORS:
        raise InvalidRequest(f"outputs must be a list of at most {MAX_TENSORS} tensors.")
    requested: dict[str, bool] = {}
    for entry in entries:
        name, parameters = entry.name, entry.parameters or OutputParameters()
        if name not in spec.outputs:
            raise InvalidRequest(f"{spec.name} has no output {name!r:.80}; it has: {', '.join(spec.outputs)}.")
        if name in requested:
            raise InvalidRequest(f"output {name} occurs twice.")
        if parameters.classification:
            raise InvalidRequest(f"output {name}: classification is not supported; request the probabilities.")
        is_binary = parameters.binary_data
        requested[name] = binary_by_default if isinstance(is_binary, msgspec.UnsetType) else is_binary
    return requested


# --- Answers to inference requests, in JSON or with binary tensors ---


_PIECE_ELEMENTS = 32 * 1024

EXACT = "exact_batch_sizes"
"""The parameter of a model's metadata, and of a gRPC response, if bits do not depend on the other requests."""

EXACT_HEADER = b"paceline-exact-batch-sizes"
"""The same in a response by HTTP."""


def build_response(deployment: Deployment, request: InferRequest, outputs: Arrays) -> tuple[Headers, bytes]:
    """Return the headers and the body of an answer; NaN and infinities are null in JSON."""
    spec = deployment.spec
    entries = []
    binary: list[bytes] = []
    for name, in_binary in request.outputs.items():
        array = outputs[name]
        entry: dict[str, Any] = {"name": name, "datatype": DATATYPES[array.dtype.name], "shape": array.shape}
        if in_binary:
            content = bytes_of(array)
            binary.append(content)
            entry["parameters"] = {"binary_data_size": len(content)}
        else:
            entry["data"] = _json_list(np.ascontiguousarray(array).reshape(-1))
        entries.append(entry)
    document = {"model_name": spec.name, "model_version": spec.version, "outputs": entries}
    if request.id is not None:
        document["id"] = request.id
    header = _dump(document)
    if not binary:
        return [JSON_TYPE, *exact_headers(deployment)], header
    length = str(len(header)).encode()
    headers = [(b"content-type", b"application/octet-stream"), (b"inference-header-content-length", length)]
    return headers + exact_headers(deployment), b"".join((header, *binary))


def build_predictions(deployment: Deployment, request: InferRequest, outputs: Arrays) -> tuple[Headers, bytes]:
    """Return the headers and the body of an answer in the plain form."""
    spec = deployment.spec
    # orjson writes the elements of arrays itself, a float32 in its shortest digits, but no texts.
    values = {name: a.tolist() if a.dtype == object else np.ascontiguousarray(a) for name, a in outputs.items()}
    predictions = list(table_records(values, spec, request.other_columns, 0))
    answer = {"model_name": spec.name, "model_version": spec.version, "predictions": predictions}
    return [JSON_TYPE, *exact_headers(deployment)], _dump(answer)


def _json_list(flat: Array) -> Array | orjson.Fragment:
    """Return a list for orjson; a long one is written a piece at a time, so that other threads get their turn."""
    if flat.size <= _PIECE_ELEMENTS:
        return flat
    pieces = (flat[start : start + _PIECE_ELEMENTS] for start in range(0, flat.size, _PIECE_ELEMENTS))
    return orjson.Fragment(b"[%s]" % b",".join(_dump(piece)[1:-1] for piece in pieces))


def _dump(document: Any) -> bytes:
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


def bytes_of(array: Array) -> bytes:
    """Return a tensor's bytes as the protocol has them, little-endian."""
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


# --- Models and their metadata, for HTTP and gRPC ---


SERVER_NAME = "paceline"


def describe_exact(deployment: Deployment) -> str:
    """Return the sizes of the batches of ``--exact``, such as "32,16"; empty without it."""
    return ",".join(map(str, deployment.exact_sizes))


def exact_headers(deployment: Deployment) -> Headers:
    """Return the header of responses that tells the sizes; none without ``--exact``."""
    sizes = describe_exact(deployment)
    return [(EXACT_HEADER, sizes.encode())] if sizes else []


def model_metadata(deployment: Deployment) -> dict[str, Any]:
    """Return a model's metadata for clients; variable sizes are -1."""
    spec = deployment.spec
    tensors = {
        side: [
            {"name": name, "datatype": DATATYPES[tensor.dtype], "shape": [-1, *client_shape(tensor.shape)]}
            for name, tensor in specs.items()
        ]
        for side, specs in (("inputs", spec.inputs), ("outputs", spec.outputs))
    }
    # Beyond the protocol: for forms, and for tables with a column for each value of a row.
    parameters = {
        "labels": spec.labels,
        "label": spec.label,
        "probabilities": spec.probabilities,
        "fields": [asdict(each) for each in spec.fields],
        "output_fields": [asdict(each) for each in spec.output_fields],
        EXACT: deployment.exact_sizes,
    }
    return {
        "name": spec.name,
        "versions": [spec.version],
        "platform": spec.platform,
        **tensors,
        "parameters": {name: value for name, value in parameters.items() if value},
    }
