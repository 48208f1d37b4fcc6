"""The ledger: the samples of every committed step, appended at each commit and read by the audit."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from paceline.core.errors import RunDirectoryError, RunDirectoryWriteError, UserError
from paceline.core.files import fsync_directory, open_regular, see_listed
from paceline.core.options import Shuffle
from paceline.data.order import DeterministicSampler

# --- The format ---
#
# One JSONL file for each generation, ``ledger/gen-00000.jsonl``. Its first line is a header::
#
#     {"format":1,"generation":0,"parent_version":null,"order":{"num_samples":60000,...}}
#
# ``parent_version`` is the state version from which this generation continued, null for a fresh start. ``order`` holds
# the fields of :class:`~paceline.data.order.DeterministicSampler`, and is null for a stream. Then one line for each
# committed step::
#
#     {"v":1,"e":0,"t":0,"a":0,"b":128,"w":2,"c":5138420}
#
# v: state version after the step; e: epoch; t: step in the epoch; a, b: its positions [a, b) in the
# epoch, but for a stream in the whole run, because the length of its epochs is unknown; w: the world size if the
# micro-batches are split evenly, else the list of each rank's first micro-batch; c: the sum over the step's
# micro-batches of the CRC-32 of the fetched sample numbers (little-endian int64), but for a stream the number of
# documents, or what else it counts, in its samples.
#
# A generation continues from a state of an earlier one. Later steps of the earlier one are not in the model, because
# they were recomputed. The remaining steps are the final lineage.


FORMAT = 1
_ORDER_FIELDS = tuple(field.name for field in dataclasses.fields(DeterministicSampler) if field.compare)


class LedgerEntry(NamedTuple):
    """One committed step; the comment above explains the fields."""

    version: int
    epoch: int
    step: int
    start: int
    stop: int
    ranks: int | tuple[int, ...]
    checksum: int

    @property
    def world_size(self) -> int:
        """The number of ranks in the step."""
        return self.ranks if isinstance(self.ranks, int) else len(self.ranks)


def ledger_path(directory: Path, generation: int) -> Path:
    """Return the path of one generation's file."""
    return directory / f"gen-{generation:05d}.jsonl"


@dataclass(frozen=True)
class LedgerFile:
    """One generation's file and its header."""

    path: Path
    generation: int
    parent_version: int | None
    order: DeterministicSampler | None

    def entries(self) -> Iterator[LedgerEntry]:
        """Yield the committed steps, in the order of the file.

        Raises:
            RunDirectoryError: a line is malformed; a line cut short by a crash at the end is skipped.
        """
        lines = _lines(self.path)
        next(lines)  # the header
        for number, line in enumerate(lines, start=2):
            yield _parse_entry(line, self, number)


@dataclass(frozen=True)
class Ledger:
    """The ledger files of a run, oldest generation first."""

    files: tuple[LedgerFile, ...]

    @property
    def order(self) -> DeterministicSampler | None:
        """The order of the newest generation."""
        return self.files[-1].order

    def order_of(self, entry: LedgerEntry) -> DeterministicSampler | None:
        """Return the order of an entry of the final lineage; a fork may have had another batch."""
        orders = (file.order for file in reversed(self.files) if (file.parent_version or 0) < entry.version)
        return next(orders, self.order)

    def entries(self) -> Iterator[tuple[LedgerEntry, bool]]:
        """Yield each committed step, and whether it is in the final lineage (else it was recomputed).

        Raises:
            RunDirectoryError: a line is malformed.
        """
        for number, file in enumerate(self.files):
            # Every later generation counts, not only the next: it may have gone further back.
            parents = [later.parent_version or 0 for later in self.files[number + 1 :]]
            cut = min(parents, default=None)
            for entry in file.entries():
                yield entry, cut is None or entry.version <= cut


def read_ledger(directory: Path) -> Ledger:
    """Open a run's ledger, which the run may still be writing.

    Raises:
        RunDirectoryError: there is no ledger, a header is malformed, or two headers disagree about the order.
    """
    headers = (_read_header(directory, generation) for generation in sorted(generations(directory)))
    files = [file for file in headers if file is not None]
    if not files:
        raise RunDirectoryError(f"{directory} holds no ledger, because no step of this run was committed.")
    first = files[0]
    for file in files[1:]:
        if _samples_of(file.order) != _samples_of(first.order):
            raise RunDirectoryError(
                f"{file.path}, line 1: its order of the data differs from that of {first.path.name}. "
                "A run has one order, so these files belong to different runs."
            )
    return Ledger(tuple(files))


def _samples_of(order: DeterministicSampler | None) -> tuple[object, ...]:
    """Return what a fork with another batch keeps."""
    return () if order is None else (order.num_samples, order.seed, order.min_microbatch_size, order.shuffle)


def last_recorded_version(directory: Path) -> int | None:
    """Return the state version up to which the files record every step; None without records.

    Raises:
        RunDirectoryError: the last file is malformed.
    """
    for generation in sorted(generations(directory), reverse=True):
        file = _read_header(directory, generation)
        if file is not None:
            last = deque(itertools.islice(_lines(file.path), 1, None), maxlen=1)
            return _parse_entry(last[0], file, 2).version if last else file.parent_version
    return None


