"""Sharded checkpoints: written by several processes, read whole or in other parts, never chosen half."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.errors import CheckpointError, CheckpointWriteError
from paceline.runs import checkpoint_shards
from paceline.runs import checkpointer as checkpointer_module
from paceline.runs.checkpoint_manifest import CheckpointInfo, problems, read_manifest
from paceline.runs.checkpoint_shards import FORMAT, StoredTensor, Writers
from paceline.runs.checkpoint_state import Snapshot, TensorShard, flatten
from paceline.runs.checkpoint_store import newest_verified, scan
from paceline.runs.checkpointer import Checkpointer, load

WHOLE = {
    "weight": torch.arange(35.0).reshape(7, 5),
    "half": torch.arange(8).to(torch.bfloat16),
    "flags": torch.tensor([True, False, True]),
}
PLAIN = torch.arange(3)


INFO = CheckpointInfo(task="task", step=5, state_version=5, epoch=0, generation=0, microbatches=4, pins={})


def shard(tensor: torch.Tensor, number: int, count: int) -> TensorShard:
    parts = torch.chunk(tensor, count)
    start = sum(len(part) for part in parts[:number])
    part = parts[number] if number < len(parts) else tensor[:0]
    return TensorShard(part, tensor.shape, (start, *(0,) * (tensor.dim() - 1)))


def state_of(number: int, count: int) -> dict[str, Any]:
    shards: dict[str, Any] = {name: shard(tensor, number, count) for name, tensor in WHOLE.items()}
    return {"model": {**shards, "tied": shards["weight"], "plain": PLAIN}, "progress": {"step": 5}}


@pytest.fixture
def checkpointers(tmp_path: Path) -> Iterator[list[Checkpointer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(closing(Checkpointer(tmp_path, keep=2))) for _ in range(4)]


def begin(
    checkpointers: list[Checkpointer], parted: threading.Event, numbers: range, count: int = 4, **options: Any
) -> None:
    draft = checkpointers[0].open_draft()
    for number in numbers:
        writers = Writers(number, count, draft, parted)
        checkpointers[number].save(state_of(number, count), INFO, writers=writers, **options)


def test_shards_are_one_checkpoint_read_whole_or_in_parts(tmp_path: Path, checkpointers: list[Checkpointer]) -> None:
    begin(checkpointers, threading.Event(), range(4))
    for checkpointer in checkpointers:
        checkpointer.wait()
    found = newest_verified(tmp_path)
    assert found.path is not None
    assert read_manifest(found.path).format == FORMAT
    assert sum(name.startswith("rank-") for name in read_manifest(found.path).files) == 4
    model = load(found.path).state["model"]
    assert model["tied"] is model["weight"]
    for name, tensor in {**WHOLE, "plain": PLAIN}.items():
        assert torch.equal(model[name], tensor)
    stored = load(found.path, whole=False).state["model"]["weight"]
    assert isinstance(stored, StoredTensor)
    for start in range(8):
        for stop in range(start, 8):
            assert torch.equal(stored.read((slice(start, stop), slice(1, 5))), WHOLE["weight"][start:stop, 1:])


def test_a_changed_byte_is_found_whoever_reads(tmp_path: Path, checkpointers: list[Checkpointer]) -> None:
    begin(checkpointers, threading.Event(), range(4))
    for checkpointer in checkpointers:
        checkpointer.wait()
    (path,) = scan(tmp_path)
    stored = load(path, whole=False).state["model"]["weight"]
    file = path / "rank-00001-of-00004.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert len(problems(path)) == 1
    assert newest_verified(tmp_path).path is None
    with pytest.raises(CheckpointError, match="damaged"):
        load(path)
    with pytest.raises(CheckpointError, match=r"a slice in rank-00001-of-00004\.safetensors has another SHA-256"):
        load(path, whole=False).state["model"]["flags"].read()
    assert torch.equal(stored.read((slice(0, 2), slice(0, 5))), WHOLE["weight"][:2])


def test_without_one_process_nothing_is_committed(
    tmp_path: Path, checkpointers: list[Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_shards, "_PATIENCE_S", {False: 60.0, True: 0.1})
    parted = threading.Event()
    begin(checkpointers, parted, range(3))
    parted.set()
    with pytest.raises(CheckpointWriteError, match=r"the process that writes rank-00003-of-00004\.safetensors is gone"):
        checkpointers[0].wait()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_of_one_process_is_the_failure_of_all(
    tmp_path: Path, checkpointers: list[Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoint_shards.write_file

    def fails(path: Path, buffers: Any) -> Any:
        if path.name.startswith("rank-00002"):
            raise OSError(28, "No space left on device")
        return write(path, buffers)

    monkeypatch.setattr(checkpoint_shards, "write_file", fails)
    begin(checkpointers, threading.Event(), range(4))
    for number in (0, 2):
        with pytest.raises(CheckpointWriteError, match="No space left on device"):
            checkpointers[number].wait()
    for number in (1, 3):
        with suppress(CheckpointWriteError):  # number 0 gave the draft up before it could write
            checkpointers[number].wait()
    assert scan(tmp_path) == []


def captured_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each save adds the bytes that it copies."""
    found: list[int] = []
    capture = Snapshot.capture

    def counted(self: Snapshot, files: Any) -> None:
        found.append(sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values()))
        capture(self, files)

    monkeypatch.setattr(Snapshot, "capture", counted)
    return found


