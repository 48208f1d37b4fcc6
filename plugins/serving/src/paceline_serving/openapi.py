"""The server's OpenAPI description, for people, client generators and exhaustive tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from paceline import __version__
from paceline_serving.encodings import MAX_TEXT_LENGTH, Categories
from paceline_serving.model import DATATYPES, InputField, ModelSpec
from paceline_serving.protocol import MAX_ID_LENGTH, MAX_TENSORS, example_request
from paceline_serving.tables import to_record

Schema = dict[str, Any]


def _object(*required: str, **properties: Schema) -> Schema:
    """Return the schema of an object; all its properties are required if none is named."""
    return {"type": "object", "properties": properties, "required": list(required or properties)}


def _or_null(**properties: Schema) -> Schema:
    return {"type": ["object", "null"], "properties": properties}


def _json(schema: Schema, **more: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema, **more}}


_TEXT, _FLAG = {"type": "string"}, {"type": "boolean"}
_ERROR = _object(error=_TEXT)
_ERROR_DESCRIPTIONS = {
    "400": "The request breaks a rule of the protocol or the model's schema; the error says which.",
    "401": "The token is missing or wrong.",
    "403": "The server does not have this host name, or only its own machine may send the request.",
    "404": "The model or version does not exist.",
    "405": "The method is not allowed; Allow names the allowed ones.",
    "408": "The client sent the request too slowly.",
    "409": "The package cannot be served; the model stays as it is.",
    "413": "The body is too large.",
    "415": "The body is compressed, or not JSON where it must be.",
    "429": "The queue is full; Retry-After says when to try again.",
    "431": "The head is too large.",
    "500": "The model failed on this input.",
    "503": "No replica could compute the request, or the server holds too many bytes of requests.",
    "504": "The request's time limit has passed.",
}


def describe(specs: Iterable[ModelSpec]) -> dict[str, Any]:
    """Return an OpenAPI 3.1 document of a server with these models."""
    paths: dict[str, Any] = {
        "/v2/health/live": _get("Is the process alive?", live=_FLAG),
        "/v2/health/ready": _get("Would a request be answered?", "503", ready=_FLAG),
        "/v2": _get("The server's name, version and extensions.", name=_TEXT),
        "/v2/models": _get("The models' names.", models={"type": "array", "items": _TEXT}),
        "/openapi.json": _get("This document.", openapi=_TEXT),
        "/metrics": _get("Counters for Prometheus.", media_type="text/plain"),
        "/": _get("A page for people.", media_type="text/html"),
    }
    models = list(specs)
    for spec in models:
        paths["/predict" if len(models) == 1 else f"/predict/{spec.name}"] = {"post": _plain(spec)}
        metadata = _get("The model's inputs and outputs.", name={"const": spec.name})
        example = _get("An inference request with one row.", inputs={"type": "array"})
        ready = _get("Does the model have a ready replica?", "503", ready=_FLAG)
        infer = {"post": _infer(spec)}
        for base in (f"/v2/models/{spec.name}", f"/v2/models/{spec.name}/versions/{spec.version}"):
            paths |= {base: metadata, f"{base}/ready": ready, f"{base}/example": example, f"{base}/infer": infer}
        paths[f"/v2/repository/models/{spec.name}/load"] = {"post": _load_operation(spec)}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Paceline: Open Inference Protocol v2",
            "version": __version__,
            "description": "A request may set its time limit with Request-Timeout-Ms. With "
            "Inference-Header-Content-Length, binary tensors follow the JSON: see the protocol's binary tensor "
            "extension.",
        },
        "paths": paths,
        "components": {"schemas": {"Error": _ERROR}},
    }


def _get(summary: str, *no_statuses: str, media_type: str = "", **properties: Schema) -> dict[str, Any]:
    """Describe a GET of JSON, or of a text; ``no_statuses`` have the same document, and mean no."""
    content = {media_type: {"schema": _TEXT}} if media_type else _json(_object(**properties))
    responses = {"200": {"description": "Yes.", "content": content}}
    responses |= {status: {"description": "No.", "content": content} for status in no_statuses}
    responses |= _error_responses("401", "403", "404", "405", "431")
    return {"get": {"summary": summary, "responses": responses}}


def _error_responses(*statuses: str) -> dict[str, Any]:
    content = _json({"$ref": "#/components/schemas/Error"})
    return {status: {"description": _ERROR_DESCRIPTIONS[status], "content": content} for status in statuses}


def _post(summary: str, body: dict[str, Any], description: str, answer: dict[str, Any], *never: str) -> dict[str, Any]:
    """Describe a POST, by the contents of request and answer; it has all errors but ``never``."""
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": body},
        "responses": {
            "200": {"description": description, "content": answer},
            **_error_responses(*_ERROR_DESCRIPTIONS.keys() - set(never)),
        },
    }


def _load_operation(spec: ModelSpec) -> dict[str, Any]:
    package = {"type": "string", "minLength": 1, "pattern": "^[^\\x00]+$"}
    body = _object(parameters=_object("package", package=package, allow_signature_change=_FLAG))
    answer = _object(name={"const": spec.name}, version=_TEXT)
    return _post(
        "Serve another package under this name.", _json(body), "It is served now.", _json(answer), "429", "504"
    )


def _infer(spec: ModelSpec) -> dict[str, Any]:
    """Describe inference. JSON Schema has no rule between shape and data: the description has it."""
    body = _object(
        "inputs",
        id={"type": ["string", "null"], "maxLength": MAX_ID_LENGTH},
        parameters={
            # Without a rule for it, a generator of requests does not ask for an answer within a microsecond.
            "description": "Also timeout: the request's time limit, a whole number of microseconds.",
            **_or_null(binary_data_output=_FLAG),
        },
        inputs={
            "type": "array",
            "description": "Each of the model's inputs once, all with the same number of rows.",
            "items": {"anyOf": [_tensor(spec, name) for name in spec.inputs]},
            "minItems": len(spec.inputs),
            "maxItems": len(spec.inputs),
        },
        outputs={
            "type": ["array", "null"],
            "description": "The requested outputs, each once; all if there are none.",
            "maxItems": MAX_TENSORS,
            "items": _object("name", name={"enum": list(spec.outputs)}, parameters=_or_null(binary_data=_FLAG)),
        },
    )
    output = _object(
        name={"enum": list(spec.outputs)},
        datatype={"enum": sorted({DATATYPES[tensor.dtype] for tensor in spec.outputs.values()})},
        shape={"type": "array", "items": {"type": "integer"}},
        data={"type": "array", "items": {"type": ["number", "boolean", "null"]}},
    )
    answer = _object(
        *("model_name", "model_version", "outputs"),
        model_name={"const": spec.name},
        model_version=_TEXT,
        id=_TEXT,
        outputs={"type": "array", "items": output},
    )
    binary = {"type": "string", "format": "binary", "description": "JSON, then the binary outputs."}
    return _post(
        "Predict.",
        _json(body, example=example_request(spec)),
        "The outputs; with binary ones, Inference-Header-Content-Length is the JSON's length.",
        {**_json(answer), "application/octet-stream": {"schema": binary}},
        "409",
    )


def _plain(spec: ModelSpec) -> dict[str, Any]:
    properties = {}
    for each in spec.fields:
        text = "; ".join(filter(None, (each.unit, each.values_text)))
        properties[each.name] = _cell(spec, each) | ({"description": text} if text else {})
    row = {"type": "object", "properties": properties, "required": list(properties)}
    answer = _object(
        model_name={"const": spec.name},
        model_version=_TEXT,
        predictions={"type": "array", "items": {"type": "object"}},
    )
    return _post(
        "Predict rows that are written by hand; at most 256 KiB. Other values of a row are repeated.",
        _json(
            _object(rows={"type": "array", "items": row, "minItems": 1}), example={"rows": [to_record(spec, spec.row)]}
        ),
        "A record for each row.",
        _json(answer),
        "409",
    )


def _cell(spec: ModelSpec, field: InputField) -> dict[str, Any]:
    tensor = spec.inputs[field.input]
    schema = _element(spec, field.input)
    if tensor.dtype == "str" and not field.format:
        # A whole number means the category of its text.
        numbers = [int(text) for text in schema.get("enum", ()) if text == str(_int_of(text))]
        more = {"enum": [*schema["enum"], *numbers]} if "enum" in schema else {"type": ["string", "integer"]}
        schema = {**schema, **more}
    if tensor.allow_missing:
        types = schema.get("type")
        if isinstance(types, list):
            schema = {**schema, "type": [*types, "null"]}
        else:
            schema = {"anyOf": [schema, {"type": "null"}]}
    for size in reversed(field.shape):
        limits = {"minItems": max(size, 1), "maxItems": tensor.max_size if size == -1 else size}
        schema = {"type": "array", "items": schema, **{key: n for key, n in limits.items() if n is not None}}
    return schema


def _int_of(text: str) -> int | None:
    return int(text) if text.removeprefix("-").isdecimal() and len(text) < 20 else None


def _tensor(model: ModelSpec, name: str) -> dict[str, Any]:
    spec = model.inputs[name]
    element = _element(model, name)
    if spec.allow_missing and spec.dtype != "str":
        element = {"anyOf": [element, {"type": "null"}]}
    any_size: dict[str, Any] = {"type": "integer", "minimum": 1}
    limited = any_size if spec.max_size is None else {**any_size, "maximum": spec.max_size}
    dimensions = [any_size, *(limited if size is None else {"const": size} for size in spec.shape)]
    return _object(
        *("name", "datatype", "shape"),
        name={"const": name},
        datatype={"const": DATATYPES[spec.dtype]},
        shape={
            "type": "array",
            "description": "Rows first.",
            "prefixItems": dimensions,
            "items": False,
            "minItems": len(dimensions),
        },
        data={
            "type": "array",
            "description": "As many elements as the product of the shape: in one list, or nested like the shape.",
            "minItems": 1,
            "items": {"anyOf": [element, {"type": "array"}]},
        },
        parameters={
            "description": "binary_data_size instead of data: the tensor's bytes follow the JSON.",
            **_or_null(binary_data_size={"type": ["integer", "null"], "minimum": 1}),
        },
    )


def _element(model: ModelSpec, name: str) -> dict[str, Any]:
    spec = model.inputs[name]
    dtype = spec.dtype
    element: dict[str, Any]
    if dtype == "str":
        encoding = model.encodings.get(name)
        if model.format(name):
            text = {"type": "string", "format": model.format(name)}
            return {"anyOf": [text, {"const": ""}]} if spec.allow_missing else text
        if not isinstance(encoding, Categories):
            return {"type": "string", "maxLength": MAX_TEXT_LENGTH}
        if encoding.unknown is None and model.choices(name):
            return {"enum": [*model.choices(name), *([""] if spec.allow_missing else [])]}
        return {"type": "string", "minLength": 0 if spec.allow_missing else 1, "maxLength": MAX_TEXT_LENGTH}
    if dtype == "bool":
        return {"type": "boolean"}
    if dtype == "float64":
        element = {"type": "number"}
    elif dtype.startswith("float"):
        largest = np.finfo(dtype).max
        # What is less than half a step beyond is rounded to it.
        limit = float(largest) + float(largest - np.nextafter(largest, np.zeros((), dtype)[()])) / 2
        element = {"type": "number", "exclusiveMinimum": -limit, "exclusiveMaximum": limit}
    else:
        limits = np.iinfo(dtype)
        element = {"type": "integer", "minimum": int(limits.min), "maximum": int(limits.max)}
    ranges = {"minimum": spec.minimum, "maximum": spec.maximum}
    return element | {name: value for name, value in ranges.items() if value is not None}
