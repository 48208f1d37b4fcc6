"""The client of etcd and its sessions, against a real member: TLS, users, members that do not answer, leases."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.lab.etcd import why_not
from tests.processes import Processes

from paceline.core.environment import EtcdEndpoints, parse_coordinator
from paceline.core.errors import ConfigError
from paceline_etcd.client import (
    EtcdClient,
    EtcdCredentials,
    EtcdRecord,
    EtcdSession,
    EtcdSnapshot,
    EtcdUnavailableError,
    Operation,
    Read,
    Resign,
    Write,
)

pytestmark = [pytest.mark.system, pytest.mark.timeout(90)]

Start = Callable[..., EtcdEndpoints]


@pytest.fixture
def start(run_processes: Processes, tmp_path: Path, wait_until: Callable[..., None]) -> Start:
    """Start one member of etcd on loopback; with a directory of certificates it asks for TLS."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)

    def start_member(certificates: Path | None = None) -> EtcdEndpoints:
        clients, peers = run_processes.free_port(), run_processes.free_port()
        scheme, more = "http", []
        if certificates is not None:
            scheme = "https"
            names = {"--cert-file": "server.pem", "--key-file": "server.key", "--trusted-ca-file": "ca.pem"}
            more = [word for option, name in names.items() for word in (option, str(certificates / name))]
            more.append("--client-cert-auth")
        peer = f"http://127.0.0.1:{peers}"
        urls = f"{scheme}://127.0.0.1:{clients}"
        run_processes.start(
            [
                *("etcd", "--name", "one", "--data-dir", tmp_path / f"etcd-{clients}", "--log-level", "error"),
                *("--listen-client-urls", urls, "--advertise-client-urls", urls, *more),
                *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                *("--initial-cluster", f"one={peer}"),
            ]
        )
        endpoints = EtcdEndpoints(certificates is not None, (("127.0.0.1", clients),))

        def answers() -> bool:
            client = EtcdClient(endpoints, credentials(certificates), 2)
            try:
                client.check()
            except EtcdUnavailableError:
                return False
            return True

        wait_until(answers, "etcd", timeout_s=30)
        return endpoints

    return start_member


def credentials(certificates: Path | None = None, user: str = "", password: str = "") -> EtcdCredentials:
    environ = {"ETCDCTL_USER": user, "ETCDCTL_PASSWORD": password}
    if certificates is not None:
        names = {"CACERT": "ca.pem", "CERT": "client.pem", "KEY": "client.key"}
        environ |= {f"ETCDCTL_{name}": str(certificates / file) for name, file in names.items()}
    return EtcdCredentials.from_environment(environ)


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """An authority, and what it has signed for a server on loopback and for a client."""
    path = tmp_path / "certificates"
    path.mkdir()

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=path, check=True, capture_output=True, timeout=30)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority", "-days", "2")
    for name in ("server", "client"):
        (path / "extensions").write_text("subjectAltName=IP:127.0.0.1\n")
        openssl("req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", "/")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "extensions")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signed)
    return path


def test_a_member_that_does_not_answer_is_passed_over(start: Start, run_processes: Processes) -> None:
    [address] = start().addresses
    closed = ("127.0.0.1", run_processes.free_port())
    client = EtcdClient(EtcdEndpoints(False, (closed, address)), credentials(), 2)
    client.check()
    nobody = EtcdClient(EtcdEndpoints(False, (closed,)), credentials(), 2)
    with pytest.raises(EtcdUnavailableError, match=rf"etcd at 127.0.0.1:{closed[1]} does not answer \(.*refused"):
        nobody.check()


