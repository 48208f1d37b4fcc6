"""The Open Inference Protocol over gRPC, in the event loop of the HTTP server: messages, methods and the port."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import grpc.aio
import msgspec
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2

from paceline import __version__
from paceline.core.errors import ConfigError
from paceline_serving.access import AccessPolicy
from paceline_serving.app import Models, await_result
from paceline_serving.batching import Deployment, InvalidRequest, RequestFailure
from paceline_serving.connection import LARGE_BYTES
from paceline_serving.model import DATATYPES, Arrays, ModelSpec, ServingOptions
from paceline_serving.protocol import (
    EXACT,
    SERVER_NAME,
    InferRequest,
    InputParameters,
    ParsedInput,
    RequestDocument,
    bytes_of,
    check_document,
    decode_text,
    describe_exact,
    model_metadata,
)

# --- Protobuf messages: requests checked by the same rules as JSON, and answers ---
#
# The message classes are tritonclient's, generated from the protocol's ``grpc_service.proto``.


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
    "BYTES": "bytes_contents",
}
"""The field of ``contents`` that holds a datatype's elements; FP16 has none."""

_MAX_CONTENTS = 2**20  # elements; as Python objects they take several times their bytes
_RAW_CONTENTS = service_pb2.ModelInferRequest.DESCRIPTOR.fields_by_name["raw_input_contents"].number
_MAX_FIELDS = 512  # of a message: tensors, requested outputs, parameters
_MAX_PARSED_BYTES = 16 * 2**20  # of a message without its raw contents; parsed, they may take up to 30 times the memory
_FIXED_SIZES = {1: 8, 5: 4}  # bytes of a protobuf field, by its wire type


def check_fields(content: bytes) -> None:
    """Check the number and size of a message's fields before it is parsed: small fields take many times their bytes.

    Raises:
        InvalidRequest: there are too many, or bytes that are not raw tensors.
    """
    position = fields = parsed_bytes = 0
    while position < len(content):
        start = position
        tag, position = _read_varint(content, position)
        match tag & 7:
            case 0:
                _, position = _read_varint(content, position)
            case 2:
                length, position = _read_varint(content, position)
                position += length
            case kind if kind in _FIXED_SIZES:
                position += _FIXED_SIZES[kind]
            case _:
                return  # the parser rejects it
        fields += 1
        if tag >> 3 != _RAW_CONTENTS:
            parsed_bytes += position - start
        if fields > _MAX_FIELDS:
            raise InvalidRequest(f"the message has more than {_MAX_FIELDS} tensors, outputs and parameters.")
        if parsed_bytes > _MAX_PARSED_BYTES:
            raise InvalidRequest(
                f"the message has more than {_MAX_PARSED_BYTES:,} bytes outside of raw_input_contents; send large "
                "tensors there."
            )


