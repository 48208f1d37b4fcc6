from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from paceline.core.errors import CheckpointError
from paceline.runs import checkpoint_store
from paceline.runs.checkpoint_manifest import CheckpointInfo, verify
from paceline.runs.checkpoint_state import model_sha256
from paceline.runs.checkpoint_store import commit, newest_verified
from paceline.runs.checkpointer import Checkpointer, load

MakeInfo = Callable[..., CheckpointInfo]


@pytest.fixture
def checkpointer(tmp_path: Path) -> Iterator[Checkpointer]:
    made = Checkpointer(tmp_path / "checkpoints", keep=3)
    yield made
    made.close()


def state_of(value: float) -> dict[str, Any]:
    return {"model": {"weight": torch.full((4, 3), value)}, "progress": {"value": value}}


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def test_a_whole_training_state_comes_back(checkpointer: Checkpointer, make_info: MakeInfo) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(2, 3, 5, 5)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizers": {"default": optimizer.state_dict()},
        "scaler": None,
        "best": {"loss": math.inf, "history": (1, 2.5, None)},
        "rng": torch.get_rng_state(),
    }
    checkpointer.save(state, make_info(5))
    checkpointer.wait()
    path = checkpointer.directory / "step-00000005-v00000006"
    manifest, back = load(path)
    assert manifest == verify(path)
    assert manifest.info == make_info(5)
    assert names(path) == [
        "manifest.json",
        "model.safetensors",
        "optimizers.safetensors",
        "rng.safetensors",
        "state.json",
    ]
    assert model_sha256(back["model"]) == model_sha256(model.state_dict())
    saved = back["optimizers"]["default"]
    assert saved["param_groups"] == optimizer.state_dict()["param_groups"]
    for index, moments in optimizer.state_dict()["state"].items():
        assert all(torch.equal(moments[name], saved["state"][index][name]) for name in moments)
    assert back["scaler"] is None
    assert back["best"] == state["best"]
    assert torch.equal(back["rng"], torch.get_rng_state())
    # The model's file is one that any safetensors reader takes, under the model's own names.
    assert safetensors.torch.load_file(path / "model.safetensors").keys() == model.state_dict().keys()


def test_what_is_saved_is_the_state_at_the_call(checkpointer: Checkpointer, make_info: MakeInfo) -> None:
    weight, progress = torch.zeros(1000), {"steps": [1]}
    released = threading.Event()
    checkpointer.save(
        {"model": {"weight": weight}, "progress": progress},
        make_info(1),
        before_commit=lambda: assert_set(released),
    )
    weight.fill_(9)
    progress["steps"].append(2)
    released.set()
    checkpointer.wait()
    _, back = load(checkpointer.directory / "step-00000001-v00000002")
    assert torch.equal(back["model"]["weight"], torch.zeros(1000))
    assert back["progress"] == {"steps": [1]}


def assert_set(event: threading.Event) -> None:
    assert event.wait(timeout=60)


def test_one_save_is_in_flight_and_the_wait_is_counted(checkpointer: Checkpointer, make_info: MakeInfo) -> None:
    released, threads = threading.Event(), []

    def hold() -> None:
        threads.append(threading.current_thread())
        assert_set(released)

    checkpointer.save(state_of(1), make_info(1), before_commit=hold)
    before = checkpointer.stall_s
    second = threading.Thread(target=checkpointer.save, args=(state_of(2), make_info(2)))
    second.start()
    try:
        checkpointer.poll()  # neither waits nor raises
        assert not (checkpointer.directory / "LATEST").exists()
    finally:
        released.set()
        second.join(timeout=60)
    checkpointer.wait()
    assert threads[0] is not threading.current_thread()
    assert checkpointer.stall_s > before > 0
    for value in (1, 2):
        path = checkpointer.directory / f"step-0000000{value}-v0000000{value + 1}"
        assert load(path).state["progress"] == {"value": value}


def test_many_saves_with_retention(checkpointer: Checkpointer, make_info: MakeInfo) -> None:
    for step in range(20):
        checkpointer.save(state_of(step), make_info(step, best_version=8 if step >= 8 else None))
    checkpointer.wait()
    assert names(checkpointer.directory) == [
        "LATEST",
        *(f"step-{step:08d}-v{step + 1:08d}" for step in (7, 17, 18, 19)),
    ]
    assert load(checkpointer.directory / "step-00000007-v00000008").state["progress"] == {"value": 7}


