"""The rendezvous of a job's processes in rank 0's store.

On one node every socket listens on loopback only. ``TCPStore("127.0.0.1", ...)`` would listen on every interface, so
this module binds the socket and passes it to the store.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistError, DistNetworkError, DistStoreError

from paceline.core.environment import Environment, is_loopback, parse_endpoint
from paceline.core.errors import ConfigError, PeerLostError
from paceline.core.files import private_directory, write_atomically
from paceline.core.sockets import LOOPBACK, bound_socket, inherited_socket, job_port, meeting_address
from paceline.torch_internals import PrefixStore, Store, TCPStore

_TOKEN = "paceline/job"
_RETRY_S = 0.02


@dataclass(frozen=True)
class RendezvousInfo:
    """The result of a rendezvous.

    Attributes:
        store: a store without keys of earlier worlds.
        generation: rank 0's.
        ranks: each one's description of itself.
    """

    store: Store
    generation: int
    ranks: tuple[Mapping[str, Any], ...]


@contextmanager
def rendezvous(
    environment: Environment,
    description: Mapping[str, Any],
    *,
    generation: int,
    interface: str | None,
    timeout_s: float,
) -> Iterator[RendezvousInfo]:
    """Find the store and wait for all ranks; clean up on exit.

    Raises:
        PeerLostError: some ranks did not appear in time; names them.
        ConfigError: rank 0's address is unknown, or its port cannot be bound.
    """
    deadline = time.monotonic() + timeout_s
    if environment.rank == 0 and not environment.uses_agent_store:
        with _serve_store(environment, interface, timeout_s) as store:
            yield _meet(store, environment, description, generation, deadline, timeout_s)
        return
    while True:
        store = _connect_to_store(environment, deadline, timeout_s)
        try:
            meeting = _meet(store, environment, description, generation, deadline, timeout_s)
            break
        except DistNetworkError:
            # That was the store of an earlier world of this job, which is closing.
            _pause(environment, deadline, timeout_s)
    yield meeting


def _meet(
    store: Store,
    environment: Environment,
    description: Mapping[str, Any],
    generation: int,
    deadline: float,
    timeout_s: float,
) -> RendezvousInfo:
    """Agree on a term that no earlier incarnation of any rank has used, and exchange descriptions.

    torchrun's agent keeps one store while it restarts its workers, and counts restarts per node, so keys of dead
    workers are still there, which a new worker must ignore (stock init_process_group does not, and hangs). Here a rank
    announces itself with a fresh nonce; rank 0, whose term comes from an atomic counter, acknowledges nonces until each
    rank has confirmed this term.
    """
    rank, world_size = environment.rank, environment.world_size
    nonce = secrets.token_hex(8)
    hello = json.dumps({"nonce": nonce, "description": dict(description)})
    store.set(f"hello/{rank}", hello)
    if rank == 0:
        term = store.add("term", 1)
        hellos = [hello, *_confirmed_hellos(store, world_size, term, deadline, timeout_s)]
        descriptions = [json.loads(text)["description"] for text in hellos]
        meeting = json.dumps({"generation": generation, "ranks": descriptions})
        store.set(f"ranks/{term}", meeting)
    else:
        term = int(_wait_for(store, f"ack/{rank}/{nonce}", world_size, "hello", deadline, timeout_s))
        store.set(f"confirm/{term}/{rank}", hello)
        meeting = _wait_for(store, f"ranks/{term}", world_size, f"confirm/{term}", deadline, timeout_s)
    document = json.loads(meeting)
    return RendezvousInfo(PrefixStore(f"gen{term}", store), document["generation"], tuple(document["ranks"]))


def _confirmed_hellos(store: Store, world_size: int, term: int, deadline: float, timeout_s: float) -> list[str]:
    acknowledged: dict[int, bytes] = {}
    confirmed: dict[int, str] = {}
    while len(confirmed) < world_size - 1:
        waiting = [r for r in range(1, world_size) if r not in confirmed]
        for rank in waiting:
            if rank in acknowledged and store.check([f"confirm/{term}/{rank}"]):
                confirmed[rank] = store.get(f"confirm/{term}/{rank}").decode()
            elif store.check([f"hello/{rank}"]):
                hello = store.get(f"hello/{rank}")
                if acknowledged.get(rank) != hello:
                    store.set(f"ack/{rank}/{json.loads(hello)['nonce']}", str(term))
                    acknowledged[rank] = hello
        if len(confirmed) < world_size - 1:
            if time.monotonic() > deadline:
                raise _absent([r for r in waiting if r not in confirmed], world_size, timeout_s)
            time.sleep(_RETRY_S / 4)
    return [confirmed[rank] for rank in range(1, world_size)]


def _wait_for(store: Store, key: str, world_size: int, arrivals: str, deadline: float, timeout_s: float) -> str:
    try:
        # A little longer than rank 0 waits, so that rank 0 reports the missing ranks.
        store.wait([key], timedelta(seconds=max(0.1, deadline - time.monotonic()) + 1))
    except DistStoreError:
        missing = [r for r in range(1, world_size) if not store.check([f"{arrivals}/{r}"])]
        raise _absent(missing or [0], world_size, timeout_s) from None
    value: bytes = store.get(key)
    return value.decode()


def _absent(ranks: list[int], world_size: int, timeout_s: float, problem: str = "") -> PeerLostError:
    named = ", ".join(str(r) for r in ranks[:16]) + (", ..." if len(ranks) > 16 else "")
    cause = problem or "See their logs for the cause."
    return PeerLostError(
        f"{len(ranks)} of {world_size} ranks did not appear within {timeout_s:g} s: rank {named}. "
        f"{cause} If they start slowly, raise --init-timeout.",
        rank=ranks[0],
    )


_SERVED: dict[tuple[str | None, int | None, str | None], tuple[TCPStore, str]] = {}
"""Stores that this process serves, with their tokens; later worlds of a job reuse them."""


@contextmanager
def _serve_store(environment: Environment, interface: str | None, timeout_s: float) -> Iterator[Store]:
    """Listen, serve the store, and publish its address, on rank 0."""
    key = (environment.master_addr, environment.master_port, environment.job_id)
    if key not in _SERVED:
        with _bound_listener(environment, interface) as listener:
            host, port = listener.getsockname()[:2]
            store = TCPStore(
                LOOPBACK if host == "0.0.0.0" else host,
                port,
                environment.world_size,
                is_master=True,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                master_listen_fd=os.dup(listener.fileno()),
            )
        token = secrets.token_hex(16) if _uses_file(environment) else environment.job_id or ""
        store.set(_TOKEN, token)
        _SERVED[key] = store, token
    store, token = _SERVED[key]
    if not _uses_file(environment):
        yield store
        return
    address_file = _rendezvous_file(environment)
    write_atomically(address_file, json.dumps({"port": store.port, "token": token}).encode())
    try:
        yield store
    finally:
        address_file.unlink(missing_ok=True)


def _uses_file(environment: Environment) -> bool:
    return environment.is_single_node and (environment.master_addr is None or environment.master_port is None)


def _bound_listener(environment: Environment, interface: str | None) -> socket.socket:
    if environment.listen_fd is not None:
        return inherited_socket(environment.listen_fd)
    if _uses_file(environment):
        return bound_socket(LOOPBACK, 0)
    if environment.master_addr is not None and environment.master_port is not None:
        host, ports = environment.master_addr, [environment.master_port]
    else:
        host, ports = "", _agreed_ports(environment)
    if environment.is_single_node or is_loopback(host):
        host = LOOPBACK
    else:
        host = meeting_address(host, interface)
    failure = None
    for port in ports:
        try:
            return bound_socket(host, port)
        except OSError as error:
            failure = error.strerror
    raise ConfigError(
        f"rank 0 cannot listen on {host or 'any address'}, port {' or '.join(map(str, ports))}: {failure}. "
        "Choose another port (MASTER_PORT or --rdzv-endpoint), or end the process that uses it."
    )


def _connect_to_store(environment: Environment, deadline: float, timeout_s: float) -> Store:
    """Connect to the store once it exists, on ranks above 0 and all ranks of torchrun."""
    problem = ""
    while True:
        for host, port, token in _candidates(environment):
            try:
                # The plain probe keeps c10d from logging a warning for each refused connection.
                with socket.create_connection((host, port), timeout=5) as probe:
                    address = probe.getpeername()[0]
                problem = ""
                store = TCPStore(
                    address,
                    port,
                    environment.world_size,
                    is_master=False,
                    timeout=timedelta(seconds=max(1.0, min(10.0, deadline - time.monotonic()))),
                )
                if environment.uses_agent_store or (store.check([_TOKEN]) and store.get(_TOKEN).decode() == token):
                    store.set_timeout(timedelta(seconds=timeout_s))
                    return store
            except (OSError, DistError) as error:
                reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
                problem = (
                    f"Rank {environment.rank} does not reach it at {host}:{port} ({reason}): check that it runs, "
                    f"and open TCP port {port} between the nodes, or choose another port."
                )
        _pause(environment, deadline, timeout_s, problem)


def agree_once(
    environment: Environment,
    key: str,
    decide: Callable[[], str],
    *,
    rdzv_endpoint: str | None,
    timeout_s: float,
) -> str:
    """Return the decision of the first start of a job, also after torchrun has restarted the workers.

    torchrun's agent keeps its store for the whole job; other launchers need nothing. One rank calls this. Errors of
    ``decide`` are not stored.

    Args:
        environment: the rank of this process.
        key: names the decision.
        decide: decides, if the job has not done so yet.
        rdzv_endpoint: HOST:PORT of torchrun's rendezvous on several nodes.
        timeout_s: how long to wait for the store.

    Raises:
        PeerLostError: the store does not answer.
    """
    if environment.source != "torchrun":
        return decide()
    if not environment.uses_agent_store:
        if rdzv_endpoint is None:
            return decide()
        host, port = parse_endpoint(rdzv_endpoint, "--rdzv-endpoint")
        environment = replace(environment, master_addr=host, master_port=port, uses_agent_store=True)
    store = _connect_to_store(environment, time.monotonic() + timeout_s, timeout_s)
    if not store.check([key]):
        store.set(key, decide())
    value: bytes = store.get(key)
    return value.decode()


def _candidates(environment: Environment) -> list[tuple[str, int, str]]:
    """Return possible addresses of rank 0's store: host, port, and the token that it must have."""
    token = environment.job_id or ""
    if environment.master_addr is not None and environment.master_port is not None:
        local = environment.is_single_node and not environment.uses_agent_store
        return [(LOOPBACK if local else environment.master_addr, environment.master_port, token)]
    if _uses_file(environment):
        try:
            address = json.loads(_rendezvous_file(environment).read_bytes())
            return [(LOOPBACK, int(address["port"]), str(address["token"]))]
        except FileNotFoundError:
            return []
    ports = _agreed_ports(environment)
    return [(environment.first_host or "", port, token) for port in ports]


def _pause(environment: Environment, deadline: float, timeout_s: float, problem: str = "") -> None:
    if time.monotonic() > deadline:
        if environment.uses_agent_store:
            where = f"{environment.master_addr}:{environment.master_port}"
            raise PeerLostError(f"torchrun's store at {where} did not answer within {timeout_s:g} s.")
        raise _absent([0], environment.world_size, timeout_s, problem)
    time.sleep(_RETRY_S)


def _agreed_ports(environment: Environment) -> list[int]:
    """Return ports that all processes of a Slurm step compute alike; some may be taken."""
    if environment.source != "slurm" or environment.first_host is None or environment.job_id is None:
        raise ConfigError(
            f"{environment.source} started {environment.world_size} processes on several nodes, but "
            "rank 0's address is unknown. Give --rdzv-endpoint HOST:PORT with rank 0's host, or export "
            "MASTER_ADDR and MASTER_PORT."
        )
    return [job_port(environment.job_id, attempt) for attempt in range(8)]


def _rendezvous_file(environment: Environment) -> Path:
    """Return the file with rank 0's port, in a directory that only this user can enter."""
    # Without a job id, the processes of a job on one node still share their parent.
    key = f"{environment.source}/{environment.job_id or os.getppid()}"
    return private_directory() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
