"""The Open Inference Protocol v2, against any server of a Fashion-MNIST model (PACELINE_CONFORMANCE_URL)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from plugins.serving.tests.conftest import json_request

pytestmark = pytest.mark.integration

MODEL = "fashion-mnist"


@pytest.fixture(scope="module")
def http(base_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=base_url, timeout=60) as client:
        yield client


def infer(http: httpx.Client, document: Any, **headers: str) -> httpx.Response:
    return http.post(f"/v2/models/{MODEL}/infer", content=json.dumps(document), headers=headers)


@pytest.mark.parametrize("address", ["/v2/health/live", "/v2/health/ready", f"/v2/models/{MODEL}/ready"])
def test_health(http: httpx.Client, address: str) -> None:
    assert http.get(address).status_code == 200


def test_server_metadata(http: httpx.Client) -> None:
    metadata = http.get("/v2").json()
    assert metadata["name"]
    assert metadata["version"]
    assert "binary_tensor_data" in metadata["extensions"]


def test_model_metadata(http: httpx.Client) -> None:
    assert MODEL in http.get("/v2/models").json()["models"]
    metadata = http.get(f"/v2/models/{MODEL}").json()
    assert metadata["name"] == MODEL
    assert metadata["inputs"] == [{"name": "image", "datatype": "UINT8", "shape": [-1, 1, 28, 28]}]
    assert [(t["name"], t["datatype"], t["shape"]) for t in metadata["outputs"]] == [
        ("probabilities", "FP32", [-1, 10]),
        ("label", "INT64", [-1]),
    ]
    version = metadata["versions"][0]
    assert http.get(f"/v2/models/{MODEL}/versions/{version}").json() == metadata


def test_json_inference(http: httpx.Client) -> None:
    answer = infer(http, {"id": "mine", **json_request()})
    assert answer.status_code == 200
    document = answer.json()
    assert document["id"] == "mine"
    assert document["model_name"] == MODEL
    probabilities, label = document["outputs"]
    assert (probabilities["name"], probabilities["datatype"], probabilities["shape"]) == (
        "probabilities",
        "FP32",
        [1, 10],
    )
    assert sum(probabilities["data"]) == pytest.approx(1, abs=1e-5)
    assert label["data"] == [int(np.argmax(probabilities["data"]))]


def test_nested_data_is_the_same_as_flat(http: httpx.Client) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 1, 28, 28))
    flat = infer(http, json_request(shape=[3, 1, 28, 28], data=pixels.ravel().tolist())).json()
    nested = infer(http, json_request(shape=[3, 1, 28, 28], data=pixels.tolist())).json()
    assert flat["outputs"] == nested["outputs"]


def test_only_the_outputs_that_are_asked_for(http: httpx.Client) -> None:
    answer = infer(http, {**json_request(), "outputs": [{"name": "label"}]}).json()
    assert [output["name"] for output in answer["outputs"]] == ["label"]


@pytest.mark.parametrize(
    "document",
    [
        [],
        {},
        {"inputs": []},
        {"inputs": [1]},
        json_request(name="nobody"),
        json_request(datatype="FP32"),
        json_request(shape=[1, 28, 28]),
        json_request(shape=[0, 1, 28, 28], data=[]),
        json_request(shape=[2**62, 1, 28, 28]),
        json_request(shape=[1.0, 1, 28, 28]),
        json_request(data=[0] * 783),
        json_request(data=[0] * 783 + [256]),
        json_request(data=[0] * 783 + [-1]),
        json_request(data=[0] * 783 + [0.5]),
        json_request(data=[0] * 783 + ["1"]),
        json_request(data=[0] * 783 + [None]),
        json_request(data=[0] * 783 + [[1]]),
        json_request(data=[True] * 784),
        json_request(data=[0] * 783 + ["x" * 100_000]),
        json_request(data=[[[[0] * 28] * 27 + [[0] * 27]]]),
        json_request(data=[[[[[0]] * 28] * 28]]),
        json_request(data=[0] * 783 + [2**70]),
        json_request(data=[0] * 783 + [-1e300]),
        {"inputs": json_request()["inputs"] * 2},
        {**json_request(), "outputs": [{"name": "nobody"}]},
        {**json_request(), "id": 7},
    ],
)
def test_what_does_not_fit_the_schema_is_refused(http: httpx.Client, document: Any) -> None:
    answer = infer(http, document)
    assert answer.status_code == 400
    assert answer.json().keys() == {"error"}


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"inputs": NaN}'])
def test_what_is_no_json_is_refused(http: httpx.Client, content: bytes) -> None:
    answer = http.post(f"/v2/models/{MODEL}/infer", content=content)
    assert answer.status_code == 400
    assert "not JSON" in answer.json()["error"]


def test_what_is_not_there(http: httpx.Client) -> None:
    for address in ("/v2/models/nobody", f"/v2/models/{MODEL}/versions/0", "/v2/models/..%2f..%2fetc/ready"):
        assert http.get(address).status_code == 404
    assert http.post("/v2/models/nobody/infer", json=json_request()).status_code == 404
    assert http.get(f"/v2/models/{MODEL}/infer").status_code == 405


@pytest.mark.parametrize("binary_input", [True, False])
@pytest.mark.parametrize("binary_output", [True, False])
def test_triton_client(base_url: str, binary_input: bool, binary_output: bool) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (5, 1, 28, 28), dtype=np.uint8)
    client = triton.InferenceServerClient(base_url.removeprefix("http://"), network_timeout=60)
    try:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready(MODEL)
        assert client.get_model_metadata(MODEL)["name"] == MODEL
        tensor = triton.InferInput("image", list(pixels.shape), "UINT8")
        tensor.set_data_from_numpy(pixels, binary_data=binary_input)
        wanted = [triton.InferRequestedOutput(n, binary_data=binary_output) for n in ("probabilities", "label")]
        answer = client.infer(MODEL, [tensor], outputs=wanted, request_id="t", timeout=60_000_000)
        probabilities = answer.as_numpy("probabilities")
        assert probabilities.shape == (5, 10)
        assert probabilities.dtype == np.float32
        assert (answer.as_numpy("label") == probabilities.argmax(axis=1)).all()
    finally:
        client.close()


BINARY = {
    "name": "image",
    "datatype": "UINT8",
    "shape": [1, 1, 28, 28],
    "parameters": {"binary_data_size": 784},
}


@pytest.mark.parametrize(
    ("changes", "tail", "length"),
    [
        ({}, b"\0" * 783, None),
        ({}, b"\0" * 785, None),
        ({}, b"", None),
        ({"parameters": {"binary_data_size": 783}}, b"\0" * 783, None),
        ({"parameters": {"binary_data_size": -1}}, b"\0" * 784, None),
        ({"parameters": {"binary_data_size": 2**80}}, b"\0" * 784, None),
        ({"parameters": {"binary_data_size": "784"}}, b"\0" * 784, None),
        ({"parameters": {"binary_data_size": True}}, b"\0" * 784, None),
        ({"parameters": []}, b"\0" * 784, None),
        ({"data": [0] * 784}, b"\0" * 784, None),
        ({"shape": [2**40, 1, 28, 28]}, b"\0" * 784, None),
        ({}, b"\0" * 784, "-1"),
        ({}, b"\0" * 784, "9" * 30),
        ({}, b"\0" * 784, "1"),
        ({}, b"\0" * 784, "100000"),
        ({}, b"\0" * 784, "x"),
    ],
)
def test_binary_tensors_that_do_not_fit(
    http: httpx.Client, changes: dict[str, Any], tail: bytes, length: str | None
) -> None:
    header = json.dumps({"inputs": [{**BINARY, **changes}]}).encode()
    answer = http.post(
        f"/v2/models/{MODEL}/infer",
        content=header + tail,
        headers={"Inference-Header-Content-Length": length or str(len(header))},
    )
    assert answer.status_code == 400, answer.text
    assert answer.json().keys() == {"error"}