def test_tls_and_a_user(start: Start, certificates: Path) -> None:
    endpoints = start(certificates)
    root = EtcdClient(endpoints, credentials(certificates), 5)
    prefix = {"key": "L3BhY2VsaW5lLw==", "range_end": "L3BhY2VsaW5lMA=="}  # /paceline/
    root.call("/v3/auth/role/add", {"name": "training"})
    root.call("/v3/auth/role/grant", {"name": "training", "perm": {"permType": "READWRITE", **prefix}})
    for user, role in (("root", "root"), ("ann", "training"), ("eve", "")):
        root.call("/v3/auth/user/add", {"name": user, "password": "s3cret"})
        if role:
            root.call("/v3/auth/user/grant", {"user": user, "role": role})
    root.call("/v3/auth/enable", {})

    allowed = EtcdClient(endpoints, credentials(certificates, "ann:s3cret"), 5)
    allowed.check()
    allowed._auth_token = "expired"
    allowed.check()  # with a new token
    for who in (
        credentials(certificates, "ann", "wrong"),
        credentials(certificates, "eve", "s3cret"),
        credentials(certificates),
    ):
        client = EtcdClient(endpoints, who, 5)
        with pytest.raises(ConfigError, match="rejects this user") as caught:
            client.check()
        assert "s3cret" not in f"{caught.value} {who}"
        assert "wrong" not in f"{caught.value} {who}"
    stranger = EtcdClient(endpoints, EtcdCredentials(), 5)
    with pytest.raises(EtcdUnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
        stranger.check()


class Session:
    """A session whose replies a test waits for."""

    def __init__(self, endpoints: EtcdEndpoints, node: str, ttl_s: int = 5) -> None:
        self._woken = threading.Event()
        self._session = EtcdSession(EtcdClient(endpoints, credentials(), 2), node, ttl_s, self._woken.set)

    def ask(self, operation: Operation) -> EtcdSnapshot:
        self._session.submit(operation, "job")
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            self._woken.wait(1)
            for asked, reply in self._session.take_replies():
                if asked == operation:
                    assert isinstance(reply, EtcdSnapshot), reply
                    return reply
        pytest.fail("no reply")

    def unasked(self) -> list[object]:
        return [reply for asked, reply in self._session.take_replies() if asked is None]

    def close(self, *, deletes: bool = False) -> None:
        self._session.close(deletes=deletes)


@pytest.fixture
def open_session(start: Start) -> Iterator[Callable[..., Session]]:
    endpoints = start()
    sessions: list[Session] = []

    def open_one(node: str, **options: int) -> Session:
        sessions.append(Session(endpoints, node, **options))
        return sessions[-1]

    yield open_one
    for session in sessions:
        session.close()


def test_of_two_that_write_one_succeeds_and_the_other_sees_it(open_session: Callable[..., Session]) -> None:
    a, b = open_session("a"), open_session("b")
    seen = b.ask(Read())
    assert seen.record is None
    written = a.ask(Write(EtcdSnapshot(), EtcdRecord(1, "a", 0, ("a",))))
    assert (written.record, written.holder) == (EtcdRecord(1, "a", 0, ("a",)), "a")
    assert b.ask(Write(seen, EtcdRecord(1, "b", 0, ("b",)))).record == written.record
    assert b.ask(Resign()).holder == "a"  # it does not hold it
    taken = b.ask(Write(b.ask(Read()), EtcdRecord(2, "b", 0, ("a", "b"))))
    assert (taken.holder, taken.alive) == ("b", frozenset("ab"))
    assert a.ask(Write(written, EtcdRecord(1, "a", 1, ("a",)))).record == taken.record
    resigned = b.ask(Resign())
    assert (resigned.holder, resigned.record) == ("", taken.record)


def test_what_is_bound_to_a_lease_vanishes_with_it_and_all_with_the_job(open_session: Callable[..., Session]) -> None:
    a, b = open_session("a"), open_session("b")
    a.ask(Write(EtcdSnapshot(), EtcdRecord(1, "a", 0, ("a",))))
    a.close()
    seen = b.ask(Read())
    assert (seen.holder, seen.alive, seen.record) == ("", frozenset("b"), EtcdRecord(1, "a", 0, ("a",)))
    b.ask(Write(seen, EtcdRecord(2, "b", 0, ("b",))))
    b.close(deletes=True)
    assert open_session("c").ask(Read()) == EtcdSnapshot(alive=frozenset("c"))


@pytest.mark.parametrize(
    ("text", "endpoints"),
    [
        ("etcd://a:1,b", EtcdEndpoints(False, (("a", 1), ("b", 2379)))),
        ("etcds://[::1]:7,[::2]/", EtcdEndpoints(True, (("::1", 7), ("::2", 2379)))),
    ],
)
def test_coordinators(text: str, endpoints: EtcdEndpoints) -> None:
    assert parse_coordinator(text) == endpoints


@pytest.mark.parametrize("text", ["", "etcd://", "http://a:1", "etcd://a:0", "etcd://a:b", "a:2379"])
def test_what_is_no_coordinator(text: str) -> None:
    with pytest.raises(ConfigError, match="--coordinator must be"):
        parse_coordinator(text)


def test_no_password_is_taken_from_the_command_line_or_repeated() -> None:
    with pytest.raises(ConfigError, match="ETCDCTL_PASSWORD") as caught:
        parse_coordinator("etcd://ann:s3cret@a:1")
    assert "s3cret" not in str(caught.value)
    with pytest.raises(ConfigError, match="ETCDCTL_USER is set without a password"):
        EtcdCredentials.from_environment({"ETCDCTL_USER": "ann"})
    with pytest.raises(ConfigError, match="must both be set"):
        EtcdCredentials.from_environment({"ETCDCTL_CERT": "client.pem"})