@pytest.mark.parametrize("surface", ["save", "wait", "close", "poll"])
def test_a_background_error_is_raised_once(tmp_path: Path, make_info: MakeInfo, surface: str) -> None:
    checkpointer = Checkpointer(tmp_path / "checkpoints", keep=1)
    (tmp_path / "checkpoints").write_text("a file where the directory should be")
    failed = threading.Event()
    checkpointer.save(state_of(1), make_info(1))
    pending = checkpointer._pending
    assert pending is not None
    pending.add_done_callback(lambda _: failed.set())
    assert_set(failed)
    arguments = (state_of(2), make_info(2)) if surface == "save" else ()
    with pytest.raises(CheckpointError, match="cannot save the checkpoint of step 1"):
        getattr(checkpointer, surface)(*arguments)
    checkpointer.poll()
    checkpointer.close()


@pytest.mark.integration
def test_a_full_disk_surfaces_and_saving_goes_on_later(small_disk: Path, make_info: MakeInfo) -> None:
    with closing(Checkpointer(small_disk, keep=2)) as checkpointer:
        checkpointer.save(state_of(1), make_info(1))
        checkpointer.wait()
        checkpointer.save({"model": {"weight": torch.zeros(100_000)}}, make_info(2))
        with pytest.raises(CheckpointError, match="No space left on device"):
            checkpointer.wait()
        assert newest_verified(small_disk).path == small_disk / "step-00000001-v00000002"
        checkpointer.save(state_of(3), make_info(3))
        checkpointer.wait()
    assert newest_verified(small_disk).path == small_disk / "step-00000003-v00000004"


def test_older_checkpoints_stay_while_the_disk_is_away(
    checkpointer: Checkpointer,
    make_info: MakeInfo,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def is_away(directory: Path) -> list[Path]:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out", str(directory))

    monkeypatch.setattr(checkpoint_store, "scan", is_away)
    checkpointer.save(state_of(1.0), make_info(1))
    checkpointer.wait()  # the save itself succeeded
    assert load(checkpointer.directory / "step-00000001-v00000002").state["progress"] == {"value": 1.0}
    assert "older checkpoints in" in caplog.text


def test_before_commit_precedes_the_commit(checkpointer: Checkpointer, make_info: MakeInfo) -> None:
    seen: list[bool] = []

    def look() -> None:
        seen.append(newest_verified(checkpointer.directory).path is None)

    checkpointer.save(state_of(1), make_info(1), before_commit=look)
    checkpointer.wait()
    assert seen == [True]


def test_a_state_that_cannot_be_saved_names_the_place(checkpointer: Checkpointer, make_info: MakeInfo) -> None:
    with pytest.raises(CheckpointError, match=r"schedulers: .* at default/rule it holds a builtins.function"):
        checkpointer.save({"schedulers": {"default": {"rule": lambda: 1}}}, make_info(1))
    with pytest.raises(CheckpointError, match="must be named by an identifier"):
        checkpointer.save({"../model": {}}, make_info(1))
    checkpointer.wait()
    assert not checkpointer.directory.exists()


def test_what_an_earlier_process_left_is_removed(tmp_path: Path, make_info: MakeInfo) -> None:
    (tmp_path / ".tmp-left").mkdir()
    os.utime(tmp_path / ".tmp-left", (0, 0))  # of an earlier version, without the name of its process
    with closing(Checkpointer(tmp_path, keep=1)) as checkpointer:
        checkpointer.save(state_of(1), make_info(1))
    assert names(tmp_path) == ["LATEST", "step-00000001-v00000002"]


def test_keep_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Checkpointer(tmp_path, keep=0)


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "model.safetensors"])
def test_no_damaged_byte_is_loaded(checkpointer: Checkpointer, make_info: MakeInfo, name: str) -> None:
    checkpointer.save(state_of(1), make_info(1))
    checkpointer.wait()
    path = checkpointer.directory / "step-00000001-v00000002"
    content = (path / name).read_bytes()
    for position in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        (path / name).write_bytes(damaged)
        with pytest.raises(CheckpointError, match=name):
            load(path)