def superseded_at(directory: Path, generation: int) -> int | None:
    """Return the lowest state version from which a later generation continued, or None.

    Raises:
        RunDirectoryError: a later header is malformed.
    """
    later = (_read_header(directory, number) for number in generations(directory) if number > generation)
    return min((file.parent_version or 0 for file in later if file is not None), default=None)


def copy_until(source: Path, target: Path, version: int) -> None:
    """Copy a ledger without the steps after a state version, which another run may be recording.

    Raises:
        RunDirectoryError: a line is malformed.
    """
    target.mkdir(exist_ok=True)
    for generation in generations(source):
        file = _read_header(source, generation)
        if file is not None and (file.parent_version is None or file.parent_version < version):
            lines = _lines(file.path)
            header = next(lines)
            kept = (line for line, entry in zip(lines, file.entries(), strict=False) if entry.version <= version)
            ledger_path(target, generation).write_bytes(header + b"".join(kept))


def generations(directory: Path) -> list[int]:
    """Return the generations that have a file."""
    if not directory.is_dir():
        return []
    matches = (re.fullmatch(r"gen-(\d{5,})\.jsonl", path.name) for path in directory.iterdir())
    return [int(match[1]) for match in matches if match]


def last_generation(directory: Path) -> int:
    """Return the generation of the last group that has recorded a step; -1 without one."""
    see_listed(directory)
    return max(generations(directory), default=-1)


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the complete lines of a file; a crash or an active writer leaves an incomplete last one."""
    try:
        with open_regular(path) as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield line
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror}.") from error


def _read_header(directory: Path, generation: int) -> LedgerFile | None:
    """Return one generation's header; None if a crash cut it short, so that nothing was committed."""
    path = ledger_path(directory, generation)
    line = next(_lines(path), None)
    return None if line is None else _parse_header(line, path, generation)


def _parse_header(line: bytes, path: Path, generation: int) -> LedgerFile:
    document = _parse_object(line, path, 1, ("format", "generation", "parent_version", "order"))
    if document["format"] != FORMAT:
        raise _malformed(path, 1, f"format must be {FORMAT}, but is {document['format']!r}")
    if document["generation"] != generation:
        raise _malformed(path, 1, f"generation must be the file name's, but is {document['generation']!r}")
    parent = document["parent_version"]
    if parent is not None and not _is_count(parent):
        raise _malformed(path, 1, f"parent_version must be a number of at least 0 or null, but is {parent!r}")
    return LedgerFile(path, generation, parent, _parse_order(document["order"], path))


def _parse_order(values: Any, path: Path) -> DeterministicSampler | None:
    if values is None:
        return None
    if not isinstance(values, dict) or set(values) != set(_ORDER_FIELDS) or not all(map(_is_count, values.values())):
        raise _malformed(path, 1, f"order must hold numbers for {', '.join(_ORDER_FIELDS)}, but is {values!r}")
    try:
        return DeterministicSampler(**{**values, "shuffle": Shuffle(values["shuffle"])})
    except UserError as error:
        raise _malformed(path, 1, f"order is impossible: {error}") from error


def _parse_entry(line: bytes, file: LedgerFile, number: int) -> LedgerEntry:
    document = _parse_object(line, file.path, number, ("v", "e", "t", "a", "b", "w", "c"))
    ranks = document.pop("w")
    if not all(map(_is_count, document.values())):
        raise _malformed(file.path, number, "v, e, t, a, b and c must be numbers of at least 0")
    if document["a"] >= document["b"]:
        raise _malformed(file.path, number, f"a must be below b, but they are {document['a']} and {document['b']}")
    if isinstance(ranks, list) and _are_first_microbatches(ranks, file.order):
        ranks = tuple(ranks)
    elif not _is_count(ranks) or ranks == 0:
        raise _malformed(
            file.path, number, f"w must be a number of ranks or their first micro-batches, but is {ranks!r}"
        )
    return LedgerEntry(document["v"], document["e"], document["t"], document["a"], document["b"], ranks, document["c"])


def _are_first_microbatches(ranks: list[Any], order: DeterministicSampler | None) -> bool:
    if not ranks or not all(map(_is_count, ranks)) or ranks[0] != 0 or ranks != sorted(ranks):
        return False
    return order is None or ranks[-1] <= order.num_microbatches


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _parse_object(line: bytes, path: Path, number: int, keys: tuple[str, ...]) -> dict[str, Any]:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _malformed(path, number, f"this is not JSON ({error})") from error
    if not isinstance(document, Mapping) or set(document) != set(keys):
        raise _malformed(path, number, f"expected an object with the keys {', '.join(keys)}")
    return dict(document)


def _malformed(path: Path, number: int, what: str) -> RunDirectoryError:
    return RunDirectoryError(f"{path}, line {number}: {what}. The ledger was changed or damaged after it was written.")


# --- The writer ---


_MOST_BYTES = 64 * 2**20  # of queued entries: a million steps


