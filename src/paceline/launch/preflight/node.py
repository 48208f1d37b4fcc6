"""The program of a preflight check, which runs once on each machine."""

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
from paceline.core.signals import ECHO_S, STOP_SIGNALS, StopRequests, handle_signals
from paceline.elastic.consensus.transport import Listener, PeerConnectionError
from paceline.launch.preflight.checks import chosen_interface, judge
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

# --- How the machines of an examination find machine 0, also where the way that the job will take is closed
#
# Machine 0 makes a token in the shared directory, listens on the job's own rendezvous port and on another
# one, and writes the other one's number into the directory. Who does not reach it on either, or does not see
# the directory, says so there, or to machine 0, as far as that can be.


_TOKEN = "token"
_MEETING = "meeting.json"
_NO_TOKEN = bytes(32)  # shows machine 0 that this one is there, and does not see the token
_TRY_S = 2.0
_RETRY_S = 0.2


@dataclass
class JoinedNodes:
    """Who has come to machine 0.

    Attributes:
        channels: by the machine's number.
        hosts: their names, and those of machines that have left a problem.
        strangers: who came without the token, or with another version; sentences.
        problems: what machines that did not come have left in the directory, by number.
        port_problem: why machine 0 cannot listen on the rendezvous port.
    """

    channels: dict[int, PreflightChannel] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    strangers: list[str] = field(default_factory=list)
    problems: dict[int, str] = field(default_factory=dict)
    port_problem: str | None = None


def make_token(directory: Path) -> bytes:
    """Machine 0's: a new one, since an earlier examination may have left its own.

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
    """Remove what the machines met by."""
    for path in (directory / _TOKEN, directory / _MEETING, *directory.glob("machine-*.json")):
        with suppress(OSError):
            path.unlink(missing_ok=True)


def await_nodes(directory: Path, place: NodePlace, address: NodeAddress, token: bytes, timeout_s: float) -> JoinedNodes:
    """Machine 0: wait for the others, all of them or as many as come in time."""
    arrivals = JoinedNodes()
    listeners = []
    try:
        try:
            listeners.append(_listener(address.host, place.master_port, token))
        except ConfigError as error:
            arrivals.port_problem = str(error.__cause__.strerror) if isinstance(error.__cause__, OSError) else ""
        listeners.append(_listener(address.host, 0, token))
        where = json.dumps({"address": address.host, "port": listeners[-1].port})
        write_atomically(directory / _MEETING, where.encode())
        deadline = time.monotonic() + timeout_s
        while len(arrivals.channels) < place.nodes - 1 and time.monotonic() < deadline:
            _accept(listeners, arrivals, place)
    finally:
        for listener in listeners:
            listener.close()
    for node in range(1, place.nodes):
        if node not in arrivals.channels:
            with suppress(OSError, ValueError):
                host, problem = json.loads((directory / f"machine-{node}.json").read_bytes())
                arrivals.hosts[node], arrivals.problems[node] = str(host), str(problem)
    return arrivals


def _listener(host: str, port: int, token: bytes) -> Listener:
    hello = {"version": __version__, "host": socket.gethostname()}
    return Listener(host, port, token, hello, dead_after_s=DEAD_AFTER_S)


def _accept(listeners: list[Listener], arrivals: JoinedNodes, place: NodePlace) -> None:
    select.select(listeners, [], [], _RETRY_S)
    for listener in listeners:
        links, refused = listener.accept()
        arrivals.strangers += [text for text in refused if text not in arrivals.strangers]
        for link in links:
            hello = link.hello or {}
            node = hello.get("node")
            if not isinstance(node, int) or not 0 < node < place.nodes or node in arrivals.channels:
                arrivals.strangers.append(f"{link.peer} says that it is machine {node}")
                link.close()
            elif hello.get("version") != __version__:
                arrivals.problems[node] = f"it has Paceline {hello.get('version')}, machine 0 has {__version__}"
                arrivals.strangers.append(f"{link.peer}: {arrivals.problems[node]}")
                link.close()
            else:
                arrivals.channels[node] = PreflightChannel(link)
                arrivals.hosts[node] = str(hello.get("host"))


def find_node_0(directory: Path, place: NodePlace, timeout_s: float) -> tuple[PreflightChannel, bytes]:
    """Any other machine: link with machine 0, by whichever way there is; also the token.

    Raises:
        LaunchError: there is none; the message says what was tried.
    """
    hello = {"node": place.node_rank, "host": socket.gethostname(), "version": __version__}
    deadline = time.monotonic() + timeout_s
    said = ""
    while True:
        token, unseen = _NO_TOKEN, ""
        try:
            token = read_token(directory / _TOKEN)
        except ConfigError as error:
            unseen = str(error)
        problems = []
        for host, port in _addresses(directory, place):
            try:
                return open_channel(host, port, token, hello, _TRY_S), token
            except PeerConnectionError as error:
                why = str(error).rpartition(": ")[2].removesuffix(".")
                problems.append(f"{host}:{port} ({why})")
        problem = f"it does not reach {' nor '.join(problems)}"
        if unseen and not (directory / _MEETING).exists():
            problem += f"; {unseen.partition('. ')[0]}: do the machines share that directory?"
        if problem != said:
            said = problem
            # A directory that is not there is not shared; then only this machine's own output tells.
            with suppress(OSError):
                content = json.dumps([socket.gethostname(), problem])
                write_atomically(directory / f"machine-{place.node_rank}.json", content.encode())
        if time.monotonic() > deadline:
            raise LaunchError(f"machine {place.node_rank} did not reach machine 0: {problem}")
        time.sleep(_RETRY_S)


def _addresses(directory: Path, place: NodePlace) -> Iterator[tuple[str, int]]:
    yield place.master_addr, place.master_port
    with suppress(OSError, ValueError, KeyError, TypeError):
        meeting: dict[str, Any] = json.loads((directory / _MEETING).read_bytes())
        yield str(meeting["address"]), int(meeting["port"])


# --- The doctor's program for one machine: ``python -m paceline.launch.preflight.node OPTIONS`` ---
#
# Machine 0 leads the examination and leaves the report; the others do what it asks for, and learn the
# verdict.


REPORT = "report.json"
"""A file in the examination's directory."""

