"""What a killed mpirun leaves: its ranks, in groups of their own, that nobody else would end."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress

import psutil

from paceline.distributed.tether import adopt_orphans

_MARK = "PACELINE_STARTED_BY"


class Orphanage:
    """From now on this process becomes the parent of those below it whose own parent dies. Linux only.

    Attributes:
        mark: a variable for the environment of what is started: by it orphans are told from other children.
    """

    def __init__(self) -> None:
        self.mark = {_MARK: secrets.token_hex(8)}
        adopt_orphans()

    def close(self) -> None:
        """Kill the orphans that bear the mark, and all below them."""
        while orphans := [child for child in psutil.Process().children() if self._is_marked(child)]:
            for orphan in orphans:
                with suppress(psutil.NoSuchProcess):
                    orphan.kill()
                with suppress(ChildProcessError):
                    os.waitpid(orphan.pid, 0)
        adopt_orphans(False)

    def _is_marked(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return process.environ().get(_MARK) == self.mark[_MARK]
        return False
