"""Ctrl-C while the command line starts, and while it imports what a command needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.cold]

INTERRUPTED = """
import os, runpy, signal, sys

def hook(event, arguments):
    if event == "import" and arguments[0] == MODULE:
        os.kill(os.getpid(), signal.SIGINT)

MODULE = sys.argv.pop(1)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.addaudithook(hook)
runpy.run_module("paceline", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("module", ["paceline.core.environment", "paceline.cli", "cyclopts"])
def test_ctrl_c_while_it_imports_prints_nothing(module: str) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if module != "paceline.core.environment":
        environ["PYTHONHASHSEED"] = "0"
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, module, "train", "--help"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_that_an_import_turns_into_an_error_prints_nothing(tmp_path: Path) -> None:
    """As torch's does: a part of it is missing then."""
    (tmp_path / "torch.py").write_text(
        "import os, signal\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    signal.pause()\n"
        "except BaseException:\n"
        "    print('interrupted', flush=True)\n"
        "raise AttributeError('partially initialized module')\n"
    )
    program = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    program += "runpy.run_module('paceline', run_name='__main__', alter_sys=True)"
    done = subprocess.run(
        [sys.executable, "-c", program, "export", "run"],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "interrupted\n", "")
