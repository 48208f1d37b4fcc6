"""The errors of torch.distributed, and which of them say that another rank is gone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed as dist

from paceline.core.errors import PeerLostError

_LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|closed by peer|socket closed|broken pipe|pair closure|"
    r"timed out waiting|connect timeout|remote process exited|communicator was aborted|failed to (recv|send)",
    re.IGNORECASE,
)


@contextmanager
def translate_peer_errors() -> Iterator[None]:
    """Turn torch.distributed's errors for a lost peer into a :class:`PeerLostError`."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or _LOST_PEER.search(str(error)):
            # Strip the source location in front and the advice behind.
            cause = re.sub(r"^\[[^]]*\] ", "", str(error).splitlines()[0]).partition(". This is typically")[0]
            raise PeerLostError(f"another rank is gone: {cause}") from error
        raise
