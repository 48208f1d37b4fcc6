"""A replica as Ray Serve runs it: one model, one batch at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.serving.replica import load_warm
from paceline.serving.servable import Array

NAMESPACE = "paceline"
"""Where a server's anchor is found."""


class Anchor:
    """An actor that does nothing: Ray ends it with the server that made it."""


class Replica:
    """What Ray Serve makes an actor of.

    Its methods are coroutines that never wait: so all of them, and the constructor, run in one thread. Torch
    keeps the number of threads and "no gradients" by thread; and a batch is computed after the other.
    """

    def __init__(self, header: Mapping[str, Any], application: str, anchor: str | None) -> None:
        """Load the model that ``header`` describes, as a replica's process is told it.

        Args:
            header: what :func:`~paceline.serving.replica.load_warm` takes.
            application: of Ray Serve, that this replica belongs to.
            anchor: the name of an actor that lives as long as the server; None in a cluster of the server's
                own, which ends with it, and which nobody on another machine is to reach.
        """
        self._application = application
        self._anchor = anchor
        if anchor is None:
            _stay_on_loopback()
        self._servable = load_warm(header)

    async def predict(self, inputs: Mapping[str, Array]) -> tuple[dict[str, Array], str | None]:
        """A batch's outputs, or what the model said instead; an exception would be Ray's own."""
        try:
            # Ray shows large arrays where they lie, read-only; torch warns of such.
            writable = {name: np.require(array, None, "W") for name, array in inputs.items()}
            return self._servable.predict(writable), None
        except Exception as error:
            return {}, f"{type(error).__name__}: {error}"

    async def check_health(self) -> None:
        """Answer; Ray Serve replaces a replica that does not, be it because it computes for too long.

        Where the server is gone, however it ended, take its application out of the cluster.
        """
        if self._anchor is None:
            return
        import ray
        from ray import serve

        try:
            ray.get_actor(self._anchor, namespace=NAMESPACE)
        except ValueError:
            serve.delete(self._application, _blocking=False)


def _stay_on_loopback() -> None:
    """Ray Serve, 2.60, would have each replica listen on every interface for calls of other deployments."""
    from ray.serve._private import replica

    listen = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: listen(
        server, address.replace("[::]", "127.0.0.1")
    )
