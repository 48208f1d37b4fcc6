"""The peers by name: which package each needs, and where its loop is; imports none of them."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.insight.bench.machine import installed_version

INSTALL = "pip install 'paceline[bench]'"
"""The command that installs every peer."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Somebody who can do the work.

    Attributes:
        name: what ``--peers`` takes.
        title: for people.
        module: where its ``train(job)`` is; None for Paceline, which is started as a user starts it.
        package: the distribution it needs.
        reduction: Paceline's ``--reduction``.
    """

    name: str
    title: str
    module: str | None = None
    package: str = "torch"
    reduction: str | None = None

    @property
    def version(self) -> str | None:
        """The version of its package that is installed, or None."""
        return installed_version(self.package)


PEERS = {
    peer.name: peer
    for peer in (
        Peer(name="ddp", title="hand-written DDP loop", module="paceline.insight.bench.peers.ddp"),
        Peer(
            name="accelerate",
            title="Accelerate",
            module="paceline.insight.bench.peers.accelerate",
            package="accelerate",
        ),
        Peer(
            name="lightning",
            title="Lightning",
            module="paceline.insight.bench.peers.lightning",
            package="lightning",
        ),
        Peer(name="paceline-exact", title="Paceline, exact (default)", reduction="exact"),
        Peer(name="paceline-fast", title="Paceline, fast", reduction="allreduce"),
        Peer(name="paceline-torch", title="Paceline, torch", reduction="ddp"),
    )
}
