"""What runs on a machine before its ranks: it can keep them from starting, and choose their network."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from paceline.distributed.process import ECHO_S, STOP_SIGNALS, StopRequests, signals_handled
from paceline.distributed.tether import tethered

_FILE = "PACELINE_PREFLIGHT_FILE"


def run_before(command: Sequence[str]) -> tuple[int, str | None]:
    """Run it to its end; return its exit code, and the network interface that it has chosen, if any.

    It is asked to end by any of :data:`~paceline.distributed.process.STOP_SIGNALS`, and cleans up first: the
    exit code is then 128 + the signal's number.
    """
    requests = StopRequests(ECHO_S)
    process: subprocess.Popen[bytes] | None = None

    def stop(number: int, frame: FrameType | None) -> None:
        match requests.hear(number):
            case "first" if process is not None:
                process.terminate()
            case "end" if process is not None:
                process.kill()

    with (
        signals_handled(STOP_SIGNALS, stop),
        tempfile.TemporaryDirectory(prefix="paceline-preflight-") as directory,
    ):
        file = Path(directory) / "interface"
        process = subprocess.Popen(tethered(command), env={**os.environ, _FILE: str(file)})
        if requests.first is not None:
            process.terminate()
        code = process.wait()
        if requests.first is not None:
            code = 128 + requests.first
        return code, file.read_text() if file.exists() else None


def choose_interface(name: str) -> bool:
    """In such a program: have the ranks use this interface; False where nothing waits for the choice."""
    if _FILE not in os.environ:
        return False
    Path(os.environ[_FILE]).write_text(name)
    return True
