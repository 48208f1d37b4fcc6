"""What a plug-in's tests import is there where only the core and what it may import are installed."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PLUGINS = sorted(path.name for path in (ROOT / "plugins").iterdir() if (path / "tests").is_dir())
SHARED = ("tests", "plugins", "benchmarks")


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("plugin_alone", ROOT / "scripts" / "plugin_alone.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def imported_modules(path: Path, everywhere: bool) -> tuple[str, ...]:
    """The modules that a file names in imports, also in functions if ``everywhere``, and its programs."""
    return tuple(_named_modules(path, everywhere))


def _named_modules(path: Path, everywhere: bool) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree) if everywhere else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith(".py"):
            for program in (path.parent / node.value, ROOT / node.value):
                if "\n" not in node.value and program.is_file() and program.is_relative_to(ROOT):
                    yield ".".join(program.relative_to(ROOT).with_suffix("").parts)


def imported_plugins(plugin: str) -> dict[str, Path]:
    """The plug-ins that a plug-in's tests import, by the modules that they share with others, too; and one importer."""
    own = set((ROOT / "plugins" / plugin / "tests").rglob("*.py"))
    pending, seen, found = list(own), set(own), {}
    while pending:
        path = pending.pop()
        # What another's tests import in a function is for a case of their own.
        for name in imported_modules(path, everywhere=path in own):
            package = name.partition(".")[0]
            file = ROOT / f"{name.replace('.', '/')}.py"
            if package in SHARED and file.is_file() and file not in seen:
                seen.add(file)
                pending.append(file)
            elif package.startswith("paceline_"):
                found.setdefault(package.removeprefix("paceline_"), path)
    return found


@pytest.mark.parametrize("plugin", PLUGINS)
def test_the_tests_of_a_plugin_import_what_is_there_when_it_is_alone(script: Any, plugin: str) -> None:
    there = script.needed_by_tests(plugin)
    assert {name: path for name, path in imported_plugins(plugin).items() if name not in there} == {}


@pytest.mark.integration
def test_nothing_else_is_installed(script: Any, tmp_path: Path) -> None:
    python = script.make_environment(tmp_path, {"trackers"})
    code = "import sys; from importlib.util import find_spec; print([name for name in sys.argv[1:] if find_spec(name)])"
    packages = ["paceline", *(f"paceline_{name}" for name in PLUGINS)]
    done = subprocess.run([python, "-P", "-c", code, *packages], capture_output=True, text=True, check=True)
    assert done.stdout == "['paceline', 'paceline_trackers']\n"


@pytest.mark.integration
def test_the_tests_of_one_plugin_are_collected() -> None:
    command = [sys.executable, ROOT / "scripts" / "plugin_alone.py", "trackers", "--collect-only", "-q"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "plugins/trackers/tests/test_trackers.py::" in done.stdout
