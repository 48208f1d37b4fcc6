"""The program of each rank of a preflight check: ``python -m paceline_checks.preflight.rank SPEC REPORT``.

The ranks meet in the job's own store, each node's first one with the facts about it; those measure the links between
the nodes. Then all ranks form the job's process group. Rank 0 judges, and every node gets the report.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from paceline.core.environment import Environment, detect_environment
from paceline.core.errors import ConfigError, PacelineError, PeerLostError
from paceline.core.files import write_atomically
from paceline.core.signals import STOP_SIGNALS, handle_signals
from paceline_checks.preflight import facts
from paceline_checks.preflight.checks import (
    Pair,
    Results,
    all_reduce_obstacle,
    common_interfaces,
    judge,
    known_rates,
    slow_links,
)
from paceline_checks.preflight.spec import PreflightReport, PreflightSpec

_POLL_S = 0.01
_LATE_S = 3.0  # network file systems show new files with a delay
_COLLECTIVE_S = 60.0
_RANK_0_S = 300.0  # for what the first ranks of the nodes do
_CLOSED_S = 5.0
_ALL_PAIRS = 9  # nodes
_REPEATED = 16  # slow links
_BYTES, _ROUNDS = 1 << 20, 5  # of the all-reduce
_PIECE = bytes(1 << 18)
_TIMEOUT_S = 5.0
_STREAM_S = 0.4

Gather = Callable[[Any], list[Any]]
"""Returns the values (JSON types) of all nodes, by number; a barrier of their first ranks."""


def main(text: str, file: Path) -> int:
    """Run this rank's part; return 0 if there is a report."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own would wait for an answer of the store
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the report says it
    environment, host = detect_environment(), socket.gethostname()
    try:
        try:
            import torch
        except Exception as error:
            found = f"torch cannot be imported: {type(error).__name__}: {error}".partition("\n")[0]
            raise ConfigError(f"{found}. Install it on this node: pip install 'torch>=2.11'") from error
        torch.set_num_threads(1)
        report = _check(msgspec.json.decode(text, type=PreflightSpec), environment)
    except PacelineError as error:
        print(f"paceline: preflight: {host}: {error}", file=sys.stderr)
        return 1
    if environment.local_rank == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, (json.dumps(report.to_json(), indent=1) + "\n").encode())
    return 0


def _check(spec: PreflightSpec, environment: Environment) -> PreflightReport:
    """Check the nodes together with the other ranks."""
    from paceline.parallel.peer_errors import translate_peer_errors
    from paceline.parallel.rendezvous import rendezvous

    rank, node, nodes = environment.rank, environment.node_rank, environment.nodes
    own: dict[str, Any] = {"node": node, "host": socket.gethostname(), "cpus": sorted(os.sched_getaffinity(0))}
    own |= facts.choose_address(spec.interface, environment)
    interface = own["interface"] if nodes > 1 else None
    if environment.local_rank == 0:
        own |= {**facts.collect(spec), "ports": _serve(own["address"]) if nodes > 1 else {}}
    results = Results(spec=spec, nodes=nodes, facts={node: own})
    report = None
    try:
        with (
            translate_peer_errors(),
            rendezvous(environment, own, generation=0, interface=interface, timeout_s=spec.timeout_s) as meeting,
        ):
            first = {description["node"]: other for other, description in reversed([*enumerate(meeting.ranks)])}
            results.facts = {number: dict(meeting.ranks[first[number]]) for number in sorted(first)}
            for description in meeting.ranks:  # mpirun binds each rank to cores of its own
                results.facts[description["node"]]["cpus"] += description["cpus"]

            def wait(key: str, by: int, limit_s: float = spec.timeout_s) -> Any:
                deadline = time.monotonic() + limit_s
                while not meeting.store.check([key]):
                    if time.monotonic() > deadline:
                        raise PeerLostError(f"it did not answer within {limit_s:g} s. See its output.", rank=by)
                    time.sleep(_POLL_S)
                return json.loads(meeting.store.get(key))

            rounds = count()

            def gather(value: Any) -> list[Any]:
                key = f"round/{next(rounds)}"
                meeting.store.set(f"{key}/{node}", json.dumps(value))
                return [wait(f"{key}/{other}", first[other]) for other in range(nodes)]

            if environment.local_rank == 0:
                _measure(results, node, gather)
            if rank == 0:
                meeting.store.set("obstacle", json.dumps(all_reduce_obstacle(results)))
            results.obstacle = wait("obstacle", 0, _RANK_0_S + spec.timeout_s)
            outcome = {} if results.obstacle else _all_reduce(environment, interface)
            meeting.store.set(f"all-reduce/{rank}", json.dumps(outcome))
            if rank == 0:
                outcomes = [
                    wait(f"all-reduce/{other}", other, 3 * _COLLECTIVE_S) for other in range(len(meeting.ranks))
                ]
                # The error of a rank that only lost another one comes after that one's own.
                results.all_reduce = min(outcomes, key=lambda each: ("error" not in each, each.get("is_lost", False)))
                report = judge(results)
                meeting.store.set("report", json.dumps(report.to_json()))
                for other in range(1, environment.world_size):
                    wait(f"end/{other}", other)
            else:
                report = msgspec.convert(wait("report", 0, _RANK_0_S), PreflightReport)
                meeting.store.set(f"end/{rank}", "0")
    except PeerLostError as error:
        if rank != 0:
            raise
        if report is None:
            ranks = [number for number in range(nodes) for _ in range(spec.processes_on(number))]
            results.absent[ranks[error.rank or 0]] = str(error).removesuffix(".")
            report = judge(results)
    if rank != 0 and nodes > 1:
        _await_closed(environment)
    return report


