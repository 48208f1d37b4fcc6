"""``paceline report --check PACKAGE``: the evaluation of the export again, and the programs beside the weights."""

from __future__ import annotations

import dataclasses
import json
import shutil
from functools import partial
from pathlib import Path

import pytest
from tests.export.conftest import TASKS
from tests.processes import Processes

from paceline.core.errors import PackageError
from paceline.export.export import ExportRequest, export
from paceline.runs.package import Package
from paceline.runs.package_registry import Registry
from paceline_pages.report_command import report

check = partial(report, check=True)


def test_a_packages_numbers_are_checked(
    package: Package, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert check([Path("shapes@prod")], json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert {each["name"]: each["verdict"] for each in found["findings"]} == {
        **dict.fromkeys(("test.accuracy", "test.loss", "weights"), "bitwise equal"),
        **dict.fromkeys(("pt2 program", "onnx program"), "as close to the weights"),
    }
    # Somebody else names the code, or is told to; the program that is not trusted is left out.
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(PackageError, match="you have not trusted this package"):
        check([package.path])
    assert check([package.path], task=f"{TASKS}:Shapes") == 0
    assert "not run, because it is not trusted" in capsys.readouterr().out
    assert check([package.path], trust=True) == 0
    assert "as close to the weights" in capsys.readouterr().out


def test_quantized_numbers_are_those_of_the_quantized_weights(
    run_directory: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = ExportRequest(
        run=run_directory, formats=("safetensors",), quantization="int8", tag="small", tolerance=0.05
    )
    quantized, _ = export(request, Registry.of_user())
    assert check([quantized.path], json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert {each["verdict"] for each in found["findings"]} == {"bitwise equal"}
    (loss,) = [each["now"] for each in found["findings"] if each["name"] == "test.loss"]
    assert loss != quantized.manifest.metrics["loss"]
    assert f"{loss:.6g}" in quantized.read("README.md").decode()


def test_a_run_with_adapters_was_evaluated_with_the_merged_model(
    run_processes: Processes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--lora", "rank=2,target=4", "--max-steps", "3", "--threads", "1", "--quiet")
    done = run_processes.paceline("train", f"{TASKS}:Shapes", *options, "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert check([tmp_path / "run"]) == 0, capsys.readouterr().out


def test_a_number_of_a_package_that_does_not_hold(
    package: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(package.path, copy)
    manifest = dataclasses.replace(package.manifest, metrics={"accuracy": 2.0, "loss": 0.0})
    (copy / "manifest.json").write_bytes(manifest.to_bytes())
    assert check([copy], task=f"{TASKS}:Shapes") == 1
    assert "does not hold: 2 of 5 differ." in capsys.readouterr().out
    with (copy / "weights.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    with pytest.raises(PackageError, match=r"weights\.safetensors"):
        check([copy], task=f"{TASKS}:Shapes")
