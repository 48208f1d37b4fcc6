"""Prints how large the package is: files, lines, the largest files, and the path from a command to a checkpoint.

The path is what docs/architecture.md names under "The path of a step", from ``paceline train`` to a committed
checkpoint; the files that the page lists next to the path are not counted::

    python scripts/package_size.py [--json]
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "paceline"
PAGE, SECTION = ROOT / "docs" / "architecture.md", "## The path of a step"


def count_lines(path: Path) -> int:
    """Return the number of lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def path_of_a_step(page: str) -> list[Path]:
    """Return the files that the page names on the path of a step, in order.

    Raises:
        ValueError: the page names a file that is not there, or by a name that several files have.
    """
    section = page.split(SECTION)[1].split("\n## ")[0]
    found: dict[Path, None] = {}
    for name in re.findall(r"`([\w/]+\.py)`", section):
        candidates = [PACKAGE / name] if (PACKAGE / name).is_file() else list(PACKAGE.rglob(name))
        if len(candidates) != 1:
            raise ValueError(f"{PAGE.name} names {name}, of which the package has {len(candidates)}.")
        found[candidates[0]] = None
    return list(found)


def class_names(files: list[Path]) -> Counter[str]:
    """Count the classes of the package by name."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in files)
    return Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    as_json = parser.parse_args().json
    files = sorted(PACKAGE.rglob("*.py"))
    lines = {path: count_lines(path) for path in files}
    largest = max(files, key=lines.__getitem__)
    step = path_of_a_step(PAGE.read_text(encoding="utf-8"))
    own = ("__init__.py", "__main__.py", "py.typed", "__pycache__")
    rooms = sorted(path.name for path in PACKAGE.iterdir() if path.name not in own)
    sizes = {room: sum(n for path, n in lines.items() if path.relative_to(PACKAGE).parts[0] == room) for room in rooms}
    measured = {
        "entries": len(rooms),
        "files": len(files),
        "lines": sum(lines.values()),
        "largest_file": {"path": str(largest.relative_to(PACKAGE)), "lines": lines[largest]},
        "lines_by_room": sizes,
        "path_of_a_step": {"files": len(step), "lines": sum(lines[path] for path in step)},
        "ambiguous_class_names": sorted(name for name, number in class_names(files).items() if number > 1),
    }
    if as_json:
        print(json.dumps(measured))
        return
    for name, value in measured.items():
        print(f"{name.replace('_', ' ')}: {json.dumps(value) if isinstance(value, dict | list) else value}")


if __name__ == "__main__":
    main()
