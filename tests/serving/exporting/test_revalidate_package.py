"""``paceline revalidate PACKAGE``: the evaluation of the export again, and the programs beside the weights."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from tests.serving.exporting.conftest import TASKS

from paceline.cli.revalidate import revalidate
from paceline.core.errors import ConfigError, PackageError
from paceline.runs.package import Package
from paceline.runs.package_registry import Registry
from paceline.serving.export import ExportRequest, export


def test_a_packages_numbers_are_checked(
    package: Package, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert revalidate(Path("shapes@prod"), json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert {(n["split"], n["name"], n["finding"]) for n in found["numbers"]} == {
        ("test", "accuracy", "same"),
        ("test", "loss", "same"),
    }
    assert found["weights_hold"] is True
    assert {program["format"]: program["problem"] for program in found["programs"]} == {
        "pt2": None,
        "onnx": None,
    }
    # Somebody else names the code, or is told to; the program that is not trusted is left out.
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(PackageError, match="you have not trusted this package"):
        revalidate(package.path)
    assert revalidate(package.path, task=f"{TASKS}:Shapes") == 0
    assert "The pt2 program was not run" in capsys.readouterr().out
    assert revalidate(package.path, trust=True) == 0
    assert "The pt2 program differs from the weights by at most" in capsys.readouterr().out


def test_quantized_numbers_are_those_of_the_quantized_weights(
    run_directory: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = ExportRequest(
        run=run_directory, formats=("safetensors",), quantization="int8", tag="small", tolerance=0.05
    )
    quantized, _ = export(request, Registry.of_user())
    assert revalidate(quantized.path, json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert {n["finding"] for n in found["numbers"]} == {"same"}
    (loss,) = [n["now"] for n in found["numbers"] if n["name"] == "loss"]
    assert loss != quantized.manifest.metrics["loss"]
    assert f"{loss:.6g}" in quantized.read("README.md").decode()


def test_a_number_of_a_package_that_does_not_hold(
    package: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(package.path, copy)
    manifest = dataclasses.replace(package.manifest, metrics={"accuracy": 2.0, "loss": 0.0})
    (copy / "manifest.json").write_bytes(manifest.to_bytes())
    assert revalidate(copy, task=f"{TASKS}:Shapes") == 1
    assert "does not hold: 2 of 2 metrics differ, 0 of 2 programs." in capsys.readouterr().out
    with (copy / "weights.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    with pytest.raises(PackageError, match=r"weights\.safetensors"):
        revalidate(copy, task=f"{TASKS}:Shapes")


def test_options_of_packages_are_not_for_runs(run_directory: Path) -> None:
    with pytest.raises(ConfigError, match="are for packages"):
        revalidate(run_directory, trust=True)
