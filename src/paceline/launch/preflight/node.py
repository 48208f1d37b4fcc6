"""The program of a preflight check, which runs once on each node."""

from __future__ import annotations

import dataclasses
import json
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from paceline import __version__
from paceline.core.access import create_token, read_token
from paceline.core.environment import detect_environment
from paceline.core.errors import ConfigError, LaunchError, PacelineError
from paceline.core.files import write_atomically
from paceline.core.owned_names import own_prefix
from paceline.core.signals import ECHO_S, STOP_SIGNALS, StopRequests, handle_signals
from paceline.elastic.consensus.transport import Listener, PeerConnectionError
from paceline.launch.preflight.checks import chosen_interface, run_checks
from paceline.launch.preflight.coordinator import (
    DEAD_AFTER_S,
    LocalTarget,
    NodeAddress,
    PreflightAgent,
    PreflightChannel,
    PreflightCoordinator,
    PreflightTarget,
    RemoteTarget,
    choose_address,
    open_channel,
)
from paceline.launch.preflight.spec import (
    NodePlace,
    PreflightReport,
    PreflightResults,
    PreflightSpec,
    choose_interface,
    make_report,
    parse_command,
)

# --- How the nodes find node 0, even if the job's own connection is blocked
#
# Node 0 creates a token in the shared directory, listens on the job's rendezvous port and on another port, and
# writes the other port into the directory. A node that reaches neither port, or does not see the directory,
# reports that in the directory or to node 0, as far as possible.


_TOKEN = "token"
_ENDPOINT = "meeting.json"
_NO_TOKEN = bytes(32)  # tells node 0 that this node does not see the token
_TRY_S = 2.0
_RETRY_S = 0.2


@dataclass
class JoinedNodes:
    """The nodes that have connected to node 0.

    Attributes:
        channels: by node number.
        hosts: names of these nodes, and of nodes that have left a problem.
        strangers: descriptions of connections without the token, or with another version.
        problems: reports in the directory of nodes that did not connect, by number.
        port_problem: why node 0 cannot listen on the rendezvous port.
    """

    channels: dict[int, PreflightChannel] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    strangers: list[str] = field(default_factory=list)
    problems: dict[int, str] = field(default_factory=dict)
    port_problem: str | None = None


