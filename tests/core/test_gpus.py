"""How many GPUs a process sees, without torch."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.core import gpus
from paceline.core.gpus import preferred_device, torch_has_cuda, visible_gpus


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    folder = tmp_path / "gpus"
    for name in ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0", "0000:04:00.0"):
        (folder / name).mkdir(parents=True)
    monkeypatch.setattr(gpus, "_NVIDIA_GPUS", folder)
    gpus._installed_gpus.cache_clear()
    yield
    gpus._installed_gpus.cache_clear()


# As CUDA itself counts them: "CUDA Environment Variables" in the CUDA C++ Programming Guide.
@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4),
        ("", 0),
        ("0", 1),
        ("2,1", 2),
        (" 0 , 3", 2),
        ("0,-1,1", 1),
        ("-1", 0),
        ("NoDevFiles", 0),
        ("0,99", 1),
        ("99,0", 0),
        ("0,0", 0),
        ("0,00", 0),
        ("0,1,2,3", 4),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,GPU-1", 2),
        ("GPU-1,GPU-1", 0),
        ("MIG-1,MIG-2", 1),
    ],
)
def test_visible_gpus_are_counted_as_cuda_does(visible: str | None, count: int) -> None:
    assert visible_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == count


def test_a_node_without_the_driver_has_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpus, "_NVIDIA_GPUS", tmp_path / "none")
    monkeypatch.setattr(gpus, "_NVML", "libnothing.so.1")
    gpus._installed_gpus.cache_clear()
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}) == 0
    gpus._installed_gpus.cache_clear()


@pytest.mark.integration
def test_without_the_driver_s_files_nvidia_s_library_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "nvml.c"
    source.write_text(
        "int nvmlInit_v2(void) { return 0; }\n"
        "int nvmlShutdown(void) { return 0; }\n"
        "int nvmlDeviceGetCount_v2(unsigned *count) { *count = 3; return 0; }\n"
    )
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", "-o", tmp_path / "nvml.so", source], check=True)
    monkeypatch.setattr(gpus, "_NVIDIA_GPUS", tmp_path / "none")
    monkeypatch.setattr(gpus, "_NVML", str(tmp_path / "nvml.so"))
    gpus._installed_gpus.cache_clear()
    assert visible_gpus({}) == 3
    gpus._installed_gpus.cache_clear()


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(("line", "has_cuda"), [("cuda: Optional[str] = '13.0'", True), ("cuda = None", False)])
def test_auto_needs_a_torch_for_cuda(
    line: str, has_cuda: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '2.99'\n{line}\nhip: Optional[str] = None\n")
    assert gpus._names_cuda(tmp_path / "version.py") == has_cuda
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "torch_has_cuda", lambda: has_cuda)
    assert preferred_device() == ("cuda" if has_cuda else "cpu")


def test_the_installed_torch_is_read_right() -> None:
    import torch

    assert torch_has_cuda() == (torch.version.cuda is not None)
    assert preferred_device() == ("cuda" if torch.cuda.is_available() else "cpu")
