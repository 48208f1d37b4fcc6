"""What runs on a machine before its ranks: it can keep them from starting, and choose their network."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from paceline.distributed.tether import tethered

_FILE = "PACELINE_PREFLIGHT_FILE"


def run_before(command: Sequence[str]) -> tuple[int, str | None]:
    """Run it to its end; return its exit code, and the network interface that it has chosen, if any."""
    with tempfile.TemporaryDirectory(prefix="paceline-preflight-") as directory:
        file = Path(directory) / "interface"
        code = subprocess.run(tethered(command), env={**os.environ, _FILE: str(file)}).returncode
        return code, file.read_text() if file.exists() else None


def choose_interface(name: str) -> bool:
    """In such a program: have the ranks use this interface; False where nothing waits for the choice."""
    if _FILE not in os.environ:
        return False
    Path(os.environ[_FILE]).write_text(name)
    return True
