"""The server's own description, for people, generators of clients, and tests that try everything."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paceline import __version__
from paceline.inference import TensorSpec
from paceline.serving.datatypes import DATATYPES
from paceline.serving.servable import ModelSpec

_ERROR = {
    "type": "object",
    "properties": {"error": {"type": "string"}},
    "required": ["error"],
}
_REFUSALS = {
    "400": "It is not what the protocol or the model's schema says; the error says where.",
    "401": "The token is missing.",
    "404": "There is no such model or version.",
    "405": "Another method is meant.",
    "408": "The client sent it too slowly.",
    "413": "The body is too large.",
    "415": "The body is compressed.",
    "429": "Too many requests wait; Retry-After says when to try again.",
    "500": "The model failed on this input.",
    "503": "No replica could compute it.",
    "504": "The request's time is up.",
}


def describe(specs: Iterable[ModelSpec]) -> dict[str, Any]:
    """An OpenAPI 3.1 document of a server with these models."""
    paths: dict[str, Any] = {
        "/v2/health/live": _get("Is the process there?", {"live": {"type": "boolean"}}),
        "/v2/health/ready": _get("Would a request be answered?", {"ready": {"type": "boolean"}}, ("503",)),
        "/v2": _get("The server's name, version and extensions.", {"name": {"type": "string"}}),
        "/v2/models": _get("The models' names.", {"models": {"type": "array", "items": {"type": "string"}}}),
    }
    for spec in specs:
        metadata = _get("Its inputs and outputs.", {"name": {"const": spec.name}})
        ready = _get("Has it a replica?", {"ready": {"type": "boolean"}}, ("503",))
        infer = {"post": _infer(spec)}
        for base in (f"/v2/models/{spec.name}", f"/v2/models/{spec.name}/versions/{spec.version}"):
            paths |= {base: metadata, f"{base}/ready": ready, f"{base}/infer": infer}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Paceline: Open Inference Protocol v2",
            "version": __version__,
            "description": "A request may say how long it may take: Request-Timeout-Ms. Tensors may be "
            "binary: see the binary tensor extension of the protocol.",
        },
        "paths": paths,
        "components": {"schemas": {"Error": _ERROR}},
    }


def _get(summary: str, properties: dict[str, Any], refusals: tuple[str, ...] = ()) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    responses = {"200": {"description": "Yes.", "content": {"application/json": {"schema": schema}}}}
    for status in refusals:
        responses[status] = {"description": "No.", "content": {"application/json": {"schema": schema}}}
    responses |= _refusals("401")
    return {"get": {"summary": summary, "responses": responses}}


def _refusals(*statuses: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": _REFUSALS[status], "content": content} for status in statuses}


def _infer(spec: ModelSpec) -> dict[str, Any]:
    body = {
        "type": "object",
        "properties": {
            "id": {"type": "string", "maxLength": 256},
            "parameters": {
                "type": "object",
                "properties": {"binary_data_output": {"const": False}},
                "additionalProperties": False,
            },
            "inputs": {
                "type": "array",
                "prefixItems": [_tensor(name, tensor) for name, tensor in spec.inputs.items()],
                "items": False,
                "minItems": len(spec.inputs),
                "maxItems": len(spec.inputs),
            },
            "outputs": {
                "type": "array",
                "uniqueItems": True,
                "maxItems": 64,
                "items": {
                    "type": "object",
                    "properties": {"name": {"enum": list(spec.outputs)}},
                    "required": ["name"],
                    "additionalProperties": False,
                },
            },
        },
        "required": ["inputs"],
        "additionalProperties": False,
    }
    output = {
        "type": "object",
        "properties": {
            "name": {"enum": list(spec.outputs)},
            "datatype": {"enum": sorted({DATATYPES[tensor.dtype] for tensor in spec.outputs.values()})},
            "shape": {"type": "array", "items": {"type": "integer"}},
            "data": {"type": "array"},
        },
        "required": ["name", "datatype", "shape", "data"],
    }
    answer = {
        "type": "object",
        "properties": {
            "model_name": {"const": spec.name},
            "model_version": {"const": spec.version},
            "id": {"type": "string"},
            "outputs": {"type": "array", "items": output},
        },
        "required": ["model_name", "model_version", "outputs"],
    }
    return {
        "summary": "Predict.",
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {
            "200": {"description": "The outputs.", "content": {"application/json": {"schema": answer}}},
            **_refusals(*_REFUSALS),
        },
    }


def _tensor(name: str, spec: TensorSpec) -> dict[str, Any]:
    """An input of one row, which is the example that can be said without a rule between shape and data."""
    shape = [1, *(8 if size is None else size for size in spec.shape)]
    count = 1
    for size in shape:
        count *= size
    if spec.dtype == "bool":
        number: dict[str, Any] = {"type": "boolean"}
    elif spec.dtype.startswith("float"):
        number = {"type": "number", "minimum": -1000, "maximum": 1000}
    else:
        number = {"type": "integer", "minimum": 0, "maximum": 127}
    return {
        "type": "object",
        "properties": {
            "name": {"const": name},
            "datatype": {"const": DATATYPES[spec.dtype]},
            "shape": {"const": shape},
            "data": {"type": "array", "items": number, "minItems": count, "maxItems": count},
        },
        "required": ["name", "datatype", "shape", "data"],
        "additionalProperties": False,
    }
