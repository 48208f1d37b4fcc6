"""What a large body may cost: memory, and the time of others."""

from __future__ import annotations

import json
import socket
import tracemalloc
from contextlib import ExitStack
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from plugins.serving.tests.conftest import Server, json_request
from plugins.serving.tests.load import PATH

from paceline.core.inference import TensorSpec
from paceline_serving import protocol
from paceline_serving.batching import InvalidRequest, RequestFailure
from paceline_serving.connection import RequestBodies
from paceline_serving.model import DATATYPES, Array, ModelSpec
from paceline_serving.openapi import describe


def parse(dtype: str, shape: list[int], data: str, tensor: TensorSpec | None = None) -> Array | str:
    spec = ModelSpec(
        name="m",
        version="1",
        inputs={"x": tensor or TensorSpec(dtype=dtype, shape=tuple(shape[1:]))},
        outputs={"y": TensorSpec(dtype="float32")},
    )
    entry = f'{{"name": "x", "datatype": "{DATATYPES[dtype]}", "shape": {shape}, "data": {data}}}'
    try:
        return protocol.parse_request(spec, f'{{"inputs": [{entry}]}}'.encode(), None).inputs["x"]
    except InvalidRequest as error:
        return str(error)


@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8"])
@pytest.mark.parametrize(
    ("shape", "data"),
    [
        ([2, 3], "[1,0,1,1,0,1]"),
        ([2, 3], " [ [ 1 , 0,1],\n[1,0 ,1]  ] "),
        ([2, 3], "[[1,0,1,1],[0,1]]"),
        ([2, 2], "[[],[1,2]]"),
        ([2, 1], "[[],[]]"),
        ([1, 1], "[[1]]"),
        ([1, 1], "[1]"),
        ([1, 2], '["a",1]'),
        ([1, 2], "[null,1]"),
        ([1, 2], "[true,1]"),
        ([1, 2], "[300.5,-1]"),
        ([1, 2], "[1.000000000000000000000000000000000000000,0]"),
        ([1, 2], "[-1,18446744073709551615]"),
        ([1, 2], "{}"),
        ([1, 2], "null"),
        ([1, 2], "[1,2,3]"),
        ([1, 2], "[]"),
        ([10**9, 2], "[1,2]"),
    ],
)
def test_a_large_document_means_the_same(
    dtype: str, shape: list[int], data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = parse(dtype, shape, data)
    monkeypatch.setattr(protocol, "LARGE_BYTES", 64)
    for size in (1, 7, 2**16):  # of the pieces in which numbers are read
        monkeypatch.setattr(protocol, "_PIECE_BYTES", size)
        actual = parse(dtype, shape, data)
        if isinstance(expected, str):
            assert actual == expected
        else:
            np.testing.assert_array_equal(actual, expected, strict=True)  # type: ignore[arg-type]


def test_a_number_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in (2**20, 16):
        monkeypatch.setattr(protocol, "LARGE_BYTES", limit)
        for data in ("[1e400, 1]", "[tru, 1]", "[NaN, 1]", "[1, 2", "[" * 100_000, "[01, 1]"):
            said = parse("float32", [1, 2], data)
            assert isinstance(said, str)
            assert "JSON" in said or "infinity" in said


@pytest.mark.parametrize(
    ("begin", "element", "count", "end"),
    [
        pytest.param('{"inputs": [', "{}", 700_000, "]}", id="no tensors"),
        pytest.param('{"inputs": [', '{"name":"","datatype":"","shape":[]}', 50_000, "]}", id="empty tensors"),
        pytest.param('{"inputs": [], "parameters": [', "{}", 700_000, "]}", id="parameters"),
        pytest.param('{"inputs": [], "other": [', '{"":0}', 300_000, "]}", id="unknown"),
        pytest.param("[", "{}", 700_000, "]", id="no object"),
        pytest.param("{", '"a":0', 300_000, "}", id="fields"),
        pytest.param(
            '{"inputs": [{"name": "x", "datatype": "INT64", "shape": [1048576], "data": [',
            *("0", 2**20, "]}]}"),
            id="numbers",
        ),
    ],
)
def test_memory_is_a_small_multiple_of_the_body(begin: str, element: str, count: int, end: str) -> None:
    spec = ModelSpec(
        name="m",
        version="1",
        inputs={"x": TensorSpec(dtype="int64")},
        outputs={"y": TensorSpec(dtype="float32")},
    )
    body = (begin + ",".join([element] * count) + end).encode()
    tracemalloc.start()
    try:
        protocol.parse_request(spec, body, None)
    except InvalidRequest:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 10 * len(body)


def test_bodies_in_flight_are_bounded() -> None:
    bodies = RequestBodies(1000_000)
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(bodies.hold())(1000_000)
        with bodies.hold() as small:
            small(64 * 1024)
        assert bodies.held_bytes == 4 * (1000_000 - 64 * 1024)
        with pytest.raises(RequestFailure, match="Try again") as caught, bodies.hold() as large:
            large(1000_000)
        assert (caught.value.status, caught.value.headers) == (503, [(b"retry-after", b"1")])
    assert bodies.held_bytes == 0
    bodies.close()


def test_other_clients_large_bodies(server: Server) -> None:
    """Of clients that send them slowly: what is small is answered, what is large has to wait."""
    host, _, port = urlsplit(server.url).netloc.partition(":")
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2097152\r\n\r\n".encode()
    with ExitStack() as stack:
        refused = False
        while not refused:
            connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
            connection.sendall(head + b" " * 2_000_000)
            connection.settimeout(0.2)
            try:
                answer = connection.recv(4096)
            except TimeoutError:
                continue
            assert b" 503 " in answer
            assert b"retry-after: 1" in answer
            refused = True
        assert httpx.post(server.url + PATH, json=json_request(), timeout=60).status_code == 200
    body = json.dumps(json_request()).encode() + b" " * 2_000_000
    for _ in range(20):  # until the server has seen that they are gone
        answered = httpx.post(server.url + PATH, content=body, timeout=60)
        if answered.status_code != 503:
            break
    assert answered.status_code == 200, answered.text


def test_a_range_of_the_schema_is_checked() -> None:
    tensor = TensorSpec(dtype="int64", shape=(None,), minimum=0, maximum=255, max_size=4)
    for shape, data, problem in (
        ([1, 2], "[0, 255]", None),
        ([1, 4], "[0, 1, 2, 3]", None),
        ([1, 2], "[0, 256]", "data must be between 0 and 255"),
        ([1, 2], "[-1, 0]", "data must be between 0 and 255"),
        ([1, 5], "[0, 1, 2, 3, 4]", "sizes of at most 4"),
    ):
        parsed = parse("int64", shape, data, tensor)
        assert isinstance(parsed, str) == (problem is not None)
        assert problem is None or problem in str(parsed)
    spec = ModelSpec(name="m", version="1", inputs={"x": tensor}, outputs={"y": tensor})
    content = np.array([0, 256], "<i8").tobytes()
    head = b'{"inputs": [{"name": "x", "datatype": "INT64", "shape": [1, 2], "parameters": {"binary_data_size": 16}}]}'
    with pytest.raises(InvalidRequest, match="between 0 and 255"):
        protocol.parse_request(spec, head + content, str(len(head)))
    described = describe([spec])["paths"]["/v2/models/m/infer"]["post"]["requestBody"]["content"]
    body = described["application/json"]
    [described] = body["schema"]["properties"]["inputs"]["items"]["anyOf"]
    assert described["properties"]["data"]["items"]["anyOf"][0] == {"type": "integer", "minimum": 0, "maximum": 255}
    assert described["properties"]["shape"]["prefixItems"][1] == {"type": "integer", "minimum": 1, "maximum": 4}
    assert body["example"]["inputs"][0]["shape"] == [1, 4]
