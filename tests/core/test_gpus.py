"""How many GPUs a process sees, without torch."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.core import environment
from paceline.core.environment import preferred_device, torch_has_cuda, visible_gpus


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A node with four GPUs; returns the directory of their device files."""
    folder, devices = tmp_path / "gpus", tmp_path / "dev"
    devices.mkdir()
    for minor in range(4):
        gpu = folder / f"0000:0{minor + 1}:00.0"
        gpu.mkdir(parents=True)
        text = f"Model: \t\t NVIDIA H100 80GB HBM3\nBus Type: \t PCIe\nDevice Minor: \t {minor}\nGPU Excluded:\t No\n"
        (gpu / "information").write_text(text)
        (devices / f"nvidia{minor}").touch()
    monkeypatch.setattr(environment, "_NVIDIA_GPUS", folder)
    monkeypatch.setattr(environment, "_DEVICES", devices)
    environment._installed_gpus.cache_clear()
    yield devices
    environment._installed_gpus.cache_clear()


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
    monkeypatch.setattr(environment, "_NVIDIA_GPUS", tmp_path / "none")
    monkeypatch.setattr(environment, "_NVML", "libnothing.so.1")
    environment._installed_gpus.cache_clear()
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}) == 0
    environment._installed_gpus.cache_clear()


def test_a_container_has_the_gpus_that_it_was_given(four_gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for minor in (0, 1, 3):
        (four_gpus / f"nvidia{minor}").unlink()
    assert visible_gpus({}) == 1
    (four_gpus / "nvidia2").unlink()
    monkeypatch.setattr(environment, "_NVML", "libnothing.so.1")
    environment._installed_gpus.cache_clear()
    assert visible_gpus({}) == 0


@pytest.mark.integration
@pytest.mark.parametrize("has_driver_s_files", [False, True])
def test_without_device_files_nvidia_s_library_counts(
    has_driver_s_files: bool, four_gpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for device in four_gpus.iterdir():
        device.unlink()
    source = tmp_path / "nvml.c"
    source.write_text(
        "int nvmlInit_v2(void) { return 0; }\n"
        "int nvmlShutdown(void) { return 0; }\n"
        "int nvmlDeviceGetCount_v2(unsigned *count) { *count = 3; return 0; }\n"
    )
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", "-o", tmp_path / "nvml.so", source], check=True)
    if not has_driver_s_files:
        monkeypatch.setattr(environment, "_NVIDIA_GPUS", tmp_path / "none")
    monkeypatch.setattr(environment, "_NVML", str(tmp_path / "nvml.so"))
    assert visible_gpus({}) == 3


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(("line", "has_cuda"), [("cuda: Optional[str] = '13.0'", True), ("cuda = None", False)])
def test_auto_needs_a_torch_for_cuda(
    line: str, has_cuda: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '2.99'\n{line}\nhip: Optional[str] = None\n")
    assert environment._names_cuda(tmp_path / "version.py") == has_cuda
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(environment, "torch_has_cuda", lambda: has_cuda)
    assert preferred_device() == ("cuda" if has_cuda else "cpu")


def test_the_installed_torch_is_read_right() -> None:
    import torch

    assert torch_has_cuda() == (torch.version.cuda is not None)
    assert preferred_device() == ("cuda" if torch.cuda.is_available() else "cpu")
