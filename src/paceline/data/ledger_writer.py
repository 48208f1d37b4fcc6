"""Writing the ledger, on disks that may be full or fail for a while."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

from paceline.data.ledger import FORMAT, generations, ledger_path
from paceline.data.order import DataOrder
from paceline.errors import RunDirectoryError, UnwritableError
from paceline.run_directory import fsync_directory

_MOST_BYTES = 64 * 2**20  # of entries that wait for the disk: a million steps


class LedgerWriter:
    """Writes one generation's file; one process of a run has it.

    Entries stay in memory until they are surely on disk: whatever a write or an fsync that failed has left
    in the file is written again, from the last place that is sure. So a disk that was full, or whose
    errors have passed, costs no entry.

    Methods may be called from several threads: the checkpointer's flushes what the trainer
    appends. A killed process leaves at most one line cut short, at the end.

    Args:
        directory: the run's ``ledger/``; it and the file are made by the first :meth:`flush`.
        order: the order of the data, None for a stream.
        generation: 0 for a run's first start, one more at each restart.
        parent_version: the state version that this generation continues from.

    Raises:
        RunDirectoryError: this generation or a later one has a file already.
    """

    def __init__(
        self, directory: Path, order: DataOrder | None, *, generation: int, parent_version: int | None
    ) -> None:
        self.path = ledger_path(directory, generation)
        header = {
            "format": FORMAT,
            "generation": generation,
            "parent_version": parent_version,
            "order": None if order is None else _fields(order),
        }
        latest = max(generations(directory), default=-1)
        if latest >= generation:
            raise self._conflict(ledger_path(directory, latest), generation)
        self._generation = generation
        self._tail = bytearray((json.dumps(header, separators=(",", ":")) + "\n").encode())
        self._sure = 0  # bytes of the file that are surely on disk; the tail follows them
        self._handed = 0  # bytes of the tail that were handed to the system
        self._file: int | None = None
        self._exists = self._in_directory = self._closed = False
        self._appending, self._writing, self._syncing = Lock(), Lock(), Lock()

    @property
    def unsure(self) -> int:
        """Bytes that a power cut would lose now."""
        return len(self._tail)

    def append(
        self,
        *,
        version: int,
        epoch: int,
        step: int,
        start: int,
        stop: int,
        ranks: int | Sequence[int],
        checksum: int,
    ) -> None:
        """Add one committed step, in memory (about 2 us).

        Raises:
            UnwritableError: the disk has taken nothing for so long that the memory for it is used up.
        """
        shared = ranks if isinstance(ranks, int) else "[" + ",".join(map(str, ranks)) + "]"
        line = (
            f'{{"v":{version},"e":{epoch},"t":{step},"a":{start},"b":{stop},"w":{shared},"c":{checksum}}}\n'
        )
        with self._appending:
            if len(self._tail) > _MOST_BYTES:
                raise self._failure(OSError(f"{_MOST_BYTES} bytes wait for the disk, and that is the limit"))
            self._tail += line.encode()

    def flush(self, *, sync: bool) -> None:
        """Hand all entries to the system, which keeps them if this process dies.

        ``sync`` waits for the disk too, so that they survive a power cut; call it so before a
        checkpoint of these steps is committed. After :meth:`close` it still works.

        Raises:
            UnwritableError: the disk is full or gone; no entry is lost, and a later call tries again.
            RunDirectoryError: another process has written this generation's file.
        """
        try:
            with self._writing:
                descriptor = os.dup(self._write())
            try:
                if sync:
                    self._sync(descriptor)
            finally:
                os.close(descriptor)
                if self._closed:
                    self._let_go()
        except OSError as error:
            raise self._failure(error) from error

    def close(self) -> None:
        """Flush and close; a second call does nothing.

        Raises:
            UnwritableError: the last entries cannot be written.
        """
        if not self._closed:
            self._closed = True
            try:
                self.flush(sync=False)
            finally:
                self._let_go()

    def _write(self) -> int:
        """Hand what is new to the system; the descriptor."""
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            only_new = 0 if self._exists else os.O_EXCL
            try:
                self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | only_new, 0o666)
            except FileExistsError as error:
                raise self._conflict(self.path, self._generation) from error
            self._exists = True
        with self._appending:
            handed, new = self._handed, bytes(self._tail[self._handed :])
            position = self._sure + handed
        try:
            while new:
                written = os.pwrite(self._file, new, position)
                new, position = new[written:], position + written
        except OSError:
            self._handed = 0
            raise
        with self._appending:
            self._handed = position - self._sure
        return self._file

    def _sync(self, descriptor: int) -> None:
        with self._syncing:
            with self._appending:
                until = self._sure + self._handed
            try:
                os.fsync(descriptor)
                if not self._in_directory:
                    fsync_directory(self.path.parent)
                    self._in_directory = True
            except OSError:
                # The system has forgotten what it could not write: fsync would succeed the next time.
                with self._writing:
                    self._handed = 0
                raise
            with self._appending:
                gained = until - self._sure
                del self._tail[:gained]
                self._sure, self._handed = until, max(0, self._handed - gained)

    def _let_go(self) -> None:
        with self._writing:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _conflict(self, path: Path, generation: int) -> RunDirectoryError:
        return RunDirectoryError(
            f"{path} exists, so generation {generation} cannot be written: "
            "another process continued this run. End it if it is at work, then resume the run again."
        )

    def _failure(self, error: OSError) -> UnwritableError:
        return UnwritableError(
            f"cannot write the ledger {self.path}: {error.strerror or error}. "
            "Make room or mend the disk, then resume the run."
        )


def _fields(order: DataOrder) -> dict[str, int]:
    """What the header tells of an order; a balanced one's sizes are in a file of their own."""
    values = {field.name: getattr(order, field.name) for field in dataclasses.fields(DataOrder)}
    return {**values, "shuffle": order.shuffle.block}
