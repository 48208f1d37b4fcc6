"""The plugins that every run of the tests uses."""

import os
from pathlib import Path

os.environ["GIT_CEILING_DIRECTORIES"] = str(Path(__file__).parent)  # no run of a test asks git about this repository

pytest_plugins = [
    "tests.plugins.golden",
    "tests.plugins.ci_skips",
    "tests.plugins.gpu",
    "tests.plugins.layers",
    "tests.processes",
    "tests.gpu_stand_in.fixture",
]
