"""The sources of Python's standard library: a real text corpus that every machine has.

Other versions of Python hold other files, so a model's bits are promised for equal ones only.
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import torch

from paceline.errors import DataError

_LEFT_OUT = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_HELD_OUT = {0: "test", 1: "val"}
_PARTS = 50


def source_files(root: Path) -> list[Path]:
    """The library's own modules below ``root``, without its tests and what was installed beside it.

    Sorted by their relative path. What a build generates about its platform is left out.
    """
    files = (path for path in root.rglob("*.py") if path.is_file())
    kept = [
        path.relative_to(root)
        for path in files
        if not _LEFT_OUT & set(path.relative_to(root).parts)
        and not path.name.startswith(("_sysconfigdata", "sitecustomize"))
    ]
    return sorted(kept, key=lambda path: path.as_posix())


def split_of(path: Path) -> str:
    """The split of a file, by a hash of its relative path: 1/50 "test", 1/50 "val", the rest "train"."""
    digest = hashlib.sha256(path.as_posix().encode()).digest()
    return _HELD_OUT.get(int.from_bytes(digest[:8], "big") % _PARTS, "train")


def load_stdlib_text(split: str, root: Path | None = None) -> torch.Tensor:
    """The files of a split, one after the other, as bytes.

    Args:
        split: "train", "val" or "test".
        root: the library's directory; default: that of the Python that runs.

    Returns:
        uint8 (N,).

    Raises:
        DataError: there are no sources, as in a Python that is packed into an archive.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    text = b"".join((root / path).read_bytes() for path in source_files(root) if split_of(path) == split)
    if not text:
        raise DataError(
            f"the {split} split of the standard library's sources is empty: {root} holds no such .py files. "
            "Use a Python that is installed with its sources."
        )
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
