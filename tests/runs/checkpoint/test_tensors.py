from __future__ import annotations

import sys
import threading
import time
import warnings

import pytest
import safetensors.torch
import torch
from torch import Tensor

from paceline.core.errors import CheckpointError
from paceline.runs.checkpoint_state import SAFETENSORS_DTYPES, Snapshot, bytes_of, file_contents, read_tensors


def captured(snapshot: Snapshot) -> dict[str, bytes]:
    return {name: b"".join(file_contents(tensors)) for name, tensors in snapshot.files.items()}


def every_dtype() -> dict[str, Tensor]:
    named = {}
    for dtype in SAFETENSORS_DTYPES:
        size = 3 * dtype.itemsize
        content = bytearray(i % 2 if dtype is torch.bool else i * 37 % 256 for i in range(size))
        named[str(dtype)] = torch.frombuffer(content, dtype=dtype)
    return named | {"scalar": torch.tensor(7), "empty": torch.empty(2, 0, 3), "é/ü": torch.ones(1, 2)}


def test_files_are_what_the_safetensors_library_writes_and_reads() -> None:
    snapshot = Snapshot()
    tensors = every_dtype()
    snapshot.capture({"a.safetensors": tensors, "b.safetensors": {"x": torch.ones(3)}})
    files = captured(snapshot)
    assert list(files) == ["a.safetensors", "b.safetensors"]
    theirs = safetensors.torch.load(safetensors.torch.save(tensors))
    ours = safetensors.torch.load(files["a.safetensors"])
    assert ours.keys() == theirs.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert ours[name].dtype == tensor.dtype
        assert ours[name].shape == tensor.shape
        assert bytes_of(ours[name]) == bytes_of(theirs[name]) == bytes_of(tensor)
    assert torch.equal(read_tensors(files["b.safetensors"])["x"], torch.ones(3))


def test_strided_tensors_are_stored_row_major() -> None:
    x = torch.arange(120.0).reshape(2, 3, 4, 5)
    variants = {
        "channels_last": x.contiguous(memory_format=torch.channels_last),
        "transposed": x.transpose(0, 3),
        "expanded": x[:1].expand(4, 3, 4, 5),
        "every_other": x[..., ::2],
        "parameter": torch.nn.Parameter(x),
        "conjugate": torch.complex(x, x).conj(),
    }
    snapshot = Snapshot()
    snapshot.capture({"x.safetensors": variants})
    back = read_tensors(captured(snapshot)["x.safetensors"])
    for name, tensor in variants.items():
        assert back[name].is_contiguous()
        assert torch.equal(back[name], tensor.detach()), name


def test_a_snapshot_does_not_follow_its_source() -> None:
    x = torch.zeros(5)
    snapshot = Snapshot()
    snapshot.capture({"x.safetensors": {"x": x}})
    x.add_(1)
    assert torch.equal(read_tensors(captured(snapshot)["x.safetensors"])["x"], torch.zeros(5))


def test_the_buffer_is_reused_until_the_layout_changes() -> None:
    def address(snapshot: Snapshot) -> int:
        ((tensor,),) = (tensors.values() for tensors in snapshot.files.values())
        return tensor.data_ptr()

    snapshot = Snapshot()
    snapshot.capture({"x.safetensors": {"x": torch.zeros(5)}})
    first = address(snapshot)
    snapshot.capture({"x.safetensors": {"x": torch.ones(5)}})
    assert address(snapshot) == first
    for other in ({"y": torch.ones(5)}, {"y": torch.ones(6)}, {"y": torch.ones(6).double()}):
        snapshot.capture({"x.safetensors": other})
        assert torch.equal(read_tensors(captured(snapshot)["x.safetensors"])["y"], other["y"])


def test_a_snapshot_of_nothing_has_no_files() -> None:
    snapshot = Snapshot()
    snapshot.capture({})
    assert captured(snapshot) == {}


def test_loaded_tensors_can_be_written() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = read_tensors(safetensors.torch.save({"x": torch.zeros(3)}))["x"]
        x.add_(1)
    assert x.tolist() == [1, 1, 1]


def test_the_reader_agrees_with_the_library() -> None:
    tensors = every_dtype() | {"odd": torch.ones(3, dtype=torch.int8)}
    content = safetensors.torch.save(tensors, {"key": "value"})
    read, expected = read_tensors(content), safetensors.torch.load(content)
    assert read.keys() == tensors.keys()
    for name, tensor in expected.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert bytes_of(read[name]) == bytes_of(tensor), name
    assert read_tensors(safetensors.torch.save({})) == {}


def test_other_threads_run_while_tensors_are_read() -> None:
    content = safetensors.torch.save({"x": torch.zeros(1 << 25)})
    turns = 0
    reader = threading.Thread(target=read_tensors, args=(content,))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # so that only what releases the interpreter lets another thread run
    try:
        reader.start()
        while reader.is_alive():
            turns += 1
            time.sleep(0)
    finally:
        sys.setswitchinterval(interval)
    reader.join()
    assert turns > 10


def with_offsets(text: str) -> bytes:
    """Return a file of 4 bytes of data."""
    header = f'{{"x":{{"dtype":"F32","shape":[1],"data_offsets":{text}}}}}'.encode()
    return len(header).to_bytes(8, "little") + header + bytes(4)


def test_a_file_that_its_tensors_fill_is_read() -> None:
    assert read_tensors(with_offsets("[0,4]"))["x"].tolist() == [0]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04\x95junk",
        (2**63).to_bytes(8, "little") + b"{}",
        (2**64 - 1).to_bytes(8, "little") + b"{}",
        (60).to_bytes(8, "little") + b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,400000]}}'.ljust(60),
        (62).to_bytes(8, "little")
        + b'{"x":{"dtype":"F32","shape":[99999999999],"data_offsets":[0,4]}}'.ljust(62)[:62]
        + bytes(4),
        with_offsets("[0,4]") + bytes(4),
        with_offsets("[-4,4]"),
        with_offsets("[4,0]"),
        with_offsets("0"),
        (70).to_bytes(8, "little") + b'{"x":{"dtype":"PICKLE","shape":[1],"data_offsets":[0,4]}}'.ljust(70) + bytes(4),
    ],
)
def test_what_is_no_safetensors_is_refused(content: bytes) -> None:
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read_tensors(content)


@pytest.mark.gpu
def test_a_gpu_snapshot_is_complete_when_capture_returns() -> None:
    x = torch.zeros(1 << 22, device="cuda")
    y = torch.full((1000,), 5.0)
    snapshot = Snapshot()
    for value in range(1, 4):
        x.fill_(value)
        snapshot.capture({"x.safetensors": {"x": x, "y": y}})
        x.fill_(-1)
        back = read_tensors(captured(snapshot)["x.safetensors"])
        assert torch.equal(back["x"], torch.full((1 << 22,), float(value)))
        assert torch.equal(back["y"], y)