_NEXT_S = 900.0


def main(argv: list[str]) -> int:
    """Examine; 0 where a report came about and, before a job, nothing failed."""
    examination, place = parse_command(argv)
    try:
        if detect_environment().local_rank > 0:
            return 0  # a launcher of ranks has started several here, and one is enough
        with stoppable():
            if place.node_rank != 0:
                return _follow(examination, place)
            alone = examination.preflight and place.nodes == 1
            report = lead_alone(examination, place) if alone else lead(examination, place)
        if examination.preflight:
            _say(report)
            if report.status != "fail" and _choose(report.interface):
                print(f"paceline: preflight: the job uses --interface {report.interface}.", file=sys.stderr)
        return 1 if examination.preflight and report.status == "fail" else 0
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as asked:
        return 128 + next(iter(asked.args), signal.SIGINT)


@contextmanager
def stoppable() -> Iterator[None]:
    """Inside, any request to stop is what Ctrl-C is, so that nothing is left behind; it holds the signal.

    The same request may come from a launcher too: that must not interrupt the cleaning up.
    """
    requests = StopRequests(ECHO_S)

    def interrupt(number: int, frame: FrameType | None) -> None:
        if requests.hear(number) != "again":
            raise KeyboardInterrupt(number)

    with handle_signals(STOP_SIGNALS, interrupt):
        yield


def lead_alone(examination: PreflightSpec, place: NodePlace) -> PreflightReport:
    """Examine the only machine there is; its directory is not used."""
    with tempfile.TemporaryDirectory(prefix="paceline-doctor-") as directory:
        return lead(dataclasses.replace(examination, directory=Path(directory)), place)


