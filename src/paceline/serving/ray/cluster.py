"""The Ray cluster that a server's replicas run in, and Ray Serve in it."""

from __future__ import annotations

import logging
import secrets
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType, ModuleType

from paceline.distributed.process import signals_handled
from paceline.distributed.ray_cluster import connect, import_ray, own_cluster
from paceline.errors import LaunchError
from paceline.serving.ray.deployment import QUIET, Cluster
from paceline.serving.ray.options import RayOptions
from paceline.serving.ray.replica import NAMESPACE, Anchor

_EXTRA = "ray-serve"


@contextmanager
def ray_serve(options: RayOptions) -> Iterator[Cluster]:
    """Be in a cluster in which Ray Serve runs; afterwards it is as it was before.

    No proxies of Ray Serve are started: requests come through our own server.

    Raises:
        LaunchError: Ray Serve is not installed, or the cluster cannot be used.
    """
    # What asks for the end while Ray is being started; the server's own handlers come after that.
    with signals_handled((signal.SIGTERM, signal.SIGINT), _stop), ExitStack() as stack:
        if options.address is None:
            stack.enter_context(own_cluster(_EXTRA))
            _require_serve()
            _start_serve()
            yield Cluster(options)
        else:
            ray = import_ray(_EXTRA)
            _require_serve()
            connect(ray, options.address, "--ray-address")
            stack.callback(ray.shutdown)
            stack.callback(_end_serve, ray, there_before=_runs(ray))
            _start_serve()
            name = f"paceline-{secrets.token_hex(8)}"
            # Kept here: an actor without a handle ends.
            anchor = ray.remote(Anchor).options(num_cpus=0, name=name, namespace=NAMESPACE).remote()
            ray.get(anchor.__ray_ready__.remote())
            yield Cluster(options, name)


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _require_serve() -> None:
    try:
        from ray import serve  # noqa: F401
    except ImportError as error:
        raise LaunchError(
            f"Ray Serve is not installed ({error}). Run: pip install 'paceline[{_EXTRA}]'"
        ) from error
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _start_serve() -> None:
    from ray import serve

    serve.start(proxy_location="Disabled", logging_config=QUIET)


def _runs(ray: ModuleType) -> bool:
    """Whether somebody has started Ray Serve in the cluster."""
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    try:
        ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        return False
    return True


def _end_serve(ray: ModuleType, *, there_before: bool) -> None:
    from ray import serve

    with suppress(ray.exceptions.RayError):
        if not there_before and not serve.status().applications:
            serve.shutdown()
