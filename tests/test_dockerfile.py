"""The image's recipe, read as Docker reads it: what it copies is there, and is enough to install Paceline."""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def instructions() -> list[tuple[str, str]]:
    """Each instruction and its arguments; lines that end in a backslash are one."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def copied() -> list[tuple[str, str]]:
    """Every file or directory that is copied, and where to."""
    found = []
    for name, rest in instructions():
        if name == "COPY":
            *sources, target = rest.split()
            found += [(source, target) for source in sources]
    return found


def test_what_is_copied_is_there_and_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    let_in = [line[1:].rstrip("/") for line in ignored if line.startswith("!")]
    assert copied()
    for source, _ in copied():
        assert (ROOT / source).exists()
        assert any(fnmatch.fnmatch(source, pattern) or source.startswith(f"{pattern}/") for pattern in let_in)


def test_only_known_instructions_in_an_order_that_works() -> None:
    names = [name for name, _ in instructions()]
    assert names[0] == "FROM"
    assert set(names) <= {"FROM", "ARG", "ENV", "WORKDIR", "COPY", "RUN"}
    commands = [rest for name, rest in instructions() if name == "RUN"]
    torch, lock, own = (next(i for i, c in enumerate(commands) if w in c) for w in ("torch.txt", "run.lock", " . "))
    assert torch < lock < own
    assert "--require-hashes" in commands[lock]


def test_every_package_of_the_lock_has_a_hash() -> None:
    entries = re.findall(r"^(\S+)==([^\\\n]+)((?:\\\n.*)*)", (ROOT / "requirements/run.lock").read_text(), re.MULTILINE)
    assert len(entries) > 20
    assert not [name for name, _, rest in entries if "--hash=sha256:" not in rest]


@pytest.mark.integration
def test_what_is_copied_is_enough_to_build_paceline(tmp_path: Path) -> None:
    for source, target in copied():
        place = tmp_path / target / Path(source).name if target.endswith("/") else tmp_path / target
        place.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / source, place)
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", "dist"]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    [wheel] = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert "paceline/launch/node.py" in archive.namelist()
