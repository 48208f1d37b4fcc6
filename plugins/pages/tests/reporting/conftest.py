"""Runs that the tests of reports look at; trained once, and never changed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tests.processes import Processes

TASKS = Path(__file__).with_name("tasks.py")
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="session")
def reported_runs(session_processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: ``good``, ``HOSTILE`` (trained too slowly), ``seed``, ``line``, ``small-batches``."""
    folder = tmp_path_factory.mktemp("reported")
    done = session_processes.run([sys.executable, TASKS, folder], timeout_s=250)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def numerics(request: pytest.FixtureRequest) -> Any:
    """A model that is evaluated in this process leaves torch as it was."""
    import torch

    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before
