"""Gives each Python process that imports torch the GPUs of ``GPU_STAND_IN``: their number, and a folder for reports."""

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path


def _activate():
    path = Path(__file__).parents[1] / "pretend.py"
    spec = importlib.util.spec_from_file_location("gpu_stand_in", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


class _AfterTorch(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        run = spec.loader.exec_module

        def run_and_activate(module):
            run(module)
            _activate()

        spec.loader.exec_module = run_and_activate
        return spec


if "GPU_STAND_IN" in os.environ:
    if "torch" in sys.modules:
        _activate()
    else:
        sys.meta_path.insert(0, _AfterTorch())
