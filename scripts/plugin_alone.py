"""Runs the tests of one plug-in where no other is installed, but for those that it may import.

There are the core, the plug-in, what the contract ``plugins`` of import-linter lets it import, what its tests need by
``[tool.paceline.tests]``, and the libraries of this environment::

    python scripts/plugin_alone.py serving [ARGUMENTS OF PYTEST]
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@cache
def _tools() -> dict[str, Any]:
    tools: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    return tools


def imported_by(plugin: str) -> set[str]:
    """Return the plug-ins that a plug-in may import."""
    [lines] = [each["ignore_imports"] for each in _tools()["importlinter"]["contracts"] if each["id"] == "plugins"]
    pairs = [[name.strip().partition(".")[0] for name in line.split("->")] for line in lines]
    return {imported.removeprefix("paceline_") for importer, imported in pairs if importer == f"paceline_{plugin}"}


def needed_by_tests(plugin: str) -> set[str]:
    """Return the plug-ins that there have to be where a plug-in's tests run, with those that these import."""
    needed: set[str] = set()
    pending = {plugin, *_tools()["paceline"]["tests"].get(plugin, ())}
    while pending:
        needed.add(name := pending.pop())
        pending |= imported_by(name) - needed
    return needed


def make_environment(folder: Path, plugins: set[str]) -> Path:
    """Make an environment with the core and these plug-ins; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    [site] = folder.glob("lib/python*/site-packages")
    # A folder of a .pth file is searched, and the .pth files in it are not read: those have all plug-ins.
    paths = [
        ROOT / "src",
        *(ROOT / "plugins" / name / "src" for name in sorted(plugins)),
        sysconfig.get_path("purelib"),
    ]
    (site / "paceline.pth").write_text("".join(f"{path}\n" for path in paths))
    return folder / "bin" / "python"


def main() -> int:
    """Run the tests."""
    plugin, *arguments = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        python = str(make_environment(Path(folder), needed_by_tests(plugin)))
        command = [python, "-m", "pytest", f"plugins/{plugin}/tests", "-p", "no:cacheprovider", *arguments]
        return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
