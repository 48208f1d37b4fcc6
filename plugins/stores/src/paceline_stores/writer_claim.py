"""Which run directory is copied to an address: two that both continue one run must not be mixed there."""

from __future__ import annotations

import json
import logging
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from paceline.core.errors import CheckpointError, ConfigError
from paceline.core.files import read_document, write_atomically
from paceline.core.ownership import Owner, boot_id, own_prefix
from paceline.runs.checkpoint_manifest import parse_json
from paceline.runs.directory import RunDirectory
from paceline_stores.objects import ObjectStore

WRITER = "writer.json"
TOKEN = "backup.id"
"""The file of a run directory that tells it apart from a copy of the run on another machine."""

BEAT_S = 20.0
SILENT_S = 60.0
_LONG_AGO_S = 3600.0  # such a claim is not watched: clocks of machines are hardly an hour apart
_LOOK_S = 2.0
_READS = 10
_MOST_BYTES = 2**16

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClaimRecord:
    """A process that copies a run, as ``writer.json`` tells.

    Attributes:
        token: of its run directory.
        owner: the prefix of its process's names.
        beat: changes every :data:`BEAT_S` seconds.
        time: of the last change, in seconds since the epoch.
    """

    token: str
    host: str
    boot: str
    owner: str
    directory: str
    beat: str = ""
    time: float = 0.0

    def __str__(self) -> str:
        owner = Owner.parse(self.owner)
        process = "a process" if owner is None else f"process {owner.pid}"
        return f"{process} of {self.host}, for {self.directory}, seen {max(0.0, time.time() - self.time):.0f} s ago"

    @classmethod
    def parse(cls, content: bytes) -> ClaimRecord | None:
        """Return the writer; None if the content is damaged."""
        with suppress(CheckpointError, TypeError):
            writer = cls(**parse_json(content))
            if all(isinstance(getattr(writer, name), str) for name in _TEXTS) and isinstance(writer.time, int | float):
                return writer
        return None

    def is_alive(self) -> bool | None:
        """Return whether the process runs; None if that is not known here."""
        owner = Owner.parse(self.owner)
        if owner is None or self.boot != boot_id() or not self.boot or not owner.is_visible:
            return False if abs(time.time() - self.time) > _LONG_AGO_S else None
        return not owner.has_ended


_TEXTS = ("token", "host", "boot", "owner", "directory", "beat")


class WriterClaim:
    """A claim to write to an address, held from :meth:`take` until :meth:`release`, and renewed by a thread.

    The claim is a run directory's: any process of the run may renew it.
    """

    def __init__(self, objects: ObjectStore, run: RunDirectory) -> None:
        self._objects = objects
        self._run = run
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._rival: ClaimRecord | None = None

    @property
    def is_held(self) -> bool:
        """Whether this process renews it."""
        return self._thread is not None

    def take(self) -> None:
        """Take the claim; wait for that of a process of another machine to become old.

        Raises:
            ConfigError: another process renews it; the message says which.
            StoreError: the store denies it.
        """
        mine = self._writer()
        other = self._read()
        if other is not None and other.token != mine.token:
            self._wait_for_end_of(other)
        if not self._objects.write(WRITER, _content(mine), new=other is None):
            rival = self._read()
            if rival is not None and rival.token != mine.token:
                raise self._refusal(rival)
        self._rival = None
        self._ended.clear()
        self._thread = threading.Thread(target=self._renew, name="paceline-writer-claim", daemon=True)
        self._thread.start()

    def require(self) -> None:
        """Check that no other process has taken the claim.

        Raises:
            CheckpointError: another has, as after an interruption of the network.
        """
        other = self._read()
        if other is not None and other.token != self._writer().token:
            self._rival = other
        if self._rival is not None:
            raise CheckpointError(f"{self._objects.address} is written by {self._rival} by now.")

    def release(self) -> None:
        """Give it up."""
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None
            self.require()
            self._objects.remove([WRITER])

    def _renew(self) -> None:
        while not self._ended.wait(BEAT_S):
            with suppress(CheckpointError):
                self.require()
                self._objects.write(WRITER, _content(self._writer()))

    def _wait_for_end_of(self, other: ClaimRecord) -> None:
        alive = other.is_alive()
        if alive is None:
            _log.info("waiting up to %.0f s whether %s is still written by %s", SILENT_S, self._objects.address, other)
            deadline = time.monotonic() + SILENT_S
            while alive is None and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
                now = self._read()
                alive = False if now is None else (True if now != other else None)
        if alive:
            raise self._refusal(other)

    def _refusal(self, other: ClaimRecord) -> ConfigError:
        return ConfigError(
            f"{self._objects.address} is written by {other}. Wait for that run to end, or give another --backup-to."
        )

    def _read(self) -> ClaimRecord | None:
        for _ in range(_READS):
            content = self._objects.read(WRITER, _MOST_BYTES)
            if content is None:
                return None
            if (record := ClaimRecord.parse(content)) is not None:
                return record
            time.sleep(0.1)  # a file:// store shows it while it is written
        return None

    def _writer(self) -> ClaimRecord:
        return ClaimRecord(
            token=self._token(),
            host=socket.gethostname(),
            boot=boot_id(),
            owner=own_prefix(),
            directory=str(self._run.path.absolute()),
        )

    def _token(self) -> str:
        path = self._run.path / TOKEN
        try:
            return read_document(path).decode(errors="replace")
        except FileNotFoundError:
            write_atomically(path, secrets.token_hex(8).encode())
            return read_document(path).decode(errors="replace")


def _content(writer: ClaimRecord) -> bytes:
    document: dict[str, Any] = {**asdict(writer), "beat": secrets.token_hex(4), "time": time.time()}
    return json.dumps(document, indent=1).encode()
