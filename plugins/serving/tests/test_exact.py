"""``--exact``: a row's answer does not depend on what else is in its batch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import tritonclient.grpc as triton
from plugins.serving.tests.conftest import Server, json_request
from tests.processes import Processes
from torch import nn

from paceline.core.errors import ConfigError
from paceline.core.inference import TensorSpec
from paceline_serving.exact import ExactServable
from paceline_serving.model import Array, Arrays, ModelSpec, ServingOptions

FEATURES = 6
PIXELS = np.random.default_rng(3).integers(0, 256, (45, 1, 28, 28), dtype=np.uint8)


def spec_of(*shape: int | None, dtype: str = "float32", **bounds: Any) -> ModelSpec:
    inputs = {"x": TensorSpec(dtype=dtype, shape=shape, **bounds)}
    return ModelSpec(name="m", version="1", inputs=inputs, outputs={"y": TensorSpec(dtype="float32")})


class Formula:
    """A model that a function of the rows computes; it notes the sizes of its batches and their memory's alignment."""

    def __init__(self, formula: Callable[[Array], Array]) -> None:
        self._formula = formula
        self.sizes: list[int] = []
        self.alignments: set[int] = set()

    def predict(self, inputs: Arrays) -> dict[str, Array]:
        self.sizes.append(len(inputs["x"]))
        self.alignments.add(inputs["x"].ctypes.data % 64)
        return {"y": self._formula(inputs["x"])}


def ulp_by_size(x: Array) -> Array:
    """One bit more in batches of fewer than 16 rows."""
    total = x.sum(1)
    return total if len(x) >= 16 else np.nextafter(total, np.float32(np.inf))


def ulp_by_place(x: Array) -> Array:
    """One bit more in the last row of a batch of several."""
    total = x.sum(1)
    total[1:][-1:] = np.nextafter(total[1:][-1:], np.float32(np.inf))
    return total


def ulp_by_neighbour(x: Array) -> Array:
    """A row's sum with a trace of the row before, in batches of more than four."""
    total = x.sum(1)
    return total + np.float32(1e-6) * np.roll(total, 1) if len(x) > 4 else total


@pytest.mark.parametrize(
    ("formula", "sizes"),
    [
        (lambda x: x.sum(1), (32, 24, 16, 12, 8, 4, 2, 1)),
        (ulp_by_size, (32, 24, 16)),
        (ulp_by_place, (1,)),
        (ulp_by_neighbour, (4, 2, 1)),
        (lambda x: x.sum(1) + np.random.rand(len(x)).astype("f4"), (1,)),
    ],
)
def test_only_sizes_at_which_a_row_has_the_same_bits_are_used(
    formula: Callable[[Array], Array], sizes: tuple[int, ...]
) -> None:
    model = Formula(formula)
    exact = ExactServable(model, spec_of(FEATURES))
    assert exact.example_sizes == sizes
    model.sizes.clear()
    x = np.random.default_rng(1).standard_normal((45, FEATURES), np.float32)
    together = exact.predict({"x": x})["y"]
    assert set(model.sizes) <= set(sizes)
    assert len(together) == 45
    if sizes != (1,):  # the last formula draws
        for start, stop in ((0, 1), (3, 4), (10, 27), (44, 45)):
            alone = exact.predict({"x": x[start:stop]})["y"]
            assert alone.tobytes() == together[start:stop].tobytes()


def test_rows_lie_in_memory_that_is_aligned_alike() -> None:
    model = Formula(lambda x: x.sum(1))
    content = bytearray(4 + 4 * FEATURES * 5)
    for offset in range(4):
        x = np.frombuffer(content, np.float32, FEATURES * 3, 4 * offset).reshape(3, FEATURES)
        ExactServable(model, spec_of(FEATURES)).predict({"x": x})
    assert model.alignments == {0}


def test_a_model_that_refuses_test_rows_is_computed_row_by_row() -> None:
    def lookup(x: Array) -> Array:
        if x.max() > 3:
            raise IndexError("index out of range in self")
        return x.astype("f4").sum(1)

    exact = ExactServable(Formula(lookup), spec_of(FEATURES, dtype="int64"))
    assert exact.example_sizes == (1,)
    bounded = ExactServable(Formula(lookup), spec_of(FEATURES, dtype="int64", minimum=0, maximum=3))
    assert bounded.example_sizes[0] == 32


