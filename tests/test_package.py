"""The package as it is installed: its names, its types, and what importing it costs."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.resources
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline.core import built_in
from paceline.core.built_in import NAMES

EXPORTED = [
    "BatchInfo",
    "Callback",
    "CheckpointError",
    "CheckpointWriteError",
    "ConfigError",
    "DataError",
    "Defaults",
    "ExportError",
    "HangError",
    "InferenceSignature",
    "LaunchError",
    "Loss",
    "NonFiniteLossError",
    "NondeterminismError",
    "PacelineError",
    "PackageError",
    "PeerLostError",
    "PurityError",
    "RankInfo",
    "Result",
    "RunDirectoryError",
    "RunDirectoryWriteError",
    "RunInUseError",
    "RunSchedule",
    "ServingError",
    "SilentDataCorruptionError",
    "StopRequested",
    "Task",
    "TaskError",
    "TensorSpec",
    "TrainStep",
    "UntrustedError",
    "UserError",
    "__version__",
    "fit",
    "load",
]
COMMANDS = [
    "train",
    "resume",
    "runs",
    "dashboard",
    "logs",
    "audit",
    "report",
    "checkpoint",
    "bench",
    "version",
]


LISTING = """
import atexit, runpy, sys
atexit.register(lambda: print(*sys.modules, sep="\\n", file=sys.stderr))
"""


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60)


def modules_imported_by(code: str) -> set[str]:
    """What is in ``sys.modules`` when a fresh interpreter has run the code."""
    finished = run_python("-c", f"{LISTING}\n{code}")
    assert finished.returncode == 0, finished.stderr[-2000:]
    return set(finished.stderr.split())


def test_exported_names() -> None:
    assert sorted(paceline.__all__) == EXPORTED
    assert set(EXPORTED) <= set(dir(paceline))


@pytest.mark.parametrize("name", [*EXPORTED, *NAMES])
def test_each_exported_name_is_there(name: str) -> None:
    assert getattr(paceline, name) is not None


def test_type_checkers_see_every_exported_name() -> None:
    source = Path(paceline.__file__).read_text(encoding="utf-8")
    imported = {
        alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline")
        for alias in node.names
    }
    assert imported - {"NAMES"} == {*EXPORTED, *NAMES} - {"__version__"}


def test_every_deliberate_error_is_exported() -> None:
    from paceline.core import errors

    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.PacelineError)
    }
    assert defined <= set(paceline.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'fitt'"):
        _ = paceline.fitt


def test_version_is_the_installed_one() -> None:
    assert importlib.metadata.version("paceline") == paceline.__version__


def test_package_is_typed() -> None:
    assert importlib.resources.files("paceline").joinpath("py.typed").is_file()


@pytest.mark.integration
@pytest.mark.cold
def test_import_is_light() -> None:
    imported = modules_imported_by("import paceline")
    assert "paceline" in imported
    assert not imported & {"torch", "numpy", "rich", "cyclopts", "paceline.api"}


@pytest.mark.integration
@pytest.mark.cold
def test_names_of_the_user_interface_need_no_torch() -> None:
    imported = modules_imported_by("from paceline import Defaults, Loss, Task, TaskError")
    assert "paceline.core.task" in imported
    assert "torch" not in imported


@pytest.mark.integration
@pytest.mark.cold
@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["version", "--help"]], ids=" ".join)
def test_help_imports_no_torch(arguments: list[str]) -> None:
    command = f"sys.argv[1:] = {arguments}; runpy.run_module('paceline', run_name='__main__')"
    imported = modules_imported_by(command)
    assert "paceline.cli" in imported
    assert not imported & {"torch", "numpy", "tensorboard"}


@pytest.mark.integration
@pytest.mark.cold
@pytest.mark.parametrize("command", ["train", "resume", "launch", "tune"])
def test_help_imports_nothing_that_starts_processes(command: str) -> None:
    words = ["paceline", *command.split(), "--help"]
    imported = modules_imported_by(f"sys.argv[:] = {words}; runpy.run_module('paceline', run_name='__main__')")
    assert built_in.COMMANDS[command].reference.partition(":")[0] in imported
    assert not imported & {
        "psutil",
        "paceline.launch.local_run",
        "paceline.launch.submit",
        "paceline.launch.supervisor",
        "paceline.runs.directory",
        "paceline.core.task",
    }


@pytest.mark.integration
def test_help_lists_every_command() -> None:
    finished = run_python("-m", "paceline", "--help")
    assert finished.returncode == 0, finished.stderr
    words = finished.stdout.split()
    assert [command for command in COMMANDS if command not in words] == []
