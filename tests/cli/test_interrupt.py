"""Ctrl-C while the command line starts."""

from __future__ import annotations

import os
import subprocess
import sys

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


@pytest.mark.parametrize("module", ["paceline.core.hash_seed", "paceline.cli", "cyclopts"])
def test_ctrl_c_while_it_imports_prints_nothing(module: str) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if module != "paceline.core.hash_seed":
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
