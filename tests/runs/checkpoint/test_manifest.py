from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import CheckpointError
from paceline.runs.checkpoint_manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    CheckpointInfo,
    FileRecord,
    Manifest,
    differences,
    read_verified,
    require_same_run,
    verify,
)

MakeInfo = Callable[..., CheckpointInfo]
CommitStep = Callable[..., Path]


def forge(checkpoint: Path, **changes: Any) -> None:
    """Change the manifest as an attacker would: with a checksum that fits again."""
    document = json.loads((checkpoint / MANIFEST).read_bytes())
    del document["manifest_sha256"]
    document |= changes
    text = json.dumps(document, sort_keys=True, indent=2) + "\n"
    document["manifest_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (checkpoint / MANIFEST).write_text(json.dumps(document, sort_keys=True, indent=2) + "\n")


def record_of(content: bytes) -> dict[str, Any]:
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_a_manifest_comes_back_as_it_was(make_info: MakeInfo) -> None:
    pins = {"torch": "2.13.0", "threads": 2, "tf32": False, "device": None, "shape": [64, 784], "x": 0.1}
    info = make_info(7, pins=pins, best_version=3)
    manifest = Manifest(info, {"b.safetensors": FileRecord(0, "0" * 64), "a.json": FileRecord(2**40, "f" * 64)})
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_verify_gives_what_was_committed(tmp_path: Path, commit_step: CommitStep, make_info: MakeInfo) -> None:
    checkpoint = commit_step(tmp_path, 5)
    manifest = verify(checkpoint)
    assert manifest.info == make_info(5)
    assert manifest.files == {
        "model.safetensors": FileRecord(5, hashlib.sha256(b"head5").hexdigest()),
        "state.json": FileRecord(2, hashlib.sha256(b"{}").hexdigest()),
    }
    assert read_verified(checkpoint) == (manifest, {"model.safetensors": b"head5", "state.json": b"{}"})


@pytest.mark.integration
@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "state.json"])
def test_any_flipped_bit_of_any_file_is_seen(tmp_path: Path, commit_step: CommitStep, name: str) -> None:
    file = commit_step(tmp_path, 5) / name
    content = file.read_bytes()
    for position in range(len(content)):
        bits = range(8) if len(content) < 100 else [position % 8]
        for bit in bits:
            damaged = bytearray(content)
            damaged[position] ^= 1 << bit
            file.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=name):
                verify(file.parent)
            with pytest.raises(CheckpointError, match=name):
                read_verified(file.parent)
    file.write_bytes(content)
    verify(file.parent)


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "state.json"])
def test_a_truncated_lengthened_or_missing_file_is_named(tmp_path: Path, commit_step: CommitStep, name: str) -> None:
    file = commit_step(tmp_path, 5) / name
    content = file.read_bytes()
    for damaged in (content[:-1], b"", content + b"\n"):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=name):
            verify(file.parent)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        verify(file.parent)


def test_wrong_size_is_told_before_the_hash(tmp_path: Path, commit_step: CommitStep) -> None:
    checkpoint = commit_step(tmp_path, 5)
    (checkpoint / "model.safetensors").write_bytes(b"hea")
    with pytest.raises(CheckpointError, match=r"model.safetensors has 3 bytes, but its manifest.json says 5"):
        verify(checkpoint)


def test_an_extra_file_is_named(tmp_path: Path, commit_step: CommitStep) -> None:
    checkpoint = commit_step(tmp_path, 5)
    (checkpoint / "model.pt").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=r"'model.pt' is not in its manifest.json"):
        verify(checkpoint)


