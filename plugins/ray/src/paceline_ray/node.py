"""The program that starts a Ray cluster of the job's own: ``python -m paceline_ray.node OPTIONS -- COMMAND``.

It starts once on each node of the job. The first one starts the cluster's head, waits for the others,
and runs the command, with RAY_ADDRESS and the cluster's token in its environment; the others join the cluster
and stay until the first one has ended, however it ends. No part of the cluster outlives the job.

Nodes find each other by a file in the job's directory, which they share: on a node that other jobs use as well, any
port may be taken.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType

import psutil

from paceline.core.access import create_token, read_token
from paceline.core.environment import NodeEnvironment, detect_node, parse_endpoint
from paceline.core.errors import ConfigError, LaunchError, PacelineError
from paceline.core.files import write_atomically
from paceline.core.job import Command, Placement
from paceline.core.parent_death import kill_with_parent_command
from paceline.core.signals import STOP_SIGNALS, handle_signals
from paceline.core.sockets import address_towards, bound_socket, interface_address, job_port
from paceline.launch.launcher import LaunchSpec, find_preflight
from paceline.launch.supervisor import RankStarter, SupervisedJob
from paceline_ray.cluster import cluster_variables, import_ray, kill, private_directory, shut_down, start_head

_MEETING_S = 300.0
_POLL_S = 0.2
_ENDING_S = 15.0  # the head may be ending its own part before it says so
_GRACE_S = 5.0  # shorter than that of this process's supervisor
_NEEDS_DASHBOARD = "Failed to query Ray Train Controller actor state"


def ray_node_command(spec: LaunchSpec) -> tuple[str, ...]:
    """Return the command that a launcher starts on each node for ``--rank-launcher ray``.

    Raises:
        ConfigError: the job asks for processes, which a program that uses Ray starts by itself.
    """
    if spec.nproc != (1,):
        raise ConfigError(
            f"--nproc {','.join(map(str, spec.nproc))}: under --rank-launcher ray the command is started once, and "
            "starts tasks and actors by itself. Leave --nproc out; or let --rank-launcher torchrun start processes."
        )
    return cluster_command(
        spec, spec.command, cpus=spec.cpus_per_task, gpus=spec.gpus_per_node, preflight=spec.preflight
    )


def cluster_command(
    spec: LaunchSpec,
    command: Sequence[str],
    *,
    cpus: int | None,
    gpus: int | None,
    preflight: Sequence[str] = (),
) -> tuple[str, ...]:
    """Return the command that starts a Ray cluster, and ``command`` in it.

    Args:
        spec: the job; its directory is the nodes' rendezvous.
        command: the command in the cluster.
        cpus: CPUs of each node for Ray to allocate; default: the job's.
        gpus: its GPUs; default: all.
        preflight: a command that must succeed on each node first; if the nodes of a job are actors, they run it.
    """
    options = ["--directory", str(spec.directory)]
    for name, value in (("cpus", cpus), ("gpus", gpus), ("interface", spec.interface)):
        if value is not None:
            options += [f"--{name}", str(value)]
    if preflight:
        options += ["--preflight", shlex.join(preflight)]
    return (spec.python, "-P", "-m", "paceline_ray.node", *options, "--", *command)


def main(argv: Sequence[str]) -> int:
    """Run the cluster's head, or one of its nodes; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m paceline_ray.node", description=__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="the job's; its machines share it")
    parser.add_argument("--cpus", type=int, help="that Ray may give away here; default: the job's")
    parser.add_argument("--gpus", type=int, help="default: those that there are")
    parser.add_argument("--interface")
    parser.add_argument("--preflight", type=shlex.split, default=(), help="the ranks that check the node first")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    try:
        environment = detect_node()
        if options.preflight:
            endpoint = (
                f"{environment.hosts[0]}:{job_port(environment.job_id or 'paceline')}"
                if environment.nodes > 1
                else None
            )
            ranks = LaunchSpec(
                command=options.preflight,
                nodes=(environment.nodes, environment.nodes),
                interface=options.interface,
                placement=Placement(
                    node_rank=None if endpoint is None else environment.node_rank,
                    rdzv_endpoint=endpoint,
                    rdzv_id=environment.job_id or "paceline",
                ),
            )
            code, interface = find_preflight().run_before(ranks)
            if code:
                return code
            options.interface = options.interface or interface
        here = _RayNode(
            environment=environment,
            cpus=options.cpus or environment.cpus or len(os.sched_getaffinity(0)),
            gpus=options.gpus,
            interface=options.interface,
            files=options.directory / f"ray-{environment.job_id or 'job'}",
        )
        with handle_signals(STOP_SIGNALS, stop):
            return _head(here, options.command) if environment.node_rank == 0 else _worker(here)
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return error.exit_code


@dataclass(frozen=True, kw_only=True)
class _RayNode:
    """This machine, and what it gives to the cluster."""

    environment: NodeEnvironment
    cpus: int
    gpus: int | None
    interface: str | None
    files: Path

    @property
    def token(self) -> Path:
        return self.files.with_name(f"{self.files.name}.token")

    @property
    def meeting(self) -> Path:
        return self.files.with_name(f"{self.files.name}.json")

    def variables(self) -> dict[str, str]:
        return cluster_variables(self.token, on_loopback=self.environment.nodes == 1)


