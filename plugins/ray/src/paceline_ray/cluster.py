"""Ray clusters: an existing one, or one of this process's own. The library is imported on use."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import psutil

from paceline.core.access import create_token
from paceline.core.environment import parse_endpoint
from paceline.core.errors import LaunchError
from paceline.core.plugins import import_library
from paceline.launch.supervisor import end_processes

_NICENESS = "RAY_worker_niceness"
# Ray's way to have its servers listen on loopback alone, named after where that is the default.
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
_CONNECT_S = 10.0
_LONGEST_TEMPORARY = 17
"""Names of Ray's Unix sockets are 90 characters longer than the temporary directory's, and at most 107."""


def import_ray(extra: str = "ray") -> ModuleType:
    """Import Ray, as an extra of Paceline installs it; a LaunchError says how."""
    # Usage reports would go over the network; so would a question about them to the terminal.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray: ModuleType = import_library("ray", "this command", extra, LaunchError)
    return ray


def connect(ray: ModuleType, address: str, option: str = "--address") -> None:
    """Become a driver of the cluster at an address, HOST:PORT or auto.

    Args:
        option: the name of the option or variable with the address.

    Raises:
        LaunchError: it does not answer, or refuses.
    """
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


def cluster_variables(token: Path, *, on_loopback: bool) -> dict[str, str]:
    """Return the variables of every process of a cluster that Paceline starts.

    Args:
        token: the file with the cluster's token.
        on_loopback: whether it has one node, so that its servers listen on loopback alone.
    """
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        # Unless this says otherwise, workers have niceness 15: on a busy machine, trials and ranks would starve.
        _NICENESS: os.environ.get(_NICENESS, "0"),
    }
    return variables | (_LOOPBACK if on_loopback else {})


@contextmanager
def own_cluster(extra: str) -> Iterator[ModuleType]:
    """Run a cluster of this process's own, on loopback, with a token; nothing is left of it afterwards.

    Its processes end with this one, also if this one is killed. Yields the library, which must not have been
    imported before: it reads the token's variables then, and once.

    Raises:
        LaunchError: Ray is not installed, as ``extra`` does it; or it could not be started.
    """
    with private_directory() as directory:
        token = directory.with_name("token")
        create_token(token)
        os.environ.update(cluster_variables(token, on_loopback=True))
        os.environ.pop("RAY_AUTH_TOKEN", None)
        ray = import_ray(extra)
        try:
            start_head(ray, directory)
            yield ray
        finally:
            shut_down(ray)


def start_head(
    ray: ModuleType, directory: Path, *, address: str = "127.0.0.1", cpus: int = 1, gpus: int | None = None
) -> None:
    """Start a cluster's head in this process.

    Raises:
        LaunchError: it could not be started.
    """
    try:
        ray.init(
            address="local",
            num_cpus=cpus,
            num_gpus=gpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="warning",
            _node_ip_address=address,
            _temp_dir=str(directory),
        )
    except Exception as error:
        raise LaunchError(f"Ray could not be started: {error}") from error


def shut_down(ray: ModuleType) -> None:
    """End the head, and what its actors have started: they would notice by themselves, a little later."""
    tree = psutil.Process().children(recursive=True)
    ray.shutdown()
    kill(tree)


def kill(processes: Sequence[psutil.Process]) -> None:
    """End processes by their ids; ``ray stop`` would end other jobs' clusters too."""
    end_processes(processes)
    psutil.wait_procs(processes, timeout=10)


@contextmanager
def private_directory() -> Iterator[Path]:
    """Make a temporary directory with a short name, private because Ray's files in it are readable by all.

    Raises:
        LaunchError: it cannot be made.
    """
    parent = tempfile.gettempdir()
    if len(parent) > _LONGEST_TEMPORARY:
        parent = "/tmp"
    try:
        made = tempfile.TemporaryDirectory(prefix="paceline-ray-", dir=parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise LaunchError(
            f"Ray's sockets need a directory with a short name, and {parent} cannot be written: {error.strerror}. Set "
            f"TMPDIR to one of at most {_LONGEST_TEMPORARY} characters."
        ) from error
    with made as name:
        yield Path(name) / "r"
