"""The errors of torch.distributed: which say that another rank is gone, and which have their cause in this process.

torch raises a ``DistBackendError`` for NCCL, a ``DistNetworkError`` or ``DistStoreError`` for its stores, and a bare
``RuntimeError`` for gloo; only the message tells more. One that is not known here is raised as it is: a rank that takes
its own error for another's death hides the cause.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import distributed as dist

from paceline.core.errors import ConfigError, PeerLostError

_GLOO_LOST_PEER = re.compile(
    r"^\[[^]]*/gloo/[^]]*\] .*(connection (closed|reset|refused)|socket (unexpectedly )?closed|broken pipe|"
    r"(connect|read|write) (error|timeout)|timed out (waiting|connecting)|not connected)|"
    r"^application timeout caused pair closure|^gloo connectfullmesh failed",
    re.IGNORECASE,
)
_NCCL_LOST_PEER = re.compile(
    r"remote process exited|ncclRemoteError|connection (closed|reset|refused)|Got completion from peer|"
    r"communicator was aborted|collective operation timeout|operations have failed or timed out|NCCL timeout",
    re.IGNORECASE,
)
_NCCL_OUT_OF_MEMORY = re.compile(r"out of memory|Failed to CUDA (host )?[cm]alloc")
_STORE_IS_LOCAL = re.compile(r"The server socket|EADDRINUSE")  # this rank serves it, and cannot


@contextmanager
def translate_peer_errors() -> Iterator[None]:
    """Turn torch.distributed's errors into ours; raise any other as it is.

    Raises:
        PeerLostError: a peer is gone, or has not answered in time.
        ConfigError: two ranks have one GPU, which NCCL refuses.
        torch.OutOfMemoryError: NCCL found no memory on the GPU.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if isinstance(error, dist.DistBackendError):
            _raise_own_fault(error)
            is_lost = _NCCL_LOST_PEER.search(text) is not None
        elif isinstance(error, dist.DistError):
            is_lost = _STORE_IS_LOCAL.search(text) is None
        else:
            is_lost = _GLOO_LOST_PEER.search(text) is not None
        if is_lost:
            raise PeerLostError(f"another rank is gone: {_cause(text)}") from error
        raise


def _raise_own_fault(error: dist.DistBackendError) -> None:
    """Raise an error of NCCL for which there is a better word."""
    text = str(error)
    if "Duplicate GPU detected" in text:
        raise ConfigError(
            f"two ranks have one GPU, which NCCL refuses ({_cause(text)}). Use at most as many processes as GPUs "
            "(--nproc), or --backend gloo."
        ) from error
    if _NCCL_OUT_OF_MEMORY.search(text):
        raise torch.OutOfMemoryError(f"NCCL ran out of GPU memory: {_cause(text)}") from error


def _cause(text: str) -> str:
    """Return the message without the source location in front and the advice behind, and with NCCL's last error."""
    lines = text.splitlines()
    cause = re.sub(r"^\[[^]]*\] |^NCCL error in: \S+, ", "", lines[0]).partition(". This is typically")[0]
    last = "".join(lines[lines.index("Last error:") + 1 :][:1]) if "Last error:" in lines else ""
    return f"{cause}: {last}" if last else cause
