"""The ledger: which samples were trained on, appended at each commit of a step, and read to prove it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from paceline.core.errors import RunDirectoryError, RunDirectoryWriteError, UserError
from paceline.core.files import fsync_directory
from paceline.core.options import Shuffle
from paceline.data.order import DeterministicSampler

# --- The ledger: which samples each committed step saw, written down by the run itself ---
#
# One JSONL file for each generation, ``ledger/gen-00000.jsonl``. Its first line is a header::
#
#     {"format":1,"generation":0,"parent_version":null,"order":{"num_samples":60000,...}}
#
# ``parent_version`` is the state version that this generation continued from, null where it began
# from nothing. ``order`` holds the fields of :class:`~paceline.data.order.DeterministicSampler`, and is null
# for a stream, whose order is the stream's own. Then one line for each committed step::
#
#     {"v":1,"e":0,"t":0,"a":0,"b":128,"w":2,"c":5138420}
#
# v: state version after the step; e: epoch; t: step in the epoch; a, b: its positions [a, b) in the
# epoch, but of a stream in the whole run, because nobody knows how long its epochs are; w: the number
# of ranks where they share the micro-batches evenly, else the list of each rank's first micro-batch; c: the sum
# over the step's micro-batches of the CRC-32 of the sample numbers (little-endian int64) that were really
# fetched.
#
# A generation continues from a state that an earlier one left, so what the earlier ones did after
# that state is not in the model: it was computed again. What remains is the final lineage.


FORMAT = 1
_ORDER_FIELDS = tuple(field.name for field in dataclasses.fields(DeterministicSampler))


class LedgerEntry(NamedTuple):
    """One committed step; the module's docstring explains the fields."""

    version: int
    epoch: int
    step: int
    start: int
    stop: int
    ranks: int | tuple[int, ...]
    checksum: int

    @property
    def world_size(self) -> int:
        """How many ranks shared the step."""
        return self.ranks if isinstance(self.ranks, int) else len(self.ranks)


def ledger_path(directory: Path, generation: int) -> Path:
    """The file of one generation."""
    return directory / f"gen-{generation:05d}.jsonl"


@dataclass(frozen=True)
class LedgerFile:
    """One generation's file and its header."""

    path: Path
    generation: int
    parent_version: int | None
    order: DeterministicSampler | None

    def entries(self) -> Iterator[LedgerEntry]:
        """The committed steps, in the order of the file.

        Raises:
            RunDirectoryError: a line is malformed; one that a crash cut short at the end is not.
        """
        lines = _lines(self.path)
        next(lines)  # the header
        for number, line in enumerate(lines, start=2):
            yield _parse_entry(line, self, number)


@dataclass(frozen=True)
class Ledger:
    """All generations of a run, oldest first."""

    files: tuple[LedgerFile, ...]
    order: DeterministicSampler | None

    def entries(self) -> Iterator[tuple[LedgerEntry, bool]]:
        """Each committed step, and whether it is in the final lineage (else it was recomputed).

        Raises:
            RunDirectoryError: a line is malformed.
        """
        for number, file in enumerate(self.files):
            # Every later generation cuts, not only the next: it may have gone further back.
            parents = [later.parent_version or 0 for later in self.files[number + 1 :]]
            cut = min(parents, default=None)
            for entry in file.entries():
                yield entry, cut is None or entry.version <= cut


def read_ledger(directory: Path) -> Ledger:
    """Open a run's ledger, also while the run is writing it.

    Raises:
        RunDirectoryError: there is none, a header is malformed, or two disagree about the order.
    """
    files = []
    for generation in sorted(generations(directory)):
        path = ledger_path(directory, generation)
        header = next(_lines(path), None)
        if header is not None:  # else a crash cut the header short: nothing was committed
            files.append(_parse_header(header, path, generation))
    if not files:
        raise RunDirectoryError(f"{directory} holds no ledger: no step of this run was committed.")
    first = files[0]
    for file in files[1:]:
        if file.order != first.order:
            raise RunDirectoryError(
                f"{file.path}, line 1: its order of the data is not that of {first.path.name}. "
                "A run has one order; these files are of different runs."
            )
    return Ledger(tuple(files), first.order)


def last_recorded_version(directory: Path) -> int | None:
    """The state version up to which the files hold every step; None where they hold none.

    Raises:
        RunDirectoryError: the last file is malformed.
    """
    for generation in sorted(generations(directory), reverse=True):
        path = ledger_path(directory, generation)
        lines = _lines(path)
        header = next(lines, None)
        if header is None:
            continue  # a crash cut the header short
        file = _parse_header(header, path, generation)
        last = deque(lines, maxlen=1)
        return _parse_entry(last[0], file, 2).version if last else file.parent_version
    return None


def superseded_at(directory: Path, generation: int) -> int | None:
    """The lowest state version that a later generation went on from; None where there is none.

    Raises:
        RunDirectoryError: a later header is malformed.
    """
    parents = []
    for later in generations(directory):
        if later > generation:
            path = ledger_path(directory, later)
            header = next(_lines(path), None)
            if header is not None:
                parents.append(_parse_header(header, path, later).parent_version or 0)
    return min(parents, default=None)


def generations(directory: Path) -> list[int]:
    """The generations that have a file."""
    if not directory.is_dir():
        return []
    matches = (re.fullmatch(r"gen-(\d{5,})\.jsonl", path.name) for path in directory.iterdir())
    return [int(match[1]) for match in matches if match]


def _lines(path: Path) -> Iterator[bytes]:
    """The whole lines of a file; one without its end is what a crash, or a writer at work, left."""
    try:
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield line
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror}.") from error


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


# --- Writing the ledger, on disks that may be full or fail for a while ---


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
            RunDirectoryWriteError: the disk has taken nothing for so long that the memory for it is used up.
        """
        shared = ranks if isinstance(ranks, int) else "[" + ",".join(map(str, ranks)) + "]"
        line = f'{{"v":{version},"e":{epoch},"t":{step},"a":{start},"b":{stop},"w":{shared},"c":{checksum}}}\n'
        with self._appending:
            if len(self._tail) > _MOST_BYTES:
                raise self._failure(OSError(f"{_MOST_BYTES} bytes wait for the disk, and that is the limit"))
            self._tail += line.encode()

    def flush(self, *, sync: bool) -> None:
        """Hand all entries to the system, which keeps them if this process dies.

        ``sync`` waits for the disk too, so that they survive a power cut; call it so before a
        checkpoint of these steps is committed. After :meth:`close` it still works.

        Raises:
            RunDirectoryWriteError: the disk is full or gone; no entry is lost, and a later call tries again.
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
            RunDirectoryWriteError: the last entries cannot be written.
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

    def _failure(self, error: OSError) -> RunDirectoryWriteError:
        return RunDirectoryWriteError(
            f"cannot write the ledger {self.path}: {error.strerror or error}. "
            "Make room or mend the disk, then resume the run."
        )


def _fields(order: DeterministicSampler) -> dict[str, int]:
    """What the header tells of an order; a balanced one's sizes are in a file of their own."""
    values = {field.name: getattr(order, field.name) for field in dataclasses.fields(DeterministicSampler)}
    return {**values, "shuffle": order.shuffle.window}