def _await_closed(environment: Environment) -> None:
    """Wait until rank 0's store has closed: the job's own rank 0 listens on the same port next."""
    deadline = time.monotonic() + _CLOSED_S
    with suppress(OSError):
        while time.monotonic() < deadline:
            socket.create_connection((environment.master_addr or "", environment.master_port or 0), timeout=1).close()
            time.sleep(0.05)


# --- The first rank of each node: clocks, the shared directory, links ---


def _measure(results: Results, me: int, gather: Gather) -> None:
    """Fill in the clocks, the storage and the links, with the first ranks of the other nodes."""
    gather(None)  # so that all read their clocks at once
    clocks = gather(time.time())
    results.clock_s = {node: clock - clocks[0] for node, clock in enumerate(clocks)}
    if results.spec.run is not None:
        run = Path(results.spec.run)
        with ExitStack() as stack:
            stack.enter_context(handle_signals(STOP_SIGNALS, _stop))
            directory = facts.nearest_existing(run)
            mark = directory / f".paceline-doctor-{secrets.token_hex(4)}"
            error = facts.obstacle(run) or facts.leave_mark(mark, stack)
            others = {
                node: directory / name
                for node, (name, other_error) in enumerate(gather([mark.name, error]))
                if node != me and other_error is None
            }
            deadline = time.monotonic() + _LATE_S
            while not all(path.exists() for path in others.values()) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            seen = [node for node, path in others.items() if path.exists()]
            unlocked = [node for node in seen if facts.can_lock(others[node])]
            storage = {**facts.inspect_storage(run), "error": error, "seen": seen, "unlocked": unlocked}
            results.storage = dict(enumerate(gather(storage)))  # until then the marks stay
    if results.nodes > 1:
        _measure_links(results, me, gather)


