"""One trained run and one package of it, for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import Processes

TASKS = Path(__file__).parent / "tasks.py"


@pytest.fixture(scope="module")
def run_directory(module_processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ``Shapes`` with checkpoints of steps 3 and 6, of which one is the best."""
    directory = tmp_path_factory.mktemp("trained") / "run"
    options = ("--max-steps", "6", "--eval-every", "3steps", "--checkpoint-every", "3steps", "--keep", "5")
    done = module_processes.paceline(
        *("train", f"{TASKS}:Shapes", *options, "--threads", "1", "--run", directory, "--quiet")
    )
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The user's registry and trusted packages, for this module alone."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_REGISTRY", str(home / "registry"))
        patch.setenv("XDG_CONFIG_HOME", str(home / "config"))
        yield home
