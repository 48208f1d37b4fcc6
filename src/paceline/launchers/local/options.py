"""What ``--on spawn`` and ``--on torchrun`` can be asked for."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.launchers.names import option


@dataclass(frozen=True, kw_only=True)
class MeetingOptions:
    """Where several machines meet; the same command is given on each."""

    node_rank: int | None = option("This machine's number, 0 to nodes - 1.")
    rdzv_endpoint: str | None = option("HOST:PORT of machine 0, where several machines meet.")
    rdzv_id: str = option("A name that all machines of one job share.", "paceline")


@dataclass(frozen=True, kw_only=True)
class TorchrunOptions(MeetingOptions):
    """What torchrun can do besides."""

    rdzv_backend: str = option(
        "How agents on several machines meet: c10d, or static with fixed ranks.", "c10d"
    )
    local_rank_argument: bool = option(
        "Give each script --local-rank=N, as torch.distributed.launch did without --use-env.", False
    )