def _stop(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _measure_links(results: Results, me: int, gather: Gather) -> None:
    """Measure streams between pairs of nodes, all of them or a part on many nodes, and over other interfaces."""
    used = {node: own["address"] for node, own in results.facts.items()}

    def send(targets: Mapping[int, int], addresses: Mapping[int, str]) -> dict[Pair, float | str]:
        """Have these nodes send to their targets at the same time."""
        to = targets.get(me)
        flows = gather(None if to is None else _send(addresses[to], results.facts[to]["ports"].get(addresses[to], 0)))
        return {(source, to): flows[source] for source, to in targets.items()}

    def neighbours(distance: int) -> dict[int, int]:
        return {node: (node + distance) % results.nodes for node in used}

    powers = [1 << power for power in range((results.nodes - 1).bit_length())]
    for distance in range(1, results.nodes) if results.nodes <= _ALL_PAIRS else powers:
        results.flows |= send(neighbours(distance), used)
    for rate, (source, to) in slow_links(results.flows)[:_REPEATED]:  # once more, alone, in case of other traffic
        again = known_rates(send({source: to}, used))
        results.flows[source, to] = max(rate, *again.values())
    for name, addresses in common_interfaces(results.facts).items():
        if addresses != used:
            results.other_flows[name] = send(neighbours(1), addresses)


# --- Streams over TCP: the receiver counts ---


def _serve(address: str) -> dict[str, int]:
    """Listen on this address and on those of all interfaces; return the ports by address."""
    ports = {}
    for each in {address, *(interface["address"] for interface in facts.interfaces())}:
        with suppress(OSError):
            listener = socket.create_server((each, 0), backlog=256)
            ports[each] = listener.getsockname()[1]
            threading.Thread(target=_accept, args=(listener,), daemon=True).start()
    return ports


def _accept(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_count, args=(connection,), daemon=True).start()


def _count(connection: socket.socket) -> None:
    """Count what comes for a while, and answer with the bytes/s."""
    with connection, suppress(OSError):
        connection.settimeout(_TIMEOUT_S)
        received = len(connection.recv(len(_PIECE)))
        end = time.monotonic() + _STREAM_S
        while (left_s := end - time.monotonic()) > 0:
            connection.settimeout(left_s)
            with suppress(TimeoutError):
                received += len(connection.recv(len(_PIECE)))
        connection.settimeout(_TIMEOUT_S)
        connection.sendall(struct.pack("!d", received / _STREAM_S))
        while connection.recv(len(_PIECE)):  # closed with data unread, it would lose the answer
            pass


def _send(host: str, port: int) -> float | str:
    """Send over one TCP stream for a while; return the bytes/s that arrived, or the error."""
    try:
        with socket.create_connection((host, port), timeout=_TIMEOUT_S) as connection:
            # Discard what the kernel still holds at the end.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end = time.monotonic() + 1.5 * _STREAM_S
            while (left_s := end - time.monotonic()) > 0:
                connection.settimeout(left_s)
                with suppress(TimeoutError):
                    connection.send(_PIECE)
            connection.settimeout(_TIMEOUT_S)
            rate: float = struct.unpack("!d", connection.recv(8))[0]
            return rate
    except (OSError, struct.error) as error:
        return "no answer" if isinstance(error, TimeoutError) else getattr(error, "strerror", None) or str(error)


# --- All ranks: an all-reduce in the job's process group ---


def _all_reduce(environment: Environment, interface: str | None) -> dict[str, Any]:
    """Return the time and the bus bandwidth as in nccl-tests, or the error; {} for one rank."""
    from torch import distributed as dist

    from paceline.parallel.world import open_world
    from paceline_checks.run_collectives import GroupEngine, measure

    try:
        with open_world(
            environment, interface=interface, init_timeout_s=_COLLECTIVE_S, collective_timeout_s=_COLLECTIVE_S
        ) as world:
            if world.world_size == 1:
                return {}
            engine = GroupEngine(dist.group.WORLD, world.rank, world.world_size, world.device, world.backend)
            [timing] = measure(engine, ["all_reduce"], [_BYTES], iterations=_ROUNDS, warmup=1)
            if timing.wrong:
                return {"error": "its sum is wrong"}
            how = {"backend": world.backend, "ranks": world.world_size, "bytes": _BYTES}
            return {**how, "ms": timing.time_us / 1e3, "bytes_per_s": timing.busbw_gbps * 1e9}
    except Exception as error:
        text = str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
        text = f"{socket.gethostname()}: {text.strip()}".partition("\n")[0]
        return {"error": text, "is_lost": isinstance(error, PeerLostError)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
