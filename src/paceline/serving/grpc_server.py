"""The gRPC port beside the HTTP one, in the same event loop; gRPC is imported only where it is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from paceline.core.errors import ConfigError
from paceline.serving.access import AccessPolicy
from paceline.serving.app import Models
from paceline.serving.model import ServingOptions

# Else its C core prints failures that are raised anyway, and what it thinks of the start of each replica.
_QUIET = {"GRPC_VERBOSITY": "NONE", "GRPC_ENABLE_FORK_SUPPORT": "0"}


class GrpcServer:
    """A gRPC server for the models of one server. Its port is taken at once; it answers after :meth:`start`.

    Args:
        host: the address to listen on.
        port: 0 takes a free one.
        models: what is served.
        options: how.
        access: who may ask.
        is_draining: whether the server ends soon.

    Attributes:
        address: ``HOST:PORT``, as clients write it.

    Raises:
        ConfigError: it cannot listen there, or gRPC is not installed.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        models: Models,
        options: ServingOptions,
        access: AccessPolicy,
        is_draining: Callable[[], bool],
    ) -> None:
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        try:
            import grpc.aio

            from paceline.serving.grpc_service import Service
        except (ImportError, RuntimeError) as error:  # tritonclient makes one of the other
            raise ConfigError(
                f"--grpc-port takes gRPC: pip install 'paceline[grpc]' ({' '.join(str(error).split())})"
            ) from error
        self._grace_s = options.timeout_s
        self._server: Any = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),  # else a second server would share the port in silence
                ("grpc.max_receive_message_length", options.max_body_bytes),
                ("grpc.max_send_message_length", -1),
            ]
        )
        self._server.add_generic_rpc_handlers((Service(models, options, access, is_draining).handler(),))
        host = f"[{host}]" if ":" in host else host
        try:
            bound = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {host}, --grpc-port {port}: it is in use. --grpc-port 0 takes a free one."
            ) from error
        self.address = f"{host}:{bound}"

    async def start(self) -> None:
        """Answer from now on."""
        await self._server.start()

    async def close(self) -> None:
        """Take no more requests; return when those that were taken are answered."""
        await self._server.stop(self._grace_s)
