"""One trained run and one package of it, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.processes import Processes

from paceline.export.export import ExportRequest, export
from paceline.runs.package import Package
from paceline.runs.package_registry import Registry

TASKS = Path(__file__).parent / "tasks.py"


@pytest.fixture(scope="session")
def run_directory(session_processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ``Shapes`` with checkpoints of steps 3 and 6, of which one is the best."""
    directory = tmp_path_factory.mktemp("trained") / "run"
    options = ("--max-steps", "6", "--eval-every", "3steps", "--checkpoint-every", "3steps", "--keep-checkpoints", "5")
    done = session_processes.paceline(
        *("train", f"{TASKS}:Shapes", *options, "--threads", "1", "--run-dir", directory, "--quiet")
    )
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture(scope="session")
def _home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def home(_home: Path) -> Iterator[Path]:
    """The user's registry and trusted packages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_REGISTRY", str(_home / "registry"))
        patch.setenv("XDG_CONFIG_HOME", str(_home / "config"))
        yield _home


@pytest.fixture(scope="session")
def _exported(run_directory: Path, _home: Path) -> Package:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_REGISTRY", str(_home / "registry"))
        patch.setenv("XDG_CONFIG_HOME", str(_home / "config"))
        request = ExportRequest(run=run_directory, formats=("safetensors", "pt2", "onnx"), tag="prod")
        exported, reference = export(request, Registry.of_user())
    assert str(reference) == "shapes@prod"
    return exported


@pytest.fixture
def package(_exported: Package, home: Path) -> Package:
    """In every format."""
    return _exported