def test_large_shards_are_written_without_a_copy_and_may_change_before_the_disk_has_them(
    tmp_path: Path, checkpointers: list[Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointer_module, "_COPIED_BYTES", 16)
    copied, may_write, may_sync = captured_bytes(monkeypatch), threading.Event(), threading.Event()
    write_file, fsync = checkpoint_shards.write_file, os.fsync

    def write(path: Path, buffers: Any) -> Any:
        may_write.wait()
        return write_file(path, buffers)

    def sync(file: int) -> None:
        may_sync.wait()
        fsync(file)

    monkeypatch.setattr(checkpoint_shards, "write_file", write)
    monkeypatch.setattr(os, "fsync", sync)
    draft = checkpointers[0].open_draft()
    state = state_of(0, 1)
    state["model"]["weight"] = state["model"]["tied"] = shard(WHOLE["weight"].clone(), 0, 1)
    checkpointers[0].save(state, INFO, writers=Writers(0, 1, draft, threading.Event()))
    assert copied == [PLAIN.nbytes]
    waits = threading.Thread(target=checkpointers[0].wait_for_tensors)
    waits.start()
    assert waits.is_alive()  # nothing of them is written yet
    may_write.set()
    waits.join()
    state["model"]["weight"].part.zero_()
    assert scan(tmp_path) == []
    may_sync.set()
    checkpointers[0].wait()
    (path,) = scan(tmp_path)
    assert problems(path) == []
    assert torch.equal(load(path).state["model"]["weight"], WHOLE["weight"])


def test_a_save_for_which_the_caller_waits_copies_nothing(
    tmp_path: Path, checkpointers: list[Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointer_module, "_COPIED_BYTES", 16)
    copied = captured_bytes(monkeypatch)
    begin(checkpointers, threading.Event(), range(4), copies=False)
    for checkpointer in checkpointers:
        checkpointer.wait()
    assert copied == [0] * 4
    (path,) = scan(tmp_path)
    for name, tensor in {**WHOLE, "plain": PLAIN}.items():
        assert torch.equal(load(path).state["model"][name], tensor)


def test_tensors_may_change_after_a_write_that_failed(
    checkpointers: list[Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointer_module, "_COPIED_BYTES", 0)

    def fails(path: Path, buffers: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_shards, "write_file", fails)
    begin(checkpointers, threading.Event(), range(4))
    for checkpointer in checkpointers:
        checkpointer.wait_for_tensors()
        with suppress(CheckpointWriteError):
            checkpointer.wait()


TASK = """
import time
from paceline.runs import checkpoint_shards, checkpointer
from paceline_tasks.transformer import Transformer

checkpointer._COPIED_BYTES = 0
write_file = checkpoint_shards.write_file


def write_late(path, buffers):
    if path.name.startswith("rank-"):
        time.sleep(0.3)  # several steps
    return write_file(path, buffers)


checkpoint_shards.write_file = write_late


class Slow(Transformer):
    pass
"""


@pytest.mark.integration
def test_steps_after_a_save_do_not_change_what_is_written(run_processes: Any, tmp_path: Path) -> None:
    task = tmp_path / "slow.py"
    task.write_text(TASK)
    words = ["--max-steps", "4", "--threads", "1", "--quiet", "--checkpoint-every", "1steps", "--keep-checkpoints", "9"]
    words += ["--microbatches", "2", "--set", "width=16", "--set", "layers=1", "--set", "context=8"]
    found = []
    for options in (["--nproc", "2", "--strategy", "fsdp"], ["--nproc", "1"]):
        run = tmp_path / options[1]
        done = run_processes.paceline("train", f"{task}:Slow", *words, *options, "--run-dir", run)
        assert done.returncode == 0, done.stderr
        found.append([load(path).state for path in scan(run / "checkpoints")])
    for sharded, whole in zip(*found, strict=True):
        assert sharded["progress"]["step"] == whole["progress"]["step"]
        for part in ("model", "optimizers"):
            ours, theirs = flatten(sharded[part]), flatten(whole[part])
            assert ours[0].keys() == theirs[0].keys()
            assert all(torch.equal(ours[0][name], theirs[0][name]) for name in ours[0]), part
