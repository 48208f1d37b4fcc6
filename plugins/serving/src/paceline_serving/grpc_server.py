"""The optional gRPC port, in the event loop of the HTTP server; gRPC is imported only if it is used."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.plugins import install_command
from paceline_serving.access import AccessPolicy
from paceline_serving.app import Models
from paceline_serving.model import ServingOptions

# Otherwise its C core prints failures that are raised anyway, and warnings at each start of a replica.
_QUIET = {"GRPC_VERBOSITY": "NONE", "GRPC_ENABLE_FORK_SUPPORT": "0"}


class GrpcServer:
    """A gRPC server for the models of one server, which takes its port at once and answers after :meth:`start`.

    Args:
        port: 0 picks a free one.
        is_draining: whether the server will end soon.

    Attributes:
        address: ``HOST:PORT``, as clients write it.

    Raises:
        ConfigError: it cannot listen there, or gRPC is not installed.
    """

    def __init__(
        self,
        host: str,
        port: int,
        models: Models,
        options: ServingOptions,
        access: AccessPolicy,
        is_draining: Callable[[], bool],
    ) -> None:
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        try:
            import grpc.aio

            from paceline_serving.grpc_service import Service
        except (ImportError, RuntimeError) as error:  # tritonclient converts one into the other
            raise ConfigError(
                f"--grpc-port needs gRPC: {install_command('grpc')} ({' '.join(str(error).split())})"
            ) from error
        self._grace_s = options.timeout_s
        self._server: Any = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),  # otherwise a second server would silently share the port
                ("grpc.max_receive_message_length", options.max_body_bytes),
                ("grpc.max_send_message_length", -1),
            ]
        )
        self._server.add_generic_rpc_handlers((Service(models, options, access, is_draining).handler(),))
        host = f"[{host}]" if ":" in host else host
        try:
            bound_port = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {host}, --grpc-port {port}: it is in use. --grpc-port 0 picks a free one."
            ) from error
        self.address = f"{host}:{bound_port}"

    async def start(self) -> None:
        await self._server.start()

    async def close(self, *, at_once: bool = False) -> None:
        """Refuse new requests; return when the accepted ones are answered, or ``at_once``."""
        await self._server.stop(0 if at_once else self._grace_s)