def _head(here: _RayNode, command: Sequence[str]) -> int:
    """Start the head, wait for the others, run the command, and end all of it."""
    several = here.environment.nodes > 1
    if several and len(here.environment.hosts) != here.environment.nodes:
        raise ConfigError(
            f"the cluster has {here.environment.nodes} machines, and only {len(here.environment.hosts)} are named. "
            "Start it through paceline launch, or set PACELINE_NODE_RANK, PACELINE_NODES and PACELINE_HOSTS."
        )
    address = _address(here, here.environment.hosts[1]) if several else "127.0.0.1"
    here.token.unlink(missing_ok=True)  # left by a head that was killed
    create_token(here.token)
    with contextlib.ExitStack() as stack:
        stack.callback(here.token.unlink, missing_ok=True)
        directory = stack.enter_context(private_directory())
        os.environ.update(here.variables())
        os.environ.pop("RAY_AUTH_TOKEN", None)
        ray = import_ray()
        stack.callback(shut_down, ray)
        start_head(ray, directory, address=address, cpus=here.cpus, gpus=here.gpus)
        cluster = ray.get_runtime_context().gcs_address
        if several:
            stack.callback(here.meeting.unlink, missing_ok=True)
            stack.enter_context(_door(here, address, cluster))
            _wait_for_all(ray, here.environment.nodes)
        code = _run(command, {"RAY_ADDRESS": cluster, **_without_repeated_warnings(os.environ)})
        # Before the others end: while Ray runs here, it would print that theirs ends unexpectedly.
        shut_down(ray)
        return code


def _address(here: _RayNode, towards: str, port: int = 1) -> str:
    """Return this node's address on the route to another one; its own name may mean loopback."""
    return interface_address(here.interface) if here.interface else address_towards(towards, port)


@contextmanager
def _door(here: _RayNode, address: str, cluster: str) -> Iterator[None]:
    """Say where the cluster is, and listen there until this machine's part has ended.

    Nothing is said over these connections: their end tells the others of ours, also if we are killed.
    """
    with bound_socket(address, 0) as door:
        door.listen(here.environment.nodes)
        content = {"cluster": cluster, "door": f"{address}:{door.getsockname()[1]}"}
        write_atomically(here.meeting, json.dumps(content).encode())
        yield


def _wait_for_all(ray: ModuleType, nodes: int) -> None:
    deadline = time.monotonic() + _MEETING_S
    while True:
        there = [node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]]
        if len(there) >= nodes:
            return
        if time.monotonic() > deadline:
            raise LaunchError(
                f"after {_MEETING_S:.0f} s only {len(there)} of {nodes} machines are in the Ray cluster: "
                f"{', '.join(there)}. What the others said is above; a firewall may be between them."
            )
        time.sleep(_POLL_S)


def _without_repeated_warnings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable by which a driver skips what Ray Train logs every second where there is no dashboard."""
    own = environ.get("RAY_DEDUP_LOGS_SKIP_REGEX")
    return {"RAY_DEDUP_LOGS_SKIP_REGEX": f"(?:{own})|{_NEEDS_DASHBOARD}" if own else _NEEDS_DASHBOARD}


def _run(command: Sequence[str], variables: Mapping[str, str]) -> int:
    # The cluster dies with this process, so nothing is left for the command to do.
    starter = RankStarter(name="the command", says_why=True, death_signal=signal.SIGKILL)
    process = Command(title="the command", argv=tuple(command), env=variables)
    return SupervisedJob((process,), starter=starter, grace_s=_GRACE_S).wait()


def _worker(here: _RayNode) -> int:
    """Join the cluster, and stay until the first node's part has ended."""
    cluster, door = _enter(here)
    with door, private_directory() as directory:
        read_token(here.token)
        import_ray()
        address = _address(here, *parse_endpoint(cluster, "the cluster's address"))
        words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        words += [f"--address={cluster}", f"--node-ip-address={address}", f"--temp-dir={directory}"]
        words += [f"--num-cpus={here.cpus}", *([] if here.gpus is None else [f"--num-gpus={here.gpus}"])]
        environment = {**os.environ, **here.variables()}
        environment.pop("RAY_AUTH_TOKEN", None)
        log = directory.with_name("start.log")
        with log.open("wb") as output:
            started = subprocess.Popen(
                kill_with_parent_command(words),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            # The program may save when a signal asks it to: how long the cluster stays, the head says.
            with handle_signals(STOP_SIGNALS, lambda number, frame: None):
                while started.poll() is None:
                    if select.select([door], [], [], _POLL_S)[0]:
                        return 0
            if select.select([door], [], [], _ENDING_S)[0]:
                return 0
            said = log.read_text(errors="replace").strip()
            raise LaunchError(f"Ray ended on this machine. It said:\n{said}")
        finally:
            kill(psutil.Process().children(recursive=True))
            started.wait()


def _enter(here: _RayNode) -> tuple[str, socket.socket]:
    """Return the cluster's address, and a connection to its head; waits for the head's file."""
    deadline = time.monotonic() + _MEETING_S
    while True:
        # What an earlier head has left there leads nowhere.
        with suppress(OSError, ValueError):
            content = json.loads(here.meeting.read_bytes())
            door = socket.create_connection(parse_endpoint(content["door"], "the door"), timeout=10)
            return content["cluster"], door
        if time.monotonic() > deadline:
            raise LaunchError(
                f"after {_MEETING_S:.0f} s {here.environment.hosts[0]} has not started a Ray cluster that can be "
                f"reached from here, or {here.meeting.parent} is not a directory that the machines share."
            )
        time.sleep(_POLL_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
