"""The Open Inference Protocol v2 over gRPC, by tritonclient's own client."""

from __future__ import annotations

import asyncio
import queue
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from plugins.serving.tests.conftest import Server, json_request
from plugins.serving.tests.load import PATH
from tests.processes import Processes
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from paceline.core.errors import ConfigError
from paceline_serving.access import AccessPolicy
from paceline_serving.app import Models
from paceline_serving.batching import InvalidRequest
from paceline_serving.grpc_service import GrpcServer, check_fields
from paceline_serving.model import ServingOptions
from paceline_serving.server import ListenAddress, serve

MODEL = "fashion-mnist"
TIMEOUT_S = 60
QUIET = ("GRPC_VERBOSITY", "GRPC_ENABLE_FORK_SUPPORT")  # variables that a server sets


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[triton.InferenceServerClient]:
    client = triton.InferenceServerClient(server.grpc)
    yield client
    client.close()


@pytest.fixture(scope="module")
def stub(server: Server) -> Iterator[service_pb2_grpc.GRPCInferenceServiceStub]:
    """For messages that the client would not make."""
    with grpc.insecure_channel(server.grpc) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def pictures(rows: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, (rows, 1, 28, 28), dtype=np.uint8)


def tensor(pixels: np.ndarray[Any, Any], name: str = "image", datatype: str = "UINT8") -> triton.InferInput:
    entry = triton.InferInput(name, list(pixels.shape), datatype)
    return entry.set_data_from_numpy(pixels)


def message(**changes: Any) -> Any:
    """A request for one black picture, in ``contents``, with changes to its only input."""
    contents = service_pb2.InferTensorContents(uint_contents=[0] * 784)
    fields = {"name": "image", "datatype": "UINT8", "shape": [1, 1, 28, 28], "contents": contents}
    return service_pb2.ModelInferRequest(model_name=MODEL, inputs=[{**fields, **changes}])


def test_health_and_metadata(client: triton.InferenceServerClient, server: Server) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    assert client.get_server_metadata().name == "paceline"
    said = client.get_model_metadata(MODEL, as_json=True)
    over_http = httpx.get(f"{server.url}/v2/models/{MODEL}", timeout=60).json()
    for side in ("inputs", "outputs"):
        shapes = [{**entry, "shape": list(map(int, entry["shape"]))} for entry in said[side]]
        assert shapes == over_http[side]
    assert said["versions"] == over_http["versions"]
    assert client.get_model_metadata(MODEL, said["versions"][0]).name == MODEL


def test_inference_is_that_of_http(client: triton.InferenceServerClient, server: Server) -> None:
    pixels = pictures(5)
    answer = client.infer(MODEL, [tensor(pixels)], request_id="mine", client_timeout=TIMEOUT_S)
    body = json_request(shape=list(pixels.shape), data=pixels.ravel().tolist())
    outputs = httpx.post(f"{server.url}{PATH}", json=body, timeout=60).json()["outputs"]
    assert answer.get_response().id == "mine"
    probabilities = answer.as_numpy("probabilities")
    assert (probabilities.dtype, probabilities.shape) == (np.float32, (5, 10))
    np.testing.assert_allclose(probabilities.ravel(), outputs[0]["data"], rtol=1e-5)
    assert answer.as_numpy("label").tolist() == outputs[1]["data"]
    only = client.infer(MODEL, [tensor(pixels)], outputs=[triton.InferRequestedOutput("label")])
    assert only.as_numpy("probabilities") is None
    assert only.as_numpy("label").tolist() == outputs[1]["data"]


def test_typed_contents_are_answered_in_kind(stub: Any, client: triton.InferenceServerClient) -> None:
    answer = stub.ModelInfer(message(), timeout=TIMEOUT_S)
    assert len(answer.raw_output_contents) == 0
    probabilities, label = answer.outputs
    black = client.infer(MODEL, [tensor(np.zeros((1, 1, 28, 28), np.uint8))])
    np.testing.assert_allclose(probabilities.contents.fp32_contents, black.as_numpy("probabilities")[0], rtol=1e-5)
    assert list(label.contents.int64_contents) == black.as_numpy("label").tolist()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "nobody"}, "has no input 'nobody'; it has: image"),
        ({"datatype": "FP16"}, "must be sent in raw_input_contents"),
        ({"datatype": "FP32"}, "must be sent in contents.fp32_contents or raw_input_contents"),
        ({"shape": [1, 28, 28]}, "must have the shape [any, 1, 28, 28], not [1, 28, 28]"),
        ({"shape": [-1, 1, 28, 28]}, "shape must be a list of sizes"),
        ({"shape": [2**62, 1, 28, 28]}, "data must be"),
        ({"contents": {"uint_contents": [0] * 783}}, "data must be 784 elements"),
        ({"contents": {"uint_contents": [256] * 784}}, "data must be between 0 and 255"),
    ],
)
def test_what_does_not_fit_the_schema_is_refused(stub: Any, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(message(**changes), timeout=TIMEOUT_S)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert said in caught.value.details()


@pytest.mark.parametrize("raw", [[b"\0" * 783], [b"\0" * 785], [b""], [b"\0" * 784] * 2])
def test_raw_contents_that_do_not_fit(stub: Any, raw: list[bytes]) -> None:
    request = message()
    request.inputs[0].ClearField("contents")
    request.raw_input_contents.extend(raw)
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(request, timeout=TIMEOUT_S)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_what_is_no_message_is_refused(server: Server) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError) as refused:
            infer(b"\xff\xff\xff", timeout=TIMEOUT_S)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "no inference.ModelInferRequest" in refused.value.details()


