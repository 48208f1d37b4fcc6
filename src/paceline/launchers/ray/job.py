"""Runs a job on the machines of a Ray cluster: ``python -m paceline.launchers.ray.job FILE``.

Ray finds the machines and starts an actor on each, which runs what every launcher starts there
(:mod:`paceline.launchers.node`). This process follows them: it shows what they print, passes signals on, and
replaces a machine that was lost where the job can take another one in. Ray ends the actors with it.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from paceline.distributed.environment import parse_endpoint
from paceline.errors import LaunchError, PacelineError
from paceline.launchers.ray.following import Following
from paceline.launchers.ray.node import import_ray
from paceline.launchers.ray.ray_job import RayJob

_CONNECT_S = 10.0


def main(argv: Sequence[str]) -> int:
    """Run the job; return its exit code."""
    try:
        job = RayJob.read(Path(argv[0]))
        # It tells why each attempt to connect has failed, and would try twenty times.
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "5")
        ray = import_ray()
        connect(ray)
        try:
            return Following(ray, job).run()
        finally:
            ray.shutdown()
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return error.exit_code


def connect(ray: ModuleType, option: str = "--address") -> None:
    """Become a driver of the cluster that RAY_ADDRESS names.

    Args:
        ray: the library.
        option: of the command, which may have named it instead.

    Raises:
        LaunchError: it does not answer, or refuses.
    """
    address = os.environ["RAY_ADDRESS"]
    require_answer(address, option)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="warning")
    except Exception as error:
        raise LaunchError(
            f"the Ray cluster at {address} cannot be used: {error}. Something answers there: is it a Ray "
            "cluster, and do RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH name its token?"
        ) from error


def require_answer(address: str, option: str) -> None:
    """Refuse an address at which nothing listens; Ray itself would try for many minutes.

    Args:
        address: HOST:PORT; "auto" is left to Ray.
        option: that has named it.

    Raises:
        ConfigError: it has another form.
        LaunchError: nothing answers there.
    """
    if address == "auto":
        return
    endpoint = parse_endpoint(address.removeprefix("ray://"), option)
    try:
        socket.create_connection(endpoint, timeout=_CONNECT_S).close()
    except OSError as error:
        raise LaunchError(
            f"no Ray cluster answers at {option} {address}: {error}. Start one there, or leave "
            f"{option} and RAY_ADDRESS out, for a cluster of the job's own."
        ) from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