@pytest.mark.parametrize(
    "name",
    [
        "../secret",
        "/etc/passwd",
        "..",
        ".",
        "",
        "a/b",
        "a\\b",
        ".hidden",
        "nul\0",
        "manifest.json",
        "x" * 200,
        "ü",
    ],
)
def test_names_that_are_no_plain_names_are_refused(tmp_path: Path, commit_step: CommitStep, name: str) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    checkpoint = commit_step(tmp_path, 5)
    forge(checkpoint, files={name: record_of(b"secret")})
    with pytest.raises(CheckpointError, match="not a plain file name"):
        verify(checkpoint)


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory"])
def test_only_regular_files_are_opened(tmp_path: Path, commit_step: CommitStep, kind: str) -> None:
    checkpoint = commit_step(tmp_path, 5)
    file = checkpoint / "model.safetensors"
    file.rename(tmp_path / "outside")
    if kind == "symlink":
        file.symlink_to(tmp_path / "outside")
    elif kind == "fifo":
        os.mkfifo(file)
    else:
        file.mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        verify(checkpoint)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 4},
        {"format": True},
        {"format": None},
        {"step": -1},
        {"step": 1.0},
        {"step": True},
        {"step": 2**63},
        {"step": "5"},
        {"microbatches": None},
        {"best_version": "best"},
        {"task": 5},
        {"task": "t" * 5000},
        {"pins": []},
        {"pins": {"a": {"b": 1}}},
        {"pins": {"a": [[1]]}},
        {"files": []},
        {"files": {"model.safetensors": 3}},
        {"files": {"model.safetensors": {"size": 5}}},
        {"files": {"model.safetensors": {"size": -1, "sha256": "0" * 64}}},
        {"files": {"model.safetensors": {"size": 5, "sha256": "0" * 63}}},
        {"files": {"model.safetensors": {"size": 5, "sha256": "0" * 64, "mode": 1}}},
        {"files": None},
        {"unknown": 1},
    ],
    ids=str,
)
def test_a_forged_manifest_of_wrong_types_is_refused(
    tmp_path: Path, commit_step: CommitStep, changes: dict[str, Any]
) -> None:
    checkpoint = commit_step(tmp_path, 5)
    forge(checkpoint, **changes)
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged"):
        verify(checkpoint)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b"\xff\xfe",
        b"\x80\x04\x95\x00",
        b"[" * 200_000,
        b'{"step": ' + b"9" * 5000 + b"}",
        b'{"format": 1, "step": NaN}',
        b'{"format": 1, "format": 1}',
        b" " * (MAX_MANIFEST_BYTES + 1),
    ],
    ids=lambda content: repr(content[:12]),
)
def test_hostile_text_in_place_of_a_manifest_is_refused(
    tmp_path: Path, commit_step: CommitStep, content: bytes
) -> None:
    checkpoint = commit_step(tmp_path, 5)
    (checkpoint / MANIFEST).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"manifest.json"):
        verify(checkpoint)


def test_the_same_content_in_another_layout_is_refused(tmp_path: Path, commit_step: CommitStep) -> None:
    checkpoint = commit_step(tmp_path, 5)
    document = json.loads((checkpoint / MANIFEST).read_bytes())
    (checkpoint / MANIFEST).write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="checksum"):
        verify(checkpoint)


def test_no_directory_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing cannot be used: No such file or directory\. Resume from"):
        verify(tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="Not a directory"):
        verify(tmp_path / "file")


def test_info_is_checked_when_it_is_made(make_info: MakeInfo) -> None:
    with pytest.raises(CheckpointError, match="step must be an integer from 0"):
        make_info(-1, state_version=0)
    with pytest.raises(CheckpointError, match="pin 'shape' must be"):
        make_info(1, pins={"shape": (1, 2)})


def test_differences_name_each_pin() -> None:
    recorded = {"threads": 1, "torch": "2.13.0", "gone": "x", "same": [1, 2], "flag": 1}
    current = {"threads": 2, "torch": "2.13.0", "new": None, "same": [1, 2], "flag": True}
    assert differences(recorded, current) == [
        "flag: 1 in the checkpoint, True now",
        "threads: 1 in the checkpoint, 2 now",
    ]
    assert differences(current, current) == []


def test_another_task_or_number_of_microbatches_is_refused(make_info: MakeInfo) -> None:
    path = Path("runs/a")
    require_same_run(path, make_info(5), make_info(9, generation=3, pins={}))
    with pytest.raises(CheckpointError, match=r"'tasks:Demo', not 'other:Task'\. Choose another --run-dir DIR"):
        require_same_run(path, make_info(5), make_info(5, task="other:Task"))
    with pytest.raises(CheckpointError, match=r"--microbatches 4, not 12;.*Resume with --microbatches 4"):
        require_same_run(path, make_info(5), make_info(5, microbatches=12))
