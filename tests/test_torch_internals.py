"""One file has all names of torch that torch does not promise to keep, and each of them is there."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed import ProcessGroup, ProcessGroupGloo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import paceline
from paceline import torch_internals

SOURCE = Path(paceline.__file__).parent
TASK = f"{Path(__file__).parent}/training/tasks.py:Points"
OF_OBJECTS = {
    name
    for owner in (
        *(nn.Module(), torch.Tensor, DTensor, GradScaler, Optimizer, FSDPModule),
        *(DeviceMesh, ProcessGroup, ProcessGroupGloo, type(torch.ops.aten.mm.default)),
    )
    for name in dir(owner)
    if name.startswith("_") and not name.startswith("__")
}


def is_private(dotted: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in dotted.split("."))


def private_names(tree: ast.AST) -> Iterator[str]:
    """Every use of a private name of torch that a file makes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (
                alias.name for alias in node.names if alias.name.startswith("torch.") and is_private(alias.name)
            )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (name for each in node.names if is_private(name := f"{node.module}.{each.name}"))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            written = ast.unparse(node)
            if written.startswith(("torch.", "nn.", "dist.", "optim.")) or (
                node.attr in OF_OBJECTS and not written.startswith(("self._", "cls._"))
            ):
                yield written
        elif (
            isinstance(node, ast.Constant)
            and re.fullmatch(r"torch(\.\w+)*", str(node.value))
            and is_private(node.value)
        ):
            yield node.value


@pytest.mark.integration  # it reads every file
def test_other_files_use_no_private_name_of_torch() -> None:
    found = {
        f"{path.relative_to(SOURCE)}: {name}"
        for path in SOURCE.rglob("*.py")
        if path.name != "torch_internals.py"
        for name in private_names(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == set()


@pytest.mark.parametrize(
    "line",
    [
        "import torch._inductor.config",
        "from torch.utils._pytree import tree_leaves",
        "from torch.distributed.distributed_c10d import _world",
        "torch._foreach_add_(a, b)",
        "module._buffers",
        "mesh._flatten('a')",
        "super()._unscale_grads_(a)",
    ],
)
def test_a_private_name_is_found(line: str) -> None:
    assert list(private_names(ast.parse(line)))


@pytest.mark.parametrize("name", sorted(torch_internals._ON_USE))
def test_what_is_imported_on_use_is_there(name: str) -> None:
    assert callable(getattr(torch_internals, name))


def test_another_name_is_not() -> None:
    with pytest.raises(AttributeError, match="no attribute 'FakeStorage'"):
        _ = torch_internals.FakeStorage


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.14.1+cu130"])
def test_nothing_is_said_of_a_tested_release(version: str) -> None:
    assert torch_internals.describe_untested(version) is None


@pytest.mark.parametrize("version", ["2.15.0", "2.100.0a0+git1", "3.0.0.dev1"])
def test_a_newer_release_is_named(version: str) -> None:
    said = f"torch {version} is newer than those that Paceline is tested with (2.11 to 2.14)"
    assert torch_internals.describe_untested(version) == said


WITH_A_NEWER_TORCH = """
import sys
import torch
torch.__version__ = "2.99.0"
from paceline.__main__ import main
sys.exit(main())
"""


def test_a_run_says_once_that_its_torch_is_newer(run_processes: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITH_A_NEWER_TORCH, "train", TASK, "--max-steps", "1"]
    done = run_processes.run([*command, "--nproc", "1", "--threads", "1", "--run-dir", tmp_path / "run"])
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("torch 2.99.0 is newer than those that Paceline is tested with") == 1


def test_messages_of_a_group_of_its_own_are_joined_as_its_class_takes_it() -> None:
    group = torch_internals.gloo_group(
        dist.HashStore(), 0, 1, timedelta(seconds=10), hostname="127.0.0.1", interface=None
    )
    for join in (torch_internals.start_coalescing, torch_internals.end_coalescing):
        with pytest.raises(RuntimeError, match="does not implement"):  # NCCL's class has the same base
            join(group)
