"""Counts what runs of the package from ``paceline train --nproc 2`` to the first committed checkpoint.

The functions that ran, over the command, the agent and the workers, are the path that a new reader has to read. Two
checkouts are compared in one call; each is run by this Python::

    python scripts/path_of_a_step.py [--other CHECKOUT] [--files]

It prints the files, their lines and the functions that ran, and how often names of ours contain the words that the
glossary replaced.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 300
OLD_WORDS = (
    *("company", "workforce", "seats", "roster", "hiring", "lanes", "lease", "standing", "seen_off", "sent_home"),
    *("view", "member", "place", "node", "job", "coordinator"),
)
COMMAND = (
    *("train", "fashion-mnist-mlp", "--nproc", "2", "--device", "cpu", "--threads", "1", "--quiet"),
    *("--max-steps", "4", "--checkpoint-every", "2steps", "--eval-every", "never"),
)

# In every process of the command: it writes each function of the package when it is first called. A forked process has
# its parent's profile function, and a file of its own.
_RECORDER = """
import inspect, os, sys, threading, time
_roots, _out = tuple(os.environ["PATH_ROOTS"].split(os.pathsep)), os.environ["PATH_OUT"]
_seen, _file = set(), [None]
def _record(frame, event, argument):
    code = frame.f_code
    if event == "call" and code not in _seen:
        _seen.add(code)
        # Neither the body of a class nor a comprehension of a module.
        if code.co_flags & inspect.CO_OPTIMIZED and code.co_qualname[0] != "<" and code.co_filename.startswith(_roots):
            if _file[0] is None:
                _file[0] = os.open(f"{_out}/{os.getpid()}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(_file[0], f"{time.time()} {code.co_filename} {code.co_qualname}\\n".encode())
def _forked():
    _file[0] = None
    _seen.clear()
os.register_at_fork(after_in_child=_forked)
threading.setprofile(_record)
sys.setprofile(_record)
"""


@dataclass(frozen=True)
class Called:
    """What ran of a package.

    Attributes:
        functions: file and name of each.
    """

    functions: frozenset[tuple[Path, str]]

    @property
    def files(self) -> list[Path]:
        """The files that hold them."""
        return sorted({path for path, _ in self.functions})


def sources(checkout: Path) -> list[Path]:
    """Return the folders that hold the packages of a checkout."""
    return [checkout / "src", *sorted(checkout.glob("plugins/*/src"))]


def trace(checkout: Path) -> Called:
    """Train on two processes, and return what ran until the first checkpoint was committed.

    Raises:
        SystemExit: the training failed, or committed none.
    """
    with tempfile.TemporaryDirectory() as name:
        directory, out, run = Path(name), Path(name) / "called", Path(name) / "run"
        out.mkdir()
        (directory / "sitecustomize.py").write_text(_RECORDER)
        roots = os.pathsep.join(map(str, sources(checkout)))
        variables = {"PYTHONPATH": f"{directory}{os.pathsep}{roots}", "PATH_ROOTS": roots, "PATH_OUT": str(out)}
        command = [sys.executable, "-m", "paceline", *COMMAND, "--run-dir", str(run)]
        ended = subprocess.run(
            command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=directory
        )
        if ended.returncode:
            raise SystemExit(f"{checkout}: exit code {ended.returncode}\n{ended.stderr}")
        manifests = [path.stat().st_mtime for path in run.glob("checkpoints/*/manifest.json")]
        if len(manifests) < 2:
            raise SystemExit(f"{checkout}: no checkpoint was committed between the steps")
        first = sorted(manifests)[1]  # checkpoint 0 holds the initial weights
        lines = [line.split(" ", 2) for file in out.iterdir() for line in file.read_text().splitlines()]
    return Called(frozenset((Path(file), name) for at, file, name in lines if float(at) <= first))


def names(path: Path) -> Iterator[str]:
    """Return the names that a file gives: of functions, classes, parameters, variables, attributes and itself."""
    yield path.stem
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def count_old_words(checkout: Path) -> Counter[str]:
    """Count the names that contain each old word, or its plural, outside ``elastic/consensus``."""
    found: Counter[str] = Counter()
    for source in sources(checkout):
        for path in source.rglob("*.py"):
            if "consensus" in path.parts:
                continue
            for name in names(path):
                words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
                found.update(word for word in OLD_WORDS if re.search(rf"(?:^|_){word}s?(?:_|$)", words))
    return found


def main() -> int:
    """Print the counts of this checkout, and of another one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, help="another checkout")
    parser.add_argument("--files", action="store_true", help="also list the files, and how many functions of each ran")
    arguments = parser.parse_args()
    checkouts = [ROOT, *([] if arguments.other is None else [arguments.other.resolve()])]
    called = [trace(checkout) for checkout in checkouts]
    for checkout, found in zip(checkouts, called, strict=True):
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in found.files)
        print(f"{checkout.name}: {len(found.files)} files, {lines:,} lines, {len(found.functions):,} functions ran")
        counts = count_old_words(checkout)
        print("  names with " + ", ".join(f"{word} {counts[word]}" for word in OLD_WORDS))
    if len(called) == 2:
        print(f"files: {len(called[0].files) / len(called[1].files):.2f} of those of {checkouts[1].name}")
    if arguments.files:
        ran = Counter(path for path, _ in called[0].functions)
        for path, count in ran.most_common():
            print(f"{count:5} {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