def _read_varint(content: bytes, position: int) -> tuple[int, int]:
    """Return a number of protobuf's variable length, and the position after it; a cut one ends the message."""
    value = shift = 0
    while position < len(content) and shift < 70:
        byte = content[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    return value, len(content)


def parse_message(spec: ModelSpec, message: Any) -> InferRequest:
    """Check a ``ModelInferRequest``, as :func:`check_document` does.

    Its tensors are all in ``raw_input_contents``, or all in ``contents``.
    """
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise InvalidRequest(
            f"raw_input_contents has {len(raw)} tensors for {len(message.inputs)} inputs; it must have all or none."
        )
    others = {
        "id": message.id or None,
        "parameters": _parameters(message.parameters),
        "inputs": [],
        "outputs": [{"name": output.name, "parameters": _parameters(output.parameters)} for output in message.outputs],
    }
    try:
        document = msgspec.convert(others, RequestDocument)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the request is invalid: {error}.") from None
    for number, tensor in enumerate(message.inputs):
        if raw and tensor.HasField("contents"):
            raise InvalidRequest(f"input {tensor.name!r:.80} has both contents and raw_input_contents.")
        parameters = InputParameters(len(raw[number])) if raw else None
        elements = () if raw else _elements(tensor)
        document.inputs.append(
            ParsedInput(tensor.name, tensor.datatype, list(tensor.shape), parameters, elements=elements)
        )
    return check_document(spec, document, memoryview(raw[0] if len(raw) == 1 else b"".join(raw)))


def _elements(tensor: Any) -> list[Any]:
    field = _FIELDS.get(tensor.datatype)
    contents = [] if field is None else getattr(tensor.contents, field)
    if len(contents) > _MAX_CONTENTS:
        raise InvalidRequest(
            f"input {tensor.name!r:.80} has {len(contents):,} elements in contents.{field}; send more than "
            f"{_MAX_CONTENTS:,} in raw_input_contents."
        )
    is_text = tensor.datatype == "BYTES"
    values = [decode_text(tensor.name, content) for content in contents] if is_text else list(contents)
    if not values:
        fields = "raw_input_contents" if field is None else f"contents.{field} or raw_input_contents"
        raise InvalidRequest(
            f"input {tensor.name!r:.80}: elements of {tensor.datatype!r:.40} must be sent in {fields}."
        )
    return values


def _parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    choices = {name: value.WhichOneof("parameter_choice") for name, value in parameters.items()}
    return {name: getattr(parameters[name], kind) for name, kind in choices.items() if kind is not None}


def build_message(deployment: Deployment, request: InferRequest, outputs: Arrays, *, raw: bool) -> Any:
    """Build a ``ModelInferResponse``.

    Args:
        raw: send tensors as bytes, like the request's; else in ``contents`` if that can hold them.
    """
    spec = deployment.spec
    answer = service_pb2.ModelInferResponse(model_name=spec.name, model_version=spec.version, id=request.id or "")
    if deployment.exact_sizes:
        answer.parameters[EXACT].string_param = describe_exact(deployment)
    datatypes = {name: DATATYPES[outputs[name].dtype.name] for name in request.outputs}
    raw = raw or not _FIELDS.keys() >= set(datatypes.values())
    for name, datatype in datatypes.items():
        array = outputs[name]
        tensor = answer.outputs.add(name=name, datatype=datatype, shape=array.shape)
        if raw:
            answer.raw_output_contents.append(bytes_of(array))
        else:
            getattr(tensor.contents, _FIELDS[datatype]).extend(array.reshape(-1).tolist())
    return answer


# --- The protocol's gRPC service: https://github.com/kserve/open-inference-protocol, ``grpc_service.proto``


log = logging.getLogger("paceline_serving")
access_log = logging.getLogger("paceline_serving.access")

_SERVICE = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
_SUPPORTED = ("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer")
_OPEN = ("ServerLive", "ServerReady")  # open without the token, like the health addresses of HTTP
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


class GrpcServer:
    """A gRPC server for the models of one server, which takes its port at once and answers after :meth:`start`.

    Args:
        port: 0 picks a free one.
        is_draining: whether the server will end soon.

    Attributes:
        address: ``HOST:PORT``, as clients write it.

    Raises:
        ConfigError: it cannot listen there.
    """

    def __init__(
        self,
        host: str,
        port: int,
        models: Models,
        options: ServingOptions,
        access: AccessPolicy,
        is_draining: Callable[[], bool],
    ) -> None:
        self._models = models
        self._options = options
        self._access = access
        self._is_draining = is_draining
        self._server: Any = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),  # otherwise a second server would silently share the port
                ("grpc.max_receive_message_length", options.max_body_bytes),
                ("grpc.max_send_message_length", -1),
            ]
        )
        self._server.add_generic_rpc_handlers((self._handler(),))
        host = f"[{host}]" if ":" in host else host
        try:
            bound_port = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {host}, --grpc-port {port}: it is in use. --grpc-port 0 picks a free one."
            ) from error
        self.address = f"{host}:{bound_port}"

    async def start(self) -> None:
        await self._server.start()

    async def close(self, *, at_once: bool = False) -> None:
        """Refuse new requests; return when the accepted ones are answered, or ``at_once``."""
        await self._server.stop(0 if at_once else self._options.timeout_s)

    def _handler(self) -> Any:
        handlers = {}
        for method in _SERVICE.methods:
            request_type = getattr(service_pb2, method.input_type.name)
            # A stream is refused at its first message. Messages are bytes here, and counted before they are parsed.
            handlers[method.name] = grpc.unary_unary_rpc_method_handler(
                self._method(method.name, request_type), response_serializer=lambda message: message.SerializeToString()
            )
        return grpc.method_handlers_generic_handler(_SERVICE.full_name, handlers)

    def _method(self, name: str, request_type: Any) -> Callable[[bytes, Any], Awaitable[Any]]:
        """Return a method with the token check, the message's bounds, the codes of failures, and the access log."""

        async def answer(content: bytes, context: Any) -> Any:
            start = time.perf_counter()
            client = context.peer()  # unknown after the client has disconnected
            code = grpc.StatusCode.CANCELLED
            try:
                if name not in _OPEN:
                    client = f"{client} {self._check_token(context)}".strip()
                with self._models.bodies.hold() as hold:
                    hold(len(content))
                    check_fields(content)
                    message = await self._parse(request_type, content, context)
                    del content
                    is_infer = name == "ModelInfer"
                    reply = await self._infer(message, context) if is_infer else self._reply(name, message)
                code = grpc.StatusCode.OK
                return reply
            except RequestFailure as failure:
                code = _CODES.get(failure.status, grpc.StatusCode.UNKNOWN)
                await context.abort(code, str(failure), _trailers(failure))
            except Exception:
                log.exception("gRPC %s", name)
                code = grpc.StatusCode.INTERNAL
                await context.abort(code, "internal server error; see the server's log.")
            finally:
                if access_log.isEnabledFor(logging.INFO):
                    ms = 1000 * (time.perf_counter() - start)
                    access_log.info("%s gRPC %s %s %.1f ms", client, name, code.name, ms)

        return answer

    async def _parse(self, request_type: Any, content: bytes, context: Any) -> Any:
        if len(content) <= LARGE_BYTES:
            return _parse_protobuf(request_type, content)
        parsing = self._models.bodies.run(_parse_protobuf, request_type, content)
        return await await_result(self._time_left_s(context), parsing, set())

    def _time_left_s(self, context: Any) -> float:
        left_s: float | None = context.time_remaining()
        return self._options.timeout_s if left_s is None else min(left_s, self._options.timeout_s)

    def _check_token(self, context: Any) -> str:
        token = dict(context.invocation_metadata() or ()).get("authorization", "")
        return self._access.check_token({b"authorization": token.encode()})

    def _reply(self, name: str, message: Any) -> Any:
        """Answer what needs no model's computation."""
        match name:
            case "ServerLive":
                return service_pb2.ServerLiveResponse(live=True)
            case "ServerReady":
                return service_pb2.ServerReadyResponse(ready=self._models.ready and not self._is_draining())
            case "ServerMetadata":
                return service_pb2.ServerMetadataResponse(name=SERVER_NAME, version=__version__)
            case "ModelReady":
                deployment = self._models.find(message.name, message.version or None)
                ready = bool(deployment.ready_replicas) and not self._is_draining()
                return service_pb2.ModelReadyResponse(ready=ready)
            case "ModelMetadata":
                document = model_metadata(self._models.find(message.name, message.version or None))
                document.pop("parameters")  # which only the JSON form has
                return service_pb2.ModelMetadataResponse(**document)
        raise RequestFailure(501, f"{name} is not supported. Supported are: {', '.join(_SUPPORTED)}.")

    async def _infer(self, message: Any, context: Any) -> Any:
        deployment = self._models.find(message.model_name, message.model_version or None)
        with self._models.metrics.counting(deployment.spec.name):
            deployment.batcher.check_room()
            return await self._models.compute(
                deployment,
                message.ByteSize(),
                self._time_left_s(context),
                set(),
                partial(parse_message, deployment.spec, message),
                partial(build_message, raw=bool(message.raw_input_contents)),
            )


def _parse_protobuf(message_type: Any, content: bytes) -> Any:
    try:
        return message_type.FromString(content)
    except DecodeError:
        raise InvalidRequest(f"this is no {message_type.DESCRIPTOR.full_name} message.") from None


def _trailers(failure: RequestFailure) -> tuple[tuple[str, str], ...]:
    """Return when to retry, as gRPC's own retries read it: https://github.com/grpc/proposal, A6."""
    seconds = dict(failure.headers).get(b"retry-after")
    return () if seconds is None else (("grpc-retry-pushback-ms", str(1000 * int(seconds))),)