def test_many_elements_belong_into_raw_contents(stub: Any) -> None:
    many = message(contents=service_pb2.InferTensorContents(uint_contents=[0] * (2**20 + 1)))
    with pytest.raises(grpc.RpcError) as refused:
        stub.ModelInfer(many, timeout=TIMEOUT_S)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "raw_input_contents" in refused.value.details()


@pytest.mark.parametrize(
    "field",
    [
        service_pb2.ModelInferRequest(inputs=[{}] * 600).SerializeToString(),
        service_pb2.ModelInferRequest(raw_input_contents=[b""] * 600).SerializeToString(),
        service_pb2.ModelInferRequest(id="1" * (16 * 2**20 + 1)).SerializeToString(),
    ],
)
def test_a_message_of_many_fields_is_refused_before_it_is_parsed(field: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsed, a field of two bytes takes up to a hundred."""
    with pytest.raises(InvalidRequest, match="the message has more than"):
        check_fields(field)
    check_fields(message().SerializeToString() + b"\xff")  # the parser says what is wrong
    large = service_pb2.ModelInferRequest(raw_input_contents=[bytes(17 * 2**20)])
    check_fields(large.SerializeToString())


def test_a_message_is_counted_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in QUIET:
        monkeypatch.setenv(name, "0")
    options = ServingOptions(max_body_bytes=2 * 2**20)

    async def run() -> list[tuple[grpc.StatusCode, str]]:
        models = Models(options)
        where = ("127.0.0.1", 0)
        server = GrpcServer(
            *where, models=models, options=options, access=AccessPolicy(None), is_draining=lambda: False
        )
        await server.start()
        answers = []
        try:
            async with grpc.aio.insecure_channel(server.address) as channel:
                infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
                for held_bytes in (4 * options.max_body_bytes + 64 * 1024, 0):
                    with models.bodies.hold() as hold:
                        hold(held_bytes)
                        with pytest.raises(grpc.aio.AioRpcError) as caught:
                            await infer(b"\xff" * 100_000, timeout=TIMEOUT_S)
                    answers.append((caught.value.code(), caught.value.details()))
            assert models.bodies.held_bytes == 0
        finally:
            await server.close()
            await models.close()
        return answers

    full, room = asyncio.run(run())
    assert full[0] is grpc.StatusCode.UNAVAILABLE
    assert "the server holds requests of" in full[1]
    assert room == (grpc.StatusCode.INVALID_ARGUMENT, "this is no inference.ModelInferRequest message.")


def test_what_is_not_there(client: triton.InferenceServerClient, stub: Any) -> None:
    def code_of(call: Callable[[], Any]) -> Any:
        with pytest.raises(InferenceServerException) as caught:
            call()
        return caught.value.status()

    assert code_of(lambda: client.infer("nobody", [tensor(pictures(1))])) == "StatusCode.NOT_FOUND"
    assert code_of(lambda: client.infer(MODEL, [tensor(pictures(1))], "0")) == "StatusCode.NOT_FOUND"
    assert code_of(lambda: client.is_model_ready("nobody")) == "StatusCode.NOT_FOUND"
    assert code_of(lambda: client.get_model_config(MODEL)) == "StatusCode.UNIMPLEMENTED"
    assert code_of(lambda: client.unload_model(MODEL)) == "StatusCode.UNIMPLEMENTED"
    # As over HTTP: --max-body is 2 MiB.
    assert code_of(lambda: client.infer(MODEL, [tensor(pictures(3000))])) == "StatusCode.RESOURCE_EXHAUSTED"
    with pytest.raises(grpc.RpcError, match=r"ModelStreamInfer is not supported\. Supported are: ServerLive,"):
        list(stub.ModelStreamInfer(iter([message()]), timeout=TIMEOUT_S))


def test_many_at_once_get_each_their_own_answer(client: triton.InferenceServerClient) -> None:
    pixels = pictures(64, seed=1)
    whole = client.infer(MODEL, [tensor(pixels)]).as_numpy("probabilities")

    def ask(row: int) -> Any:
        return client.infer(MODEL, [tensor(pixels[row : row + 1])]).as_numpy("probabilities")[0]

    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(ask, range(64)))
    np.testing.assert_allclose(rows, whole, rtol=1e-4, atol=1e-6)


def test_limits_deadlines_and_the_end(
    start: Callable[..., Server], tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("0123456789abcdef")
    options = ("--max-queue", "4", "--max-batch", "2", "--timeout", "2min", "--hang-timeout", "5min")
    server = start("fashion-mnist@prod", *options, "--grpc-port", "0", "--token-file", token)
    headers = {"authorization": "Bearer 0123456789abcdef"}
    client = triton.InferenceServerClient(server.grpc)
    try:
        assert client.is_server_ready()
        with pytest.raises(InferenceServerException, match=r"the token is missing or wrong\. Send it as Authorization"):
            client.is_model_ready(MODEL)
        with pytest.raises(InferenceServerException, match="UNAUTHENTICATED"):
            client.infer(MODEL, [tensor(pictures(1))], headers={"authorization": "Bearer x"})
        assert client.infer(MODEL, [tensor(pictures(1))], headers=headers).as_numpy("label").shape == (1,)

        # The replica stands still, so that what is asked must wait, with certainty.
        (replica,) = server.replicas()
        replica.send_signal(signal.SIGSTOP)
        with pytest.raises(InferenceServerException, match=r"time limit of 200 ms") as late:
            client.infer(MODEL, [tensor(pictures(1))], headers=headers, timeout=200_000)
        assert late.value.status() == "StatusCode.DEADLINE_EXCEEDED"
        with pytest.raises(InferenceServerException) as late:
            client.infer(MODEL, [tensor(pictures(1))], headers=headers, client_timeout=0.2)
        assert late.value.status() == "StatusCode.DEADLINE_EXCEEDED"

        def gone() -> float:
            text = httpx.get(f"{server.url}/metrics", headers=headers, timeout=60).text
            lines = [line for line in text.splitlines() if line.startswith('paceline_requests_total{code="499"')]
            return sum(float(line.split()[-1]) for line in lines)

        answers: queue.Queue[Any] = queue.Queue()

        def told(result: Any, error: InferenceServerException | None) -> None:
            answers.put(result if error is None else error)

        calls = []
        while answers.empty():  # nobody is answered but who is refused
            calls.append(client.async_infer(MODEL, [tensor(pictures(1))], told, headers=headers))
            time.sleep(0.05)
        refusal = answers.get()
        assert refusal.status() == "StatusCode.RESOURCE_EXHAUSTED"
        assert re.search(r"the queue is full with \d+ rows\. Try again in \d+ s", refusal.message())
        # Who goes away is forgotten; the others are answered, though the server is told to end meanwhile.
        before = gone()
        calls[0].cancel()
        wait_until(lambda: gone() > before, "the server's knowing that one has gone", timeout_s=60)
        server.popen.send_signal(signal.SIGTERM)
        wait_until(lambda: not is_ready(client), "not ready", timeout_s=60)
        replica.send_signal(signal.SIGCONT)
        assert server.popen.wait(60) == 0
        wait_until(lambda: answers.qsize() >= len(calls) - 1, "all answers", timeout_s=60)
        outcomes = [getattr(answers.get(), "status", lambda: "answered")() for _ in range(len(calls) - 1)]
        assert outcomes.count("answered") >= 2
        assert set(outcomes) <= {"answered", "StatusCode.CANCELLED", "StatusCode.RESOURCE_EXHAUSTED"}
        assert outcomes.count("StatusCode.CANCELLED") == 1
    finally:
        client.close()


def is_ready(client: triton.InferenceServerClient) -> bool:
    try:
        return bool(client.is_server_ready())
    except InferenceServerException:
        return False  # it takes no connections any more


def test_a_port_in_use(server: Server, run_processes: Processes, serving_env: dict[str, str]) -> None:
    assert server.grpc is not None
    port = server.grpc.rpartition(":")[2]
    done = run_processes.paceline("serve", "fashion-mnist@prod", "--port", "0", "--grpc-port", port, env=serving_env)
    assert done.returncode == 2
    assert f"--grpc-port {port}: it is in use. --grpc-port 0 picks a free one." in " ".join(done.stderr.split())


def test_a_port_that_is_none() -> None:
    with pytest.raises(ConfigError, match="--grpc-port must be between 0 and 65535, but is 65536"):
        ListenAddress(grpc_port=65536)


@pytest.mark.parametrize("missing", ["tritonclient.grpc", "tritonclient.grpc.service_pb2_grpc"])
def test_without_the_extra(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in QUIET:
        monkeypatch.setenv(name, "0")
    monkeypatch.delitem(sys.modules, "tritonclient.grpc")  # which raises a RuntimeError for what it needs
    monkeypatch.setitem(sys.modules, missing, None)
    address = ListenAddress(port=0, grpc_port=0)
    with pytest.raises(ConfigError, match=r"--grpc-port needs .*pip install 'tritonclient\[grpc\]<"):
        asyncio.run(serve([], address, ServingOptions(), lambda url, grpc: None))