def make_token(directory: Path) -> bytes:
    """Create the token on node 0, replacing that of an earlier check.

    Raises:
        ConfigError: the directory cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        remove_traces(directory)
    except OSError as error:
        raise ConfigError(f"cannot write {directory}: {error.strerror}.") from error
    return create_token(directory / _TOKEN)


def remove_traces(directory: Path) -> None:
    """Remove the files of the rendezvous."""
    for path in (directory / _TOKEN, directory / _ENDPOINT, *directory.glob("machine-*.json")):
        with suppress(OSError):
            path.unlink(missing_ok=True)


def await_nodes(directory: Path, place: NodePlace, address: NodeAddress, token: bytes, timeout_s: float) -> JoinedNodes:
    """Wait on node 0 for the other nodes, all of them or as many as come in time."""
    joined = JoinedNodes()
    listeners = []
    try:
        try:
            listeners.append(_listener(address.host, place.master_port, token))
        except ConfigError as error:
            joined.port_problem = str(error.__cause__.strerror) if isinstance(error.__cause__, OSError) else ""
        listeners.append(_listener(address.host, 0, token))
        endpoint = json.dumps({"address": address.host, "port": listeners[-1].port})
        write_atomically(directory / _ENDPOINT, endpoint.encode())
        deadline = time.monotonic() + timeout_s
        while len(joined.channels) < place.nodes - 1 and time.monotonic() < deadline:
            _accept(listeners, joined, place)
    finally:
        for listener in listeners:
            listener.close()
    for node in range(1, place.nodes):
        if node not in joined.channels:
            with suppress(OSError, ValueError):
                host, problem = json.loads((directory / f"machine-{node}.json").read_bytes())
                joined.hosts[node], joined.problems[node] = str(host), str(problem)
    return joined


def _listener(host: str, port: int, token: bytes) -> Listener:
    hello = {"version": __version__, "host": socket.gethostname()}
    return Listener(host, port, token, hello, dead_after_s=DEAD_AFTER_S)


def _accept(listeners: list[Listener], joined: JoinedNodes, place: NodePlace) -> None:
    select.select(listeners, [], [], _RETRY_S)
    for listener in listeners:
        connections, refusals = listener.accept()
        joined.strangers += [text for text in refusals if text not in joined.strangers]
        for connection in connections:
            hello = connection.hello or {}
            node = hello.get("node")
            if not isinstance(node, int) or not 0 < node < place.nodes or node in joined.channels:
                joined.strangers.append(f"{connection.peer} claims to be node {node}")
                connection.close()
            elif hello.get("version") != __version__:
                joined.problems[node] = f"it has Paceline {hello.get('version')}, but node 0 has {__version__}"
                joined.strangers.append(f"{connection.peer}: {joined.problems[node]}")
                connection.close()
            else:
                joined.channels[node] = PreflightChannel(connection)
                joined.hosts[node] = str(hello.get("host"))


def find_node_0(directory: Path, place: NodePlace, timeout_s: float) -> tuple[PreflightChannel, bytes]:
    """Connect to node 0 from another node, over any open port; return the channel and the token.

    Raises:
        LaunchError: node 0 cannot be reached; says what was tried.
    """
    hello = {"node": place.node_rank, "host": socket.gethostname(), "version": __version__}
    deadline = time.monotonic() + timeout_s
    last_problem = ""
    while True:
        token, token_problem = _NO_TOKEN, ""
        try:
            token = read_token(directory / _TOKEN)
        except ConfigError as error:
            token_problem = str(error)
        problems = []
        for host, port in _addresses(directory, place):
            try:
                return open_channel(host, port, token, hello, _TRY_S), token
            except PeerConnectionError as error:
                reason = str(error).rpartition(": ")[2].removesuffix(".")
                problems.append(f"{host}:{port} ({reason})")
        problem = f"it does not reach {' nor '.join(problems)}"
        if token_problem and not (directory / _ENDPOINT).exists():
            problem += f"; {token_problem.partition('. ')[0]}: do the nodes share that directory?"
        if problem != last_problem:
            last_problem = problem
            # If the directory does not exist, it is not shared, and only this node's own output shows the problem.
            with suppress(OSError):
                content = json.dumps([socket.gethostname(), problem])
                write_atomically(directory / f"machine-{place.node_rank}.json", content.encode())
        if time.monotonic() > deadline:
            raise LaunchError(f"node {place.node_rank} did not reach node 0: {problem}")
        time.sleep(_RETRY_S)


def _addresses(directory: Path, place: NodePlace) -> Iterator[tuple[str, int]]:
    yield place.master_addr, place.master_port
    with suppress(OSError, ValueError, KeyError, TypeError):
        endpoint: dict[str, Any] = json.loads((directory / _ENDPOINT).read_bytes())
        yield str(endpoint["address"]), int(endpoint["port"])


# --- The program: ``python -m paceline.launch.preflight.node OPTIONS`` ---
#
# Node 0 runs the coordinator and writes the report; the other nodes follow, and learn the result.


REPORT = "report.json"
"""File of the report in the directory of the checks."""

_NEXT_S = 900.0


def main(argv: list[str]) -> int:
    """Run this node's part; return 0 if there is a report and, before a job, nothing failed."""
    spec, place = parse_command(argv)
    try:
        if detect_environment().local_rank > 0:
            return 0  # a rank launcher has started several processes on this node, but one suffices
        with stoppable():
            if place.node_rank != 0:
                return _follow(spec, place)
            is_single = spec.preflight and place.nodes == 1
            report = coordinate_single_node(spec, place) if is_single else coordinate(spec, place)
        if spec.preflight:
            _print_problems(report)
            if report.status != "fail" and _use_interface(report.interface):
                print(f"paceline: preflight: the job uses --interface {report.interface}.", file=sys.stderr)
        return 1 if spec.preflight and report.status == "fail" else 0
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        return 128 + next(iter(interrupt.args), signal.SIGINT)


@contextmanager
def stoppable() -> Iterator[None]:
    """Turn stop signals into KeyboardInterrupt, with the signal as its argument, so that everything is cleaned up.

    A repeated request, such as the launcher's, does not interrupt the clean-up.
    """
    requests = StopRequests(ECHO_S)

    def interrupt(number: int, frame: FrameType | None) -> None:
        if requests.hear(number) != "again":
            raise KeyboardInterrupt(number)

    with handle_signals(STOP_SIGNALS, interrupt):
        yield


