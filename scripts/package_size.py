"""Prints how large the core and each plug-in are, and what a training reaches; with ``--check``, holds the budgets.

The budgets are in ``[tool.paceline.size]`` of pyproject.toml: lines of each room of the core and of each plug-in, lines
and lines of code of the core, lines of all. Only a commit that deletes elsewhere raises one, and none raises a limit of
:data:`LIMITS`. The path of a step is what docs/architecture.md names under that heading, from ``paceline train`` to a
committed checkpoint::

    python scripts/package_size.py [--check] [--json]
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "src" / "paceline"
PAGE, SECTION = ROOT / "docs" / "architecture.md", "## The path of a step"
TRAINING = (
    "cli/train.py",
    "launch/local.py",
    "training/worker.py",
    "parallel/strategy.py",
)
"""A training on two processes: the command, and what it names in text, not by an import."""

LIMITS = {"core": 55_000, "core, code": 33_000, "a training, files": 110}
"""What no budget may exceed."""

BARS = {"all": 82_000, "a training, lines": 28_000}
"""What the project has not reached."""

OPTIONAL = (
    *("parallel/fsdp.py", "parallel/tensor_parallel.py", "parallel/tp_autoplan.py", "parallel/pipeline/"),
    "elastic/consensus/",
)
"""What a training imports for some options only: other strategies, several nodes."""


@cache
def lines_of(path: Path) -> list[str]:
    """Return the lines of a file."""
    return path.read_text(encoding="utf-8").splitlines()


def code_lines(path: Path) -> int:
    """Count the lines of a file without those that are blank, comments or docstrings."""
    skipped: set[int] = set()
    for node in ast.walk(ast.parse("\n".join(lines_of(path)))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            skipped |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and number not in skipped
        for number, line in enumerate(lines_of(path), 1)
    )


def imported(path: Path) -> Iterator[Path]:
    """Yield the files of the core that a file imports when it runs, at its top or inside functions."""
    pending: list[ast.AST] = [ast.parse("\n".join(lines_of(path)))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        pending += ast.iter_child_nodes(node)
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            file = CORE.parent / f"{name.replace('.', '/')}.py"
            if name.startswith("paceline.") and file.is_file():
                yield file


def reached() -> set[Path]:
    """Return the files that a training on two processes can reach, without optional strategies."""
    found: set[Path] = set()
    pending = [CORE / name for name in TRAINING]
    while pending:
        path = pending.pop()
        if path in found or str(path.relative_to(CORE)).startswith(OPTIONAL):
            continue
        found.add(path)
        pending += imported(path)
    return found


def path_of_a_step(page: str) -> list[Path]:
    """Return the files that the page names on the path of a step, in order.

    Raises:
        ValueError: the page names a file that is not there, or by a name that several files have.
    """
    section = page.split(SECTION)[1].split("\n## ")[0]
    found: dict[Path, None] = {}
    for name in re.findall(r"`([\w/]+\.py)`", section):
        candidates = [CORE / name] if (CORE / name).is_file() else list(CORE.rglob(name))
        if len(candidates) != 1:
            raise ValueError(f"{PAGE.name} names {name}, of which the core has {len(candidates)}.")
        found[candidates[0]] = None
    return list(found)


@cache
def repeated_classes() -> list[str]:
    """Return the names that several classes have, in the core and in plug-ins."""
    files = [*CORE.rglob("*.py"), *(ROOT / "plugins").glob("*/src/**/*.py")]
    trees = (ast.parse("\n".join(lines_of(path))) for path in files)
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return sorted(name for name, number in names.items() if number > 1)


def measure() -> dict[str, int]:
    """Return all sizes, by the names that budgets have: rooms of the core, plug-ins, totals."""
    core = sorted(CORE.rglob("*.py"))
    sizes: Counter[str] = Counter()
    for path in core:
        sizes[f"core/{path.relative_to(CORE).parts[0].removesuffix('.py')}"] += len(lines_of(path))
    for plugin in sorted((ROOT / "plugins").glob("*/src")):
        sizes[f"plugins/{plugin.parent.name}"] = sum(len(lines_of(path)) for path in plugin.rglob("*.py"))
    training, step = reached(), path_of_a_step(PAGE.read_text(encoding="utf-8"))
    return {
        **sizes,
        "core": sum(len(lines_of(path)) for path in core),
        "core, code": sum(map(code_lines, core)),
        "all": sum(sizes.values()),
        "a training, files": len(training),
        "a training, lines": sum(len(lines_of(path)) for path in training),
        "path of a step, lines": sum(len(lines_of(path)) for path in step),
        "repeated class names": len(repeated_classes()),
    }


def main() -> int:
    """Measure, print, and compare with the budgets."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--check", action="store_true", help="print what exceeds its budget, and exit with 1")
    arguments = parser.parse_args()
    sizes = measure()
    if arguments.json:
        print(json.dumps({**sizes, "repeated_classes": repeated_classes()}))
    elif not arguments.check:
        for name, size in sizes.items():
            print(f"{size:8,}  {name}")
        print(f"repeated class names: {', '.join(repeated_classes()) or 'none'}")
        for name, bar in BARS.items():
            if sizes[name] > bar:
                print(f"not reached: {name}, {sizes[name]:,} of {bar:,}")
    if not arguments.check:
        return 0
    budgets = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["paceline"]["size"]
    problems = [f"{name} has no budget" for name in sizes if name not in budgets]
    problems += [f"there is no {name}" for name in budgets if name not in sizes]
    problems += [
        f"{name}: {sizes[name]:,}, above the limit of {limit:,}, which no budget raises"
        for name, limit in LIMITS.items()
        if sizes[name] > limit
    ]
    problems += [
        f"{name}: {size:,}, above its budget of {budgets[name]:,}"
        for name, size in sizes.items()
        if size > budgets.get(name, size)
    ]
    plugins = re.compile(rf"\b({'|'.join(path.name for path in (ROOT / 'plugins').glob('*/src/*'))})\b")
    problems += [
        f"{path.relative_to(ROOT)}:{number} names the plug-in {found[0]}; only built_in.py may"
        for path in sorted(CORE.rglob("*.py"))
        if path.name != "built_in.py"
        for number, line in enumerate(lines_of(path), 1)
        if (found := plugins.search(line))
    ]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
