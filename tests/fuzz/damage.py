"""Damage to bytes, JSON documents and folders, as a seed decides."""

from __future__ import annotations

import json
import os
import random
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 2**31, 2**63, 2**70, -(2**63), 1e308, float("inf"), float("nan")),
    *("", "0", "-1", "nan", "../../etc/passwd", "\0", "\x1b]0;x\a", "\u202e", "é" * 300, "\udc80", "x" * 70_000, "="),
    *([], {}, [[]], {"": None}, [0] * 1000),
)
_MAX_NESTING = 5000


def damage_bytes(rng: random.Random, content: bytes) -> bytes:
    """Flip bits, cut, repeat, insert or replace parts."""
    damaged = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        start = rng.randrange(len(damaged) + 1)
        stop = min(len(damaged), start + rng.choice((1, 4, 64, 4096)))
        match rng.randrange(6):
            case 0 if start < len(damaged):
                damaged[start] ^= 1 << rng.randrange(8)
            case 1:
                del damaged[start:stop]
            case 2:
                del damaged[start:]
            case 3:
                damaged[start:start] = damaged[start:stop]
            case 4:
                damaged[start:start] = rng.choice((b"\0", b"\xff" * 8, b"\n", b"{", b"[" * _MAX_NESTING, b"9" * 5000))
            case _:
                damaged[start:stop] = rng.randbytes(stop - start)
    return bytes(damaged)


def damage_json(rng: random.Random, document: Any) -> Any:
    """Return a copy in which some values have another type or range, or are missing."""
    copy = json.loads(json.dumps(document))
    for _ in range(rng.choice((1, 1, 2, 4))):
        places = list(_places(copy))
        if not places:
            break
        owner, key = rng.choice(places)
        match rng.randrange(4):
            case 0:
                del owner[key]
            case 1 if isinstance(owner, dict):
                owner[str(rng.choice(ODD_VALUES))[:100]] = owner[key]
            case _:
                owner[key] = deepcopy(rng.choice(ODD_VALUES))  # which later damage may change
    return copy


def damage_file(rng: random.Random, path: Path) -> None:
    """Damage a file's bytes, one line of it as JSON, or the file as such."""
    match rng.randrange(10):
        case 0:
            path.unlink()
            _put_in_place(rng, path)
        case 1 | 2 | 3 | 4:
            path.write_bytes(_damage_line(rng, path.read_bytes()))
        case _:
            path.write_bytes(damage_bytes(rng, path.read_bytes()))


def damage_tree(rng: random.Random, root: Path) -> list[Path]:
    """Damage some files of a folder; return them."""
    files = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    chosen = rng.sample(files, min(len(files), rng.choice((1, 1, 2, 4))))
    for path in chosen:
        damage_file(rng, path)
    return chosen


def _put_in_place(rng: random.Random, path: Path) -> None:
    match rng.randrange(5):
        case 0:
            path.mkdir()
        case 1:
            os.mkfifo(path)
        case 2:
            path.symlink_to(rng.choice(("/dev/zero", "/nowhere", path.name, "..")))
        case 3:
            path.touch(mode=0)
        case _:
            pass


def _damage_line(rng: random.Random, content: bytes) -> bytes:
    lines = content.splitlines(keepends=True) or [b""]
    index = rng.randrange(len(lines))
    try:
        document = json.loads(lines[index] if rng.random() < 0.5 else content)
    except ValueError:
        return damage_bytes(rng, content)
    text = json.dumps(damage_json(rng, document)).encode("utf-8", "surrogatepass")
    if document == _parsed(content):
        return text
    lines[index] = text + b"\n"
    return b"".join(lines)


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None


def _places(document: Any) -> list[tuple[Any, Any]]:
    """Every value in a document, as its owner and its key there."""
    if isinstance(document, dict):
        entries: list[tuple[Any, Any]] = list(document.items())
    elif isinstance(document, list):
        entries = list(enumerate(document))
    else:
        return []
    found = [(document, key) for key, _ in entries]
    for _, value in entries:
        found += _places(value)
    return found


def copy_tree(source: Path, target: Path) -> None:
    """Copy a folder, in place of what is there."""
    if target.exists():
        for path in target.rglob("*"):
            if path.is_file() and not path.is_symlink() and not os.access(path, os.R_OK):
                path.chmod(0o600)
        shutil.rmtree(target)
    shutil.copytree(source, target)
