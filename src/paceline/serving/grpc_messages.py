"""The protocol's protobuf messages: requests checked by the same rules as JSON, and answers.

The messages themselves are tritonclient's, which are made from the protocol's ``grpc_service.proto``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tritonclient.grpc import service_pb2

from paceline.serving.datatypes import DATATYPES
from paceline.serving.failures import InvalidRequest
from paceline.serving.infer_request import InferRequest, parse_document
from paceline.serving.servable import Arrays, ModelSpec

_FIELDS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}
"""Where ``contents`` has the elements of a datatype; FP16 has no place there."""


def parse_message(spec: ModelSpec, message: Any) -> InferRequest:
    """Check a ``ModelInferRequest`` against the model's schema.

    Its tensors are all in ``raw_input_contents``, or all in ``contents``.

    Raises:
        InvalidRequest: says which part breaks which rule.
    """
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise InvalidRequest(
            f"raw_input_contents has {len(raw)} tensors for {len(message.inputs)} inputs; it has all or none."
        )
    inputs = []
    for number, tensor in enumerate(message.inputs):
        entry = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        if raw:
            if tensor.HasField("contents"):
                raise InvalidRequest(f"input {tensor.name!r:.80} has contents and raw_input_contents.")
            entry["parameters"] = {"binary_data_size": len(raw[number])}
        else:
            entry["data"] = _typed(tensor)
        inputs.append(entry)
    document = {
        "parameters": _parameters(message.parameters),
        "inputs": inputs,
        "outputs": [
            {"name": output.name, "parameters": _parameters(output.parameters)} for output in message.outputs
        ],
    }
    if message.id:
        document["id"] = message.id
    return parse_document(spec, document, memoryview(raw[0] if len(raw) == 1 else b"".join(raw)))


def _typed(tensor: Any) -> list[Any]:
    field = _FIELDS.get(tensor.datatype)
    values = [] if field is None else list(getattr(tensor.contents, field))
    if not values:
        places = "raw_input_contents" if field is None else f"contents.{field} or raw_input_contents"
        raise InvalidRequest(
            f"input {tensor.name!r:.80}: the elements of {tensor.datatype!r:.40} are sent in {places}."
        )
    return values


def _parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    chosen = {name: value.WhichOneof("parameter_choice") for name, value in parameters.items()}
    return {name: getattr(parameters[name], kind) for name, kind in chosen.items() if kind is not None}


def build_message(spec: ModelSpec, request: InferRequest, outputs: Arrays, *, raw: bool) -> Any:
    """A ``ModelInferResponse``.

    Args:
        spec: of the model that answers.
        request: what was asked.
        outputs: the model's.
        raw: tensors as bytes, as the request had its own; else in ``contents``, where that can hold them.
    """
    answer = service_pb2.ModelInferResponse(
        model_name=spec.name, model_version=spec.version, id=request.id or ""
    )
    datatypes = {name: DATATYPES[outputs[name].dtype.name] for name in request.outputs}
    raw = raw or not _FIELDS.keys() >= set(datatypes.values())
    for name, datatype in datatypes.items():
        array = outputs[name]
        tensor = answer.outputs.add(name=name, datatype=datatype, shape=array.shape)
        if raw:
            little_endian = array.astype(array.dtype.newbyteorder("<"), copy=False)
            answer.raw_output_contents.append(little_endian.tobytes())
        else:
            getattr(tensor.contents, _FIELDS[datatype]).extend(array.reshape(-1).tolist())
    return answer
