"""``paceline predict``: pictures and rows, with a package and with a server; killed, and gone on with."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from plugins.serving.tests.conftest import Server
from tests.processes import Processes
from tests.small_disk import small_disk

from paceline.core.errors import DataError
from paceline.core.inference import TensorSpec
from paceline.runs.package import open_package
from paceline.runs.package_registry import Registry
from paceline_serving.batch_predict import read_rows
from paceline_serving.model import ModelSpec
from paceline_serving.predict_command import _show
from paceline_serving.tables import Rows, write

PIXELS = np.random.default_rng(2).integers(0, 256, (40, 1, 28, 28), dtype=np.uint8)


@pytest.fixture
def predict(run_processes: Processes, serving_env: dict[str, str]) -> Callable[..., str]:
    """Run ``paceline predict`` and return what it prints."""

    def run(*words: str | Path, code: int = 0) -> str:
        done = run_processes.paceline("predict", *words, env=serving_env)
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    return run


def test_a_picture_and_arrays_of_every_form(predict: Callable[..., str], server: Server, tmp_path: Path) -> None:
    Image.fromarray(PIXELS[0, 0]).save(tmp_path / "one.png")
    np.save(tmp_path / "rows.npy", PIXELS[:1])
    np.savez(tmp_path / "rows.npz", image=PIXELS[:1])
    (tmp_path / "rows.json").write_text(json.dumps(PIXELS[:1].tolist()))
    heading = ",".join(f"p{i}" for i in range(784))
    (tmp_path / "rows.csv").write_text(heading + "\n" + ",".join(map(str, PIXELS[0].ravel())) + "\n")
    names = ["one.png", "rows.npy", "rows.npz", "rows.json", "rows.csv"]
    document = json.loads(predict(server.url, *(tmp_path / name for name in names), "--json"))
    found = document["predictions"]
    assert [entry["source"] for entry in found] == names
    assert len({json.dumps(entry["outputs"]) for entry in found}) == 1
    probabilities = found[0]["outputs"]["probabilities"]
    assert found[0]["probability"] == max(probabilities)
    labels = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat")
    assert found[0]["label"] in (*labels, "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
    table = predict(server.url, tmp_path / "one.png")
    assert "one.png" in table
    assert found[0]["label"] in table


def test_a_models_address_is_taken_for_the_server_and_the_model(
    predict: Callable[..., str], server: Server, tmp_path: Path
) -> None:
    """As the server prints it, and as people have it from their commands."""
    np.save(tmp_path / "rows.npy", PIXELS[:1])
    model = f"{server.url}/v2/models/fashion-mnist"
    for address in (f"{server.url}/", model, f"{model}/infer", f"{server.url}/predict", f"{server.url}/v2"):
        assert json.loads(predict(address, tmp_path / "rows.npy", "--json"))["model"] == "fashion-mnist"
    said = predict(f"{server.url}/v2/models/other", tmp_path / "rows.npy", code=2)
    assert "has no model 'other': give --name with one of fashion-mnist" in said


def test_a_terminal_shows_the_digits_that_people_read() -> None:
    assert [_show(value) for value in (2012.347412109375, 11840.1875, 1234567.5, 7, 1e-9)] == [
        *("2012.35", "11840.2", "1234567.5", "7", "1e-09")
    ]
    assert _show([0.123456789, [1.0, 2.5]]) == "[0.123457, [1, 2.5]]"
    assert _show(list(range(11))) == "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...]"
    assert _show([0.123456789] * 10) == "[0.123457, 0.123457, 0.123457, 0.123457, 0.123457, ...]", "no number is cut"


def test_a_file_through_a_server(predict: Callable[..., str], server: Server, tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", PIXELS)
    predict(server.url, tmp_path / "rows.npy", "--output", tmp_path / "out.csv", "--chunk", "7", "--nproc", "2")
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["row"]) for row in rows] == list(range(40))
    assert {"label", "probability", "Ankle boot"} <= rows[0].keys()
    assert not (tmp_path / "out.csv.parts").exists()


def test_killed_in_the_middle_it_goes_on(
    predict: Callable[..., str],
    run_processes: Processes,
    serving_env: dict[str, str],
    registry: Path,
    tmp_path: Path,
    wait_until: Callable[..., None],
) -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (6000, 1, 28, 28), dtype=np.uint8)
    np.save(tmp_path / "rows.npy", pixels)
    output = tmp_path / "out.npz"
    words = ["predict", "fashion-mnist@prod", "rows.npy", "--output", "out.npz", "--chunk", "100"]
    first = run_processes.start([sys.executable, "-m", "paceline", *words], env=serving_env)
    parts = tmp_path / "out.npz.parts"
    wait_until(lambda: len(list(parts.glob("part-*"))) >= 3, "three parts", timeout_s=120)
    first.send_signal(signal.SIGKILL)
    first.wait()
    kept = {path.name: path.stat().st_mtime_ns for path in parts.glob("part-*")}
    assert len(kept) < 60, "it was too fast to be killed"
    # Another job's parts are not mixed with these.
    assert "another prediction" in predict(*words[1:-1], "50", code=2)
    assert {path.name: path.stat().st_mtime_ns for path in parts.glob("part-*")} == kept
    predict(*words[1:], "--nproc", "2")
    with np.load(output) as result:
        resumed = result["probabilities"]
    assert resumed.shape == (6000, 10)
    # Every row is there, once and in its place: as the model itself says of some of each chunk.
    package = open_package("fashion-mnist@prod", Registry(registry))
    program = torch.export.load(package.path / "program.pt2").module()
    some = np.arange(0, 6000, 37)
    expected = program(torch.from_numpy(pixels[some]))["probabilities"].detach().numpy()
    np.testing.assert_allclose(resumed[some], expected, atol=1e-5)
    assert "already exists" in predict(*words[1:], code=2)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.npy", b"no array", "cannot be read"),
        ("rows.csv", b"1,2,3\n", "has the shape"),
        ("rows.csv", b"1,x\n2,3\n", "cannot be read"),
        ("rows.json", b'{"other": [1]}', "takes image"),
        ("rows.xyz", b"", "is not supported"),
        ("one.png", b"no picture", "cannot be read"),
    ],
)
def test_bad_files(
    predict: Callable[..., str], server: Server, tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    message = predict(server.url, tmp_path / name, code=2)
    assert said in message
    assert name in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "content", "tensor", "said"),
    [
        ("rows.json", "[[1e400]]", TensorSpec(dtype="float32", shape=(1,)), "1e400 is beyond the range"),
        ("rows.csv", "1e400\n", TensorSpec(dtype="float64", shape=(1,)), "1e400 is beyond the range"),
        ("rows.csv", "1e39\n", TensorSpec(dtype="float32", shape=(1,)), r"line 1, column 1 must be between -3.4"),
        ("rows.json", "[[256]]", TensorSpec(dtype="int64", shape=(1,), maximum=255), "x must be at most 255"),
        (
            "rows.csv",
            "-1\n",
            TensorSpec(dtype="int64", shape=(1,), minimum=0),
            "column 1 must be between 0 and",
        ),
    ],
)
def test_numbers_that_the_model_does_not_take(
    tmp_path: Path, name: str, content: str, tensor: TensorSpec, said: str
) -> None:
    (tmp_path / name).write_text(content)
    spec = ModelSpec(name="m", version="1", inputs={"x": tensor}, outputs={"y": tensor})
    with pytest.raises(DataError, match=said):
        read_rows([tmp_path / name], spec)


def test_an_infinity_that_is_written_is_one(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("inf\n-Infinity\n")
    spec = ModelSpec(name="m", version="1", inputs={"x": TensorSpec(dtype="float32", shape=(1,))}, outputs={})
    assert np.isinf(read_rows([tmp_path / "rows.csv"], spec).arrays["x"]).all()


def test_a_cell_is_no_formula(tmp_path: Path) -> None:
    labels = ("=1+1", "@a", "cat")
    spec = ModelSpec(
        name="m",
        version="1",
        inputs={"x": TensorSpec(dtype="float32")},
        outputs={"p": TensorSpec(dtype="float32", shape=(3,)), "l": TensorSpec(dtype="int64")},
        labels=labels,
        probabilities="p",
        label="l",
    )
    outputs = {"p": np.eye(3, dtype=np.float32), "l": np.arange(3)}
    with (tmp_path / "out.csv").open("wb") as file:
        write(file, ".csv", iter([outputs]), spec, Rows({}, ["-a.png", "b.png", "\tc.png"]))
    with (tmp_path / "out.csv").open(newline="") as file:
        heading, *rows = csv.reader(file)
    assert heading[-3:] == ["'=1+1", "'@a", "cat"]
    cells = [cell for row in rows for cell in row]
    assert "'-a.png" in cells
    assert "'=1+1" in cells
    assert not [cell for cell in cells if cell.startswith(("=", "@", "-", "\t"))]


def test_numbers_in_a_tables_other_columns_stay_as_they_are() -> None:
    spec = ModelSpec(name="m", version="1", inputs={}, outputs={"y": TensorSpec(dtype="float32")})
    file = io.BytesIO()
    others = {"balance": ["-3.5", "+1", "-1e-3", "-x"]}
    write(file, ".csv", iter([{"y": -np.ones(4)}]), spec, Rows({}, ["0", "1", "2", "3"], others))
    assert file.getvalue().decode().split() == ["balance,y", "-3.5,-1.0", "+1,-1.0", "-1e-3,-1.0", "'-x,-1.0"]


def test_a_full_disk_is_told_and_the_command_continues(
    predict: Callable[..., str], server: Server, tmp_path: Path
) -> None:
    np.save(tmp_path / "rows.npy", PIXELS)
    disk = tmp_path / "disk"
    words = (server.url, tmp_path / "rows.npy", "--output", disk / "out.jsonl", "--chunk", "4")
    with small_disk(disk, "20k"):
        said = predict(*words, code=2)
        assert f"--output {disk / 'out.jsonl'} cannot be written: No space left on device. Predicted rows stay" in said
        assert "Traceback" not in said
        kept = {path.name: path.stat().st_mtime_ns for path in (disk / "out.jsonl.parts").glob("part-*")}
        assert kept
        subprocess.run(["mount", "-o", "remount,size=1m", disk], check=True, timeout=60)
        predict(*words)
        assert len((disk / "out.jsonl").read_text().splitlines()) == len(PIXELS)
        assert [path.name for path in disk.iterdir()] == ["out.jsonl"]


@pytest.mark.cold
def test_a_library_that_is_missing_is_named(run_processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "orjson.py").write_text("raise ModuleNotFoundError(\"No module named 'orjson'\")")
    done = run_processes.paceline("predict", "model", "rows.csv", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2
    assert "orjson" in done.stderr
    assert "pip install 'httptools<" in done.stderr