EXPLODING_PICKLE = b"cbuiltins\nexec\n(Vraise SystemExit('a pickle was run')\ntR."


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"model.safetensors": EXPLODING_PICKLE}, "not a safetensors file"),
        ({"state.json": EXPLODING_PICKLE}, "not JSON"),
        ({"state.json": b"[" * 100_000}, "not JSON"),
        ({"state.json": b"[]"}, "not a JSON object"),
        ({"state.json": b'{"model": {"tensor": "../weight"}}'}, "'../weight' is missing"),
        ({"state.json": b'{"model": {"dict": {}}}'}, "no place for the tensor 'weight'"),
        ({"state.json": b"{}"}, "model.safetensors belongs to no part"),
        ({"other.safetensors": b""}, "other.safetensors belongs to no part"),
        ({"state.json": b'{"model": {"float": NaN}}'}, "NaN"),
        ({"state.json": None}, "not JSON"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_hostile_content_under_a_valid_manifest_is_refused(
    checkpointer: Checkpointer, make_info: MakeInfo, files: dict[str, bytes | None], said: str
) -> None:
    checkpointer.save(state_of(1), make_info(1))
    checkpointer.wait()
    path = checkpointer.directory / "step-00000001-v00000002"
    contents = {name: (path / name).read_bytes() for name in ("model.safetensors", "state.json")} | files
    shutil.rmtree(path)
    commit(path.parent, make_info(1), [(n, [c]) for n, c in contents.items() if c is not None])
    verify(path)
    with pytest.raises(CheckpointError, match="holds no state that Paceline wrote") as error:
        load(path)
    assert said in str(error.value)


def test_state_json_is_strict_json(checkpointer: Checkpointer, make_info: MakeInfo) -> None:
    checkpointer.save({"best": {"loss": math.nan, "text": "\ud800\n"}}, make_info(1))
    checkpointer.wait()
    path = checkpointer.directory / "step-00000001-v00000002"
    json.loads((path / "state.json").read_bytes(), parse_constant=pytest.fail)
    back = load(path).state["best"]
    assert math.isnan(back["loss"])
    assert back["text"] == "\ud800\n"


SAVING_WITHOUT_END = """
import sys
from itertools import count
from pathlib import Path
import torch
from paceline.runs.checkpointer import Checkpointer
from paceline.runs.checkpoint_manifest import CheckpointInfo

checkpointer = Checkpointer(Path(sys.argv[1]), keep=2)
weight = torch.zeros(200_000)
for step in count():
    weight.fill_(step)
    info = CheckpointInfo(
        task="tasks:Demo", step=step, state_version=step, epoch=0, generation=0, microbatches=4, pins={}
    )
    checkpointer.save({"model": {"weight": weight}, "progress": {"step": step}}, info)
    if step % 10 == 3:
        checkpointer.wait()
        print(step, flush=True)
"""


@pytest.mark.integration
def test_what_was_acknowledged_survives_a_kill(tmp_path: Path, make_info: MakeInfo) -> None:
    directory = tmp_path / "checkpoints"
    child = subprocess.Popen(
        [sys.executable, "-c", SAVING_WITHOUT_END, str(directory)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        acknowledged = [int(child.stdout.readline()) for _ in range(3)][-1]
        # At once, so most likely in the middle of a save.
        child.send_signal(signal.SIGKILL)
    finally:
        child.kill()
        child.wait(timeout=60)
        if child.stdout is not None:
            child.stdout.close()
    found = newest_verified(directory)
    assert found.path is not None
    manifest, state = load(found.path)
    assert manifest.info.step >= acknowledged
    assert state["progress"] == {"step": manifest.info.step}
    assert torch.equal(state["model"]["weight"], torch.full((200_000,), float(manifest.info.step)))
    with closing(Checkpointer(directory, keep=1)) as checkpointer:
        checkpointer.save(state_of(1), make_info(manifest.info.step + 1))
        checkpointer.wait()
    assert len(names(directory)) == 2