class LedgerWriter:
    """Writes one generation's file, in one process of a run.

    Entries stay in memory until an fsync and a close succeeded, since a disk behind a network may report a failed write
    with either. After a failure the writer opens the file again, repeats everything since then, and reads it back, so a
    disk that was full or failed for a while loses no entry.

    Thread-safe: the checkpointer flushes entries that the trainer appends. A killed process leaves at most one
    incomplete line, at the end.

    Args:
        directory: the run's ``ledger/``; the first :meth:`flush` creates it and the file.
        order: the order of the data, None for a stream.
        generation: 0 for a run's first start, incremented at each restart.
        parent_version: the state version from which this generation continues.

    Raises:
        RunDirectoryError: this generation or a later one already has a file.
    """

    def __init__(
        self,
        directory: Path,
        order: DeterministicSampler | None,
        *,
        generation: int,
        parent_version: int | None,
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
        self._synced = 0  # bytes of the file that an fsync covered; the tail follows them
        self._written = 0  # bytes of the tail that were written without an fsync
        self._file: int | None = None
        self._exists = False
        self._in_directory = False
        self._closed = False
        self._failed = False
        self._appending = Lock()
        self._writing = Lock()
        self._syncing = Lock()

    @property
    def unsure(self) -> int:
        """Bytes that a power cut would lose."""
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
        """Append one committed step in memory (about 2 us).

        Raises:
            RunDirectoryWriteError: the disk has failed for so long that the queue is full.
        """
        ranks_json = ranks if isinstance(ranks, int) else "[" + ",".join(map(str, ranks)) + "]"
        line = f'{{"v":{version},"e":{epoch},"t":{step},"a":{start},"b":{stop},"w":{ranks_json},"c":{checksum}}}\n'
        with self._appending:
            if len(self._tail) > _MOST_BYTES:
                raise self._failure(OSError(f"the queue of {_MOST_BYTES} bytes is full"))
            self._tail += line.encode()

    def flush(self, *, sync: bool) -> None:
        """Write all entries to the operating system, which keeps them if this process dies.

        With ``sync`` the entries also survive a power cut; flush so before a checkpoint of these steps is committed. It
        still works after :meth:`close`.

        Raises:
            RunDirectoryWriteError: the disk is full or broken; no entry is lost, and a later call retries.
            RunDirectoryError: another process has written this generation's file.
        """
        try:
            with self._writing:
                descriptor = os.dup(self._write())
            if sync or self._failed:
                self._sync(descriptor)
            else:
                os.close(descriptor)
            if self._closed:
                self._close_file()
        except OSError as error:
            # The kernel drops pages that it could not write, so a second fsync would succeed without them.
            with self._writing:
                self._written = 0
                self._failed = True
                self._drop_file()
            raise self._failure(error) from error

    def close(self) -> None:
        """Flush and close; a second call does nothing.

        Raises:
            RunDirectoryWriteError: the last entries cannot be written.
        """
        if not self._closed:
            self._closed = True
            self.flush(sync=False)

    def _write(self) -> int:
        """Write new entries to the operating system; return the descriptor."""
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            only_new = 0 if self._exists else os.O_EXCL
            try:
                self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | only_new, 0o666)
            except FileExistsError as error:
                raise self._conflict(self.path, self._generation) from error
            self._exists = True
        with self._appending:
            already_written, new = self._written, bytes(self._tail[self._written :])
            position = self._synced + already_written
        while new:
            written = os.pwrite(self._file, new, position)
            new, position = new[written:], position + written
        with self._appending:
            self._written = position - self._synced
        return self._file

    def _sync(self, descriptor: int) -> None:
        with self._syncing:
            with self._appending:
                until = self._synced + self._written
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if not self._in_directory:
                fsync_directory(self.path.parent)
                self._in_directory = True
            if self._failed:
                self._read_back(until)
            with self._appending:
                synced = until - self._synced
                del self._tail[:synced]
                self._synced = until
                self._written = max(0, self._written - synced)

    def _read_back(self, until: int) -> None:
        """Require that the file holds the entries that the next accounting drops from memory."""
        with self._appending:
            start, expected = self._synced, bytes(self._tail[: until - self._synced])
        with open(self.path, "rb") as file:
            file.seek(start)
            if file.read(len(expected)) != expected:
                raise OSError(errno.EIO, "the disk has not kept what was written")
        self._failed = False

    def _close_file(self) -> None:
        with self._writing:
            file, self._file = self._file, None
            if file is not None:
                os.close(file)

    def _drop_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                os.close(file)

    def _conflict(self, path: Path, generation: int) -> RunDirectoryError:
        return RunDirectoryError(
            f"{path} exists, so generation {generation} cannot be written: "
            "another process continued this run. End it if it is still running, then resume the run again."
        )

    def _failure(self, error: OSError) -> RunDirectoryWriteError:
        return RunDirectoryWriteError(
            f"cannot write the ledger {self.path}: {error.strerror or error}. "
            "Free space or repair the disk, then resume the run."
        )


def _fields(order: DeterministicSampler) -> dict[str, int]:
    """Return an order's fields for the header; weights and lengths of samples have files of their own."""
    return {**{name: getattr(order, name) for name in _ORDER_FIELDS}, "shuffle": order.shuffle.window}