def coordinate_single_node(spec: PreflightSpec, place: NodePlace) -> PreflightReport:
    """Check the only node, without using the spec's directory."""
    with tempfile.TemporaryDirectory(prefix=own_prefix("doctor")) as directory:
        return coordinate(dataclasses.replace(spec, directory=Path(directory)), place)


def coordinate(spec: PreflightSpec, place: NodePlace) -> PreflightReport:
    """Check all nodes from node 0, and write the report.

    Raises:
        ConfigError: the directory cannot be written.
    """
    joined = JoinedNodes()
    with ExitStack() as stack:
        stack.callback(remove_traces, spec.directory)
        token = make_token(spec.directory)
        results = PreflightResults(spec=spec, nodes=place.nodes, port=place.master_port)
        address = choose_address(spec.interface, place)
        agent = PreflightAgent(spec, place, address, token)
        stack.callback(agent.close)
        if place.nodes > 1:
            joined = await_nodes(spec.directory, place, address, token, spec.timeout_s)
            for channel in joined.channels.values():
                stack.callback(channel.close)
        results.port_problem = joined.port_problem
        results.hosts = joined.hosts
        results.absent = _absent(joined, spec, place)
        targets: dict[int, PreflightTarget] = {0: LocalTarget(agent)}
        targets |= {node: RemoteTarget(channel) for node, channel in sorted(joined.channels.items())}
        PreflightCoordinator(targets, results).collect()
        names = tuple(map(results.name, range(place.nodes)))
        report = make_report(names, run_checks(results), chosen_interface(results))
        text = json.dumps(report.to_json(), indent=1) + "\n"
        write_atomically(spec.directory / REPORT, text.encode())
        # The job starts next: free the port before any process looks for its rank 0.
        agent.close()
        for channel in joined.channels.values():
            channel.send({"end": report.status, "interface": report.interface})
        return report


def _absent(joined: JoinedNodes, spec: PreflightSpec, place: NodePlace) -> dict[int, str]:
    """Explain why nodes are missing, by their own reports or by refused connections."""
    reasons = {}
    for node in range(1, place.nodes):
        if node not in joined.channels:
            problem = joined.problems.get(node)
            reasons[node] = problem or f"it did not connect within {spec.timeout_s:g} s"
            if not problem and joined.strangers:
                reasons[node] += (
                    f". Other connections do not see {spec.directory}, or are not from nodes of this job: "
                    f"{' '.join(joined.strangers).removesuffix('.')}"
                )
    return reasons


def _follow(spec: PreflightSpec, place: NodePlace) -> int:
    """Perform node 0's operations on another node until the check ends."""
    channel, token = find_node_0(spec.directory, place, spec.timeout_s)
    address = choose_address(spec.interface, place)
    agent = PreflightAgent(spec, place, address, token)
    try:
        while True:
            # Node 0 may still be waiting for other nodes.
            message = channel.next(spec.timeout_s + _NEXT_S)
            if "end" in message:
                _use_interface(message["interface"])
                return 1 if spec.preflight and message["end"] == "fail" else 0
            channel.send(_answer(agent, message))
    except PeerConnectionError as error:
        raise LaunchError(f"node 0 ended the preflight check: {error}") from error
    finally:
        channel.close()
        agent.close()


def _answer(agent: PreflightAgent, message: dict[str, Any]) -> dict[str, Any]:
    if message["ask"] == "time":
        return {"result": time.time()}
    try:
        return {"result": agent.perform(message["ask"], message["arguments"])}
    except (PacelineError, OSError) as error:
        return {"error": str(error)}


def _use_interface(interface: str | None) -> bool:
    """Make the job use this interface; return whether it will."""
    return interface is not None and choose_interface(interface)


def _print_problems(report: PreflightReport) -> None:
    """Print the checks that did not pass, before a job."""
    for check in report.checks:
        if check.status != "pass":
            print(
                f"paceline: preflight {check.status}: {check.where}: {check.found}. {check.advice}".rstrip(),
                file=sys.stderr,
            )
    if report.status == "fail":
        print("paceline: the job was not started.", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