def lead(examination: PreflightSpec, place: NodePlace) -> PreflightReport:
    """Machine 0: examine all machines, and write the report.

    Raises:
        ConfigError: the directory cannot be written.
    """
    arrivals = JoinedNodes()
    with ExitStack() as stack:
        stack.callback(remove_traces, examination.directory)
        token = make_token(examination.directory)
        findings = PreflightResults(examination=examination, nodes=place.nodes, port=place.master_port)
        address = choose_address(examination.interface, place)
        examiner = PreflightAgent(examination, place, address, token)
        stack.callback(examiner.close)
        if place.nodes > 1:
            arrivals = await_nodes(examination.directory, place, address, token, examination.timeout_s)
            for channel in arrivals.channels.values():
                stack.callback(channel.close)
        findings.port_problem = arrivals.port_problem
        findings.hosts = arrivals.hosts
        findings.absent = _absent(arrivals, examination, place)
        machines: dict[int, PreflightTarget] = {0: LocalTarget(examiner)}
        machines |= {node: RemoteTarget(channel) for node, channel in sorted(arrivals.channels.items())}
        PreflightCoordinator(machines, findings).examine()
        names = tuple(map(findings.name, range(place.nodes)))
        report = make_report(names, judge(findings), chosen_interface(findings))
        text = json.dumps(report.to_json(), indent=1) + "\n"
        write_atomically(examination.directory / REPORT, text.encode())
        # The job begins where this ends: the port is to be free before anybody looks for its rank 0.
        examiner.close()
        for channel in arrivals.channels.values():
            channel.send({"end": report.status, "interface": report.interface})
        return report


def _absent(arrivals: JoinedNodes, examination: PreflightSpec, place: NodePlace) -> dict[int, str]:
    """Why machines are not there, as far as they or those that were refused have said."""
    reasons = {}
    for node in range(1, place.nodes):
        if node not in arrivals.channels:
            said = arrivals.problems.get(node)
            reasons[node] = said or f"nothing was heard of it within {examination.timeout_s:g} s"
            if not said and arrivals.strangers:
                reasons[node] += (
                    f". Who came does not see {examination.directory}, or is no machine of this job: "
                    f"{' '.join(arrivals.strangers).removesuffix('.')}"
                )
    return reasons


def _follow(examination: PreflightSpec, place: NodePlace) -> int:
    """Any other machine: do what machine 0 asks for, until it knows."""
    channel, token = find_node_0(examination.directory, place, examination.timeout_s)
    address = choose_address(examination.interface, place)
    examiner = PreflightAgent(examination, place, address, token)
    try:
        while True:
            # Machine 0 may still be waiting for others.
            message = channel.next(examination.timeout_s + _NEXT_S)
            if "end" in message:
                _choose(message["interface"])
                return 1 if examination.preflight and message["end"] == "fail" else 0
            channel.send(_answer(examiner, message))
    except PeerConnectionError as error:
        raise LaunchError(f"machine 0 ended the examination: {error}") from error
    finally:
        channel.close()
        examiner.close()


def _answer(examiner: PreflightAgent, message: dict[str, Any]) -> dict[str, Any]:
    if message["ask"] == "time":
        return {"result": time.time()}
    try:
        return {"result": examiner.perform(message["ask"], message["arguments"])}
    except (PacelineError, OSError) as error:
        return {"error": str(error)}


def _choose(interface: str | None) -> bool:
    """Have the job use this interface; whether it will."""
    return interface is not None and choose_interface(interface)


def _say(report: PreflightReport) -> None:
    """Before a job: what is not as it should be, in lines."""
    for check in report.checks:
        if check.status != "pass":
            print(
                f"paceline: preflight {check.status}: {check.where}: {check.found}. {check.advice}".rstrip(),
                file=sys.stderr,
            )
    if report.status == "fail":
        print("paceline: the job is not started.", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
