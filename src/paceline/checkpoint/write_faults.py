"""Makes writes fail as a full or broken disk would: only `paceline chaos` and tests can ask for it.

A job whose environment names a file in ``PACELINE_WRITE_FAULTS`` fails every write of a checkpoint for as
long as that file exists, with the error whose name it holds. Without the variable nothing is looked at.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

VARIABLE = "PACELINE_WRITE_FAULTS"

_ERRORS = {"enospc": errno.ENOSPC, "eio": errno.EIO}


@dataclass(frozen=True)
class WriteFaults:
    """Arms the writes of the jobs whose environment names ``file``."""

    file: Path

    @property
    def environment(self) -> dict[str, str]:
        """What to add to the job's environment."""
        return {VARIABLE: str(self.file.absolute())}

    def arm(self, kind: Literal["enospc", "eio"]) -> None:
        """From now on writes fail."""
        temporary = self.file.with_suffix(".new")
        temporary.write_text(kind)
        temporary.replace(self.file)

    def disarm(self) -> None:
        """From now on writes are done; harmless where they are."""
        self.file.unlink(missing_ok=True)


def fail_if_armed(path: Path) -> None:
    """Called before each write to ``path``.

    Raises:
        OSError: writes shall fail.
    """
    armed = os.environ.get(VARIABLE)
    if armed is None:
        return
    try:
        number = _ERRORS[Path(armed).read_text()]
    except FileNotFoundError:
        return
    raise OSError(number, os.strerror(number), str(path))
