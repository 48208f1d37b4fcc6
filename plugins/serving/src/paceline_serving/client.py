"""A client of the Open Inference Protocol v2, for this package's server and others."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

import msgspec
import numpy as np

from paceline.core.errors import ConfigError, ServingError
from paceline.core.inference import TensorSpec
from paceline_serving.access import read_bearer_token
from paceline_serving.model import DATATYPES, Array, Arrays, InputField, ModelSpec, OutputField, rows_of

_Field = TypeVar("_Field", InputField, OutputField)
_DTYPES = {datatype: dtype for dtype, datatype in DATATYPES.items()}
_MODEL_ADDRESS = re.compile(r"/(?:(?:v2/models|predict)/([^/]+)(?:/infer|/example)?|predict|v2|v2/models)/?$")
_MAX_RETRY_S = 30.0  # for a server that answers 429


class Client:
    """A connection to a server; a context manager."""

    def __init__(self, url: str, *, token_file: Path | None = None, timeout_s: float = 60.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"a server's address must be like http://127.0.0.1:8000, but is {url!r}.")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._url = url
        # An address of a model, as the server prints it, means the server and the model.
        path = _MODEL_ADDRESS.search(parts.path)
        self._base = (parts.path if path is None else parts.path[: path.start()]).rstrip("/")
        self._model = None if path is None or path[1] is None else unquote(path[1])
        self._connection = kind(parts.hostname, parts.port, timeout=timeout_s)
        self._headers = {} if token_file is None else {"Authorization": f"Bearer {read_bearer_token(token_file)}"}

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()

    def choose(self, model: str | None, option: str) -> str:
        """Return ``model``, or that of the address, or the server's only model.

        Raises:
            ConfigError: the server does not have the model, or has several and none was named by ``option``.
        """
        names: list[str] = self._json("GET", "/v2/models")["models"]
        model = model or self._model
        if model is None and len(names) == 1:
            return names[0]
        if model not in names:
            problem = "has several models" if model is None else f"has no model {model!r}"
            raise ConfigError(f"{self._url} {problem}: give --{option} with one of {', '.join(names)}.")
        return model

    def spec(self, model: str) -> ModelSpec:
        record = self._metadata(model)
        parameters = record.get("parameters", {})
        fields, output_fields = _fields_of(record)
        return ModelSpec(
            name=model,
            version=(record.get("versions") or ["1"])[0],
            inputs={each["name"]: _tensor(each, fields) for each in record["inputs"]},
            outputs={
                each["name"]: _tensor(each, [f for f in output_fields if f.output == each["name"]])
                for each in record["outputs"]
            },
            labels=tuple(parameters.get("labels", ())),
            label=parameters.get("label"),
            probabilities=parameters.get("probabilities"),
        )

    def fields(self, model: str) -> tuple[list[InputField], list[OutputField]]:
        """Return the values of a model's row and of its prediction; empty if the server does not tell of them."""
        return _fields_of(self._metadata(model))

    def _metadata(self, model: str) -> dict[str, Any]:
        return self._json("GET", f"/v2/models/{quote(model)}")

    def infer(self, model: str, inputs: Arrays) -> dict[str, Array]:
        """Predict a batch with binary tensors in both directions; wait and retry on 429."""
        body, json_length = encode_binary(inputs)
        headers = {
            "Inference-Header-Content-Length": str(json_length),
            "Content-Type": "application/octet-stream",
        }
        deadline = time.monotonic() + _MAX_RETRY_S
        while True:
            status, answer_headers, content = self._request("POST", f"/v2/models/{quote(model)}/infer", body, headers)
            if status != 429 or time.monotonic() > deadline:
                break
            time.sleep(float(answer_headers.get("retry-after", "1")))
        if status != 200:
            raise self._failure(status, content)
        outputs = decode_response(content, answer_headers.get("inference-header-content-length"))
        if any(array.shape[0] != rows_of(inputs) for array in outputs.values()):
            raise ServingError(f"{self._url} answered with a different number of rows than requested.")
        return outputs

    def swap(self, package: str, model: str | None, *, allow_signature_change: bool = False) -> dict[str, Any]:
        name = self.choose(model, "model")
        changes = {"allow_signature_change": True} if allow_signature_change else {}
        body = json.dumps({"parameters": {"package": package, **changes}}).encode()
        headers = {"Content-Type": "application/json"}
        return self._json("POST", f"/v2/repository/models/{quote(name)}/load", body, headers)

    def _json(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        status, _, content = self._request(method, path, body, headers or {})
        if status != 200:
            raise self._failure(status, content)
        try:
            document = json.loads(content)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise ServingError(f"{self._url} does not follow the Open Inference Protocol v2.")
        return document

    def _request(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, Mapping[str, str], bytes]:
        try:
            self._connection.request(method, self._base + path, body, {**self._headers, **headers})
            if self._connection.sock is not None:
                self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            response = self._connection.getresponse()
            answer_headers = {name.lower(): value for name, value in response.getheaders()}
            return response.status, answer_headers, response.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise ServingError(f"{self._url} cannot be reached: {str(error) or type(error).__name__}.") from error

    def _failure(self, status: int, content: bytes) -> ServingError:
        try:
            message = json.loads(content)["error"]
        except (ValueError, KeyError, TypeError):
            message = content[:200].decode("utf-8", "replace")
        return ServingError(f"{self._url} answered {status}: {message}")


def _fields_of(metadata: Mapping[str, Any]) -> tuple[list[InputField], list[OutputField]]:
    parameters = metadata.get("parameters", {})
    return _parse_fields(parameters, "fields", InputField), _parse_fields(parameters, "output_fields", OutputField)


def _parse_fields(parameters: Mapping[str, Any], name: str, kind: type[_Field]) -> list[_Field]:
    try:
        return msgspec.convert(parameters.get(name, []), list[kind])  # type: ignore[valid-type]
    except msgspec.ValidationError:
        return []  # another server's


def _tensor(entry: Mapping[str, Any], fields: Sequence[InputField | OutputField]) -> TensorSpec:
    """Return a tensor of the metadata, with what its ``fields`` tell and its entry in the protocol does not."""
    known: dict[str, Any] = {}
    name = entry["name"]
    fields = [each for each in fields if name == (each.input if isinstance(each, InputField) else each.output)]
    if fields:
        first = fields[0]
        has_columns = not first.shape and len(entry["shape"]) == 2
        columns = {each.name: each.unit for each in fields} if has_columns else {}
        known = {"columns": columns, "unit": "" if columns else first.unit}
        if isinstance(first, InputField):
            known |= {name: getattr(first, name) for name in ("minimum", "maximum", "allow_missing")}
    shape = tuple(None if size == -1 else size for size in entry["shape"][1:])
    return TensorSpec(dtype=_DTYPES[entry["datatype"]], shape=shape, **known)


def encode_binary(inputs: Arrays) -> tuple[bytes, int]:
    """Return a request's body with binary tensors in both directions, and the length of its JSON."""
    entries, contents = [], []
    for name, array in inputs.items():
        is_text = array.dtype == object
        if is_text:
            content = b"".join(len(text).to_bytes(4, "little") + text for text in map(str.encode, array.ravel()))
        else:
            content = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        contents.append(content)
        entries.append(
            {
                "name": name,
                "datatype": "BYTES" if is_text else DATATYPES[array.dtype.name],
                "shape": array.shape,
                "parameters": {"binary_data_size": len(content)},
            }
        )
    header = json.dumps({"inputs": entries, "parameters": {"binary_data_output": True}}).encode()
    return b"".join((header, *contents)), len(header)


def decode_response(content: bytes, json_length: str | None) -> dict[str, Array]:
    """Return the outputs of an answer in JSON or binary.

    Raises:
        ServingError: it does not follow the protocol.
    """
    try:
        offset = len(content) if json_length is None else int(json_length)
        outputs: dict[str, Array] = {}
        for entry in json.loads(content[:offset])["outputs"]:
            dtype = np.dtype(_DTYPES[entry["datatype"]])
            size = entry.get("parameters", {}).get("binary_data_size")
            if size is None:
                flat = np.asarray([np.nan if x is None else x for x in entry["data"]], dtype)
            else:
                flat = np.frombuffer(content[offset : offset + size], dtype.newbyteorder("<")).astype(dtype)
                offset += size
            outputs[entry["name"]] = flat.reshape(entry["shape"])
        return outputs
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ServingError(f"the answer does not follow the Open Inference Protocol v2: {error}") from error
