"""Forks replicas: ``python -m paceline_serving.fork_server KIND FD``; see :mod:`paceline.core.fork_server`.

A request has the replica's end of its channel. When the server has gone, its replicas see that for themselves.
"""

from __future__ import annotations

import io
import sys
import traceback
from functools import partial

from paceline.core.fork_server import run_fork_server
from paceline_serving import replica


def main(kind: str, descriptor: int) -> int:
    """Fork replicas of models of this kind; in a forked child, be one."""
    return run_fork_server(
        descriptor, partial(_preload, kind), lambda _, given: lambda: replica.main(given[0]), kill_groups=False
    )


def _preload(kind: str) -> None:
    """Import what loading a model will, much of which torch imports only when it is used."""
    try:
        if kind == "task":
            import paceline.export.formats  # noqa: F401

            return
        import torch
        from torch.export.passes import move_to_device_pass  # noqa: F401

        program = torch.export.export(torch.nn.Identity(), (torch.zeros(1),))
        stream = io.BytesIO()
        torch.export.save(program, stream)
        stream.seek(0)
        torch.export.load(stream).module()
    except Exception:
        # The replicas will say what is wrong, each for its own model.
        traceback.print_exc()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