def test_rows_of_any_length_are_proved_for_each_length() -> None:
    model = Formula(lambda x: x.sum(1) if x.shape[1] < 9 else ulp_by_place(x))
    exact = ExactServable(model, spec_of(None))
    assert exact.sizes({"x": np.zeros((1, 5), np.float32)}) == (8, 4, 2, 1)
    assert exact.sizes({"x": np.zeros((1, 9), np.float32)}) == (1,)


@pytest.mark.parametrize("name", ["convolutions", "gelu", "attention"])
def test_torch_models_answer_each_row_alike(name: str) -> None:
    torch.manual_seed(0)
    if name == "convolutions":
        shape: tuple[int, ...] = (1, 28, 28)
        layers = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU()]
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(1936, 10), nn.Softmax(1))
    elif name == "gelu":
        shape = (77,)
        model = nn.Sequential(nn.Linear(77, 130), nn.GELU(), nn.Linear(130, 11))
    else:
        shape = (7, 24)
        model = nn.Sequential(nn.TransformerEncoderLayer(24, 4, 40, batch_first=True), nn.Flatten(), nn.Linear(168, 5))
    model.eval()

    @torch.no_grad()
    def compute(x: Array) -> Array:
        answer: Array = model(torch.from_numpy(x)).numpy()
        return answer

    exact = ExactServable(Formula(compute), spec_of(*shape))
    x = np.random.default_rng(4).standard_normal((40, *shape), np.float32)
    together = exact.predict({"x": x})["y"]
    order = np.random.default_rng(5).permutation(40)
    assert exact.predict({"x": x[order]})["y"].tobytes() == together[order].tobytes()
    for row in range(40):
        assert exact.predict({"x": x[row : row + 1]})["y"].tobytes() == together[row : row + 1].tobytes()


@pytest.mark.system
def test_a_row_has_one_answer_whoever_asks_with_it(
    start: Callable[..., Server], run_processes: Processes, serving_env: dict[str, str], tmp_path: Path
) -> None:
    server = start("fashion-mnist@prod", "--exact", "--replicas", "2", "--grpc-port", "0")
    path = f"{server.url}/v2/models/fashion-mnist/infer"
    alone: list[bytes] = []
    with httpx.Client(timeout=60) as http:
        sizes = http.get(f"{server.url}/v2/models/fashion-mnist").json()["parameters"]["exact_batch_sizes"]
        for row in range(len(PIXELS)):
            answer = http.post(path, json=json_request(data=PIXELS[row].ravel().tolist()))
            assert answer.headers["paceline-exact-batch-sizes"] == ",".join(map(str, sizes))
            alone.append(np.float32(answer.json()["outputs"][0]["data"]).tobytes())
    assert sorted(sizes, reverse=True) == sizes
    crowd: dict[tuple[int, int], bytes] = {}

    def ask(rows: range) -> None:
        with triton.InferenceServerClient(server.grpc) as client:
            for first in rows:
                pixels = PIXELS[first : first + 1 + first % 3]
                tensor = triton.InferInput("image", list(pixels.shape), "UINT8").set_data_from_numpy(pixels)
                answer = client.infer("fashion-mnist", [tensor], client_timeout=60)
                for index, probabilities in enumerate(answer.as_numpy("probabilities")):
                    crowd[first, index] = probabilities.tobytes()
                assert answer.get_response().parameters["exact_batch_sizes"].string_param

    threads = [threading.Thread(target=ask, args=[range(i, len(PIXELS), 5)]) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(crowd) > len(PIXELS)
    assert all(bits == alone[first + index] for (first, index), bits in crowd.items())

    np.save(tmp_path / "rows.npy", PIXELS)
    for number, words in enumerate((("--chunk", "7"), ("--nproc", "2"))):
        output = tmp_path / f"{number}.npz"
        words = ("predict", "fashion-mnist@prod", str(tmp_path / "rows.npy"), "--output", str(output), *words)
        done = run_processes.paceline(*words, env=serving_env)
        assert done.returncode == 0, done.stderr
        assert [row.tobytes() for row in np.load(output)["probabilities"]] == alone


def test_devices_that_differ_are_refused() -> None:
    with pytest.raises(ConfigError, match="--exact: a CPU and a GPU compute other bits"):
        ServingOptions(exact=True, devices=("cpu", "cuda:0"))
