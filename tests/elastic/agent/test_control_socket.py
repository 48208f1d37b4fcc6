"""The agent's socket: who may ask, what is answered, and that nothing of it stays."""

from __future__ import annotations

import json
import os
import selectors
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from paceline.core import ownership
from paceline.core.errors import ConfigError, RunDirectoryError
from paceline.elastic import agent
from paceline.elastic.agent import AgentConnection, AgentGone, ControlSocket, RunStatus, WorkerStatus
from paceline.runs.directory import RunDirectory

STATUS = RunStatus(
    generation=3,
    target=2,
    whole=True,
    stopping=False,
    recoveries=1,
    step=40,
    workers=(WorkerStatus(0, 1, "a", 11, 40, "training"), WorkerStatus(None, 0, "b", None, -1, "starting")),
)


class Job:
    """Serves a control socket in a thread, as an agent's loop does."""

    def __init__(self, directory: RunDirectory) -> None:
        self.asked: list[int] = []
        self.gathered = 0
        self._stop = os.eventfd(0)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self._stop, selectors.EVENT_READ, lambda: None)
        self.socket = ControlSocket(directory, self.selector, self)
        self.socket.publish()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def status(self) -> RunStatus:
        return STATUS

    def scale(self, nproc: int) -> None:
        if nproc > 4:
            raise ConfigError("too many")
        self.asked.append(nproc)

    def scale_nodes(self, nodes: int) -> None:
        raise ConfigError("one machine")

    def gather(self) -> None:
        self.gathered += 1

    def _serve(self) -> None:
        while True:
            for key, _ in self.selector.select():
                if key.fd == self._stop:
                    return
                key.data()

    def end(self) -> None:
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        self.socket.close()
        self.socket.withdraw()
        self.selector.close()
        os.close(self._stop)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    # Longer than the path of a socket may be.
    directory = RunDirectory(tmp_path / ("run" * 40))
    directory.path.mkdir()
    return directory


@pytest.fixture
def job(directory: RunDirectory) -> Iterator[Job]:
    job = Job(directory)
    try:
        yield job
    finally:
        job.end()


def test_status_and_orders_come_through(job: Job, directory: RunDirectory) -> None:
    with AgentConnection(directory) as agent:
        assert agent.status() == STATUS
        assert agent.status().ranks == STATUS.workers[:1]
        assert agent.scale(nproc=3) == STATUS
        assert agent.gather() == STATUS
    assert (job.asked, job.gathered) == ([3], 1)


def test_what_cannot_be_is_told_and_the_agent_serves_on(job: Job, directory: RunDirectory) -> None:
    with AgentConnection(directory) as agent, AgentConnection(directory) as other:
        with pytest.raises(ConfigError, match="too many"):
            agent.scale(nproc=5)
        with pytest.raises(ConfigError, match="one machine"):
            agent.scale(nodes=2)
        with pytest.raises(ConfigError, match="unknown request"):
            agent.scale(nproc=True)
        for content in (b"{", b"[]", b'{"exec": "rm"}', b"\xff\xfe", b'{"scale": {"nproc": "3"}}'):
            agent._socket.send(content)
            assert "unknown request" in json.loads(agent._socket.recv(65536))["error"]
        assert other.status() == STATUS
    assert job.asked == []


def test_only_this_user_can_reach_it(job: Job, directory: RunDirectory) -> None:
    path = Path(json.loads(directory.agent.read_bytes())["socket"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_another_users_process_is_not_answered(
    job: Job, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = json.loads(directory.agent.read_bytes())["socket"]
    monkeypatch.setattr(agent, "_user_of", lambda connection: os.geteuid() + 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(10)
        stranger.connect(path)
        answer = b""
        with suppress(ConnectionError):
            stranger.send(b'{"scale": {"nproc": 1}}')
            answer = stranger.recv(100)
        assert answer == b""
    assert job.asked == []
    # Nor does a command talk to a socket that another user serves.
    with pytest.raises(RunDirectoryError, match="not running"):
        AgentConnection(directory)


def test_a_flood_of_connections_ends_none_that_is_served(job: Job, directory: RunDirectory) -> None:
    with AgentConnection(directory) as agent:
        others = []
        for _ in range(40):
            try:
                others.append(AgentConnection(directory))
            except RunDirectoryError:
                continue
        assert agent.status() == STATUS
        for other in others:
            other.__exit__(None, None, None)
        assert agent.status() == STATUS


def test_nothing_stays_and_who_asks_then_is_told(directory: RunDirectory) -> None:
    job = Job(directory)
    home = Path(json.loads(directory.agent.read_bytes())["socket"]).parent
    with AgentConnection(directory) as agent:
        job.end()
        with pytest.raises(AgentGone):
            agent.status()
    assert not home.exists()
    assert not directory.agent.exists()
    with pytest.raises(RunDirectoryError, match="is not running"):
        AgentConnection(directory)
    with directory.locked(), pytest.raises(RunDirectoryError, match="--recover inplace"):
        AgentConnection(directory)
    with pytest.raises(RunDirectoryError, match="there is no run"):
        AgentConnection(RunDirectory(directory.path / "no"))


def test_a_note_that_is_no_note_is_an_error_in_words(directory: RunDirectory) -> None:
    for content in (b"", b"[1]", b'{"socket": 3}', b'{"socket": "/nowhere/at/all"}'):
        directory.agent.write_bytes(content)
        with pytest.raises(RunDirectoryError, match="is not running"):
            AgentConnection(directory)


def test_without_a_short_folder_it_says_which_to_set(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(ownership.tempfile, "gettempdir", lambda: "/long" * 40)
    monkeypatch.setattr(ownership.os, "access", lambda path, mode: False)
    with pytest.raises(RunDirectoryError, match="Set TMPDIR"):
        agent._private_directory()
