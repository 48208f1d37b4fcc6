"""Reading and following the logs of a job from any process."""

from __future__ import annotations

import os
import sys
import time
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import BinaryIO, TypeVar

from paceline.core.errors import LaunchError
from paceline.core.files import open_regular
from paceline.launch.launcher import JobStatus

# --- Following log files: several files as one stream, with equal lines of ranks merged ---


_POLL_S = 0.2
_BLOCK_BYTES = 64 * 1024
_MAX_LINE_BYTES = 2**20


class Tail:
    """The last lines of a file, followed by new ones, even after it was truncated or replaced.

    Args:
        path: an existing file.
        last_lines: number of existing lines to start with; None: all.
    """

    def __init__(self, path: Path, last_lines: int | None = None) -> None:
        self._path = path
        self._file: BinaryIO = open_regular(path)
        if last_lines is not None:
            self._file.seek(_start_of_last_lines(self._file, last_lines))
        self._partial = b""
        self._is_cut = False

    def __enter__(self) -> Tail:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def new_lines(self) -> Iterator[str]:
        """Yield the complete lines since the last call, without line ends."""
        self._reopen_if_replaced()
        while block := self._file.read(_BLOCK_BYTES):
            *complete, self._partial = (self._partial + block).split(b"\n")
            for line in complete:
                if not self._is_cut:
                    yield _displayed(line)
                self._is_cut = False
            if self._is_cut:
                self._partial = b""
            elif len(self._partial) > _MAX_LINE_BYTES:
                yield f"{_displayed(self._partial)} (cut: this line has more than {_MAX_LINE_BYTES:,} bytes)"
                self._is_cut = True
                self._partial = b""

    def unfinished_line(self) -> str:
        """Return the text after the last line end."""
        return _displayed(self._partial)

    def _reopen_if_replaced(self) -> None:
        try:
            now = self._path.stat()
        except FileNotFoundError:
            return
        opened = os.fstat(self._file.fileno())
        if not os.path.samestat(now, opened):
            self._file.close()
            self._file = open_regular(self._path)
        elif now.st_size < self._file.tell():
            self._file.seek(0)
            self._partial = b""


def follow_files(find: Callable[[], Sequence[Path]], *, ended: Callable[[], bool] | None = None) -> Iterator[str]:
    """Yield lines without line ends, an incomplete one last; with a prefix if there are several files.

    Args:
        find: returns the files, asked again and again: only when one exists may its name be known.
        ended: returns True once nothing more will be written; None reads only the present contents.
    """
    with ExitStack() as stack:
        tails: dict[Path, Tail] = {}
        while True:
            last = ended is None or ended()
            paths = find()
            prefixes = {path: f"{path.name} | " if len(paths) > 1 else "" for path in paths}
            for path in paths:
                if path not in tails and path.exists():
                    tails[path] = stack.enter_context(Tail(path))
                if path in tails:
                    for line in tails[path].new_lines():
                        yield prefixes[path] + line
            if last:
                break
            time.sleep(_POLL_S)
        for path, tail in tails.items():
            if rest := tail.unfinished_line():
                yield prefixes.get(path, "") + rest


def merge_rank_lines(lines: Mapping[int, Sequence[str]]) -> Iterator[tuple[tuple[int, ...], str, int]]:
    """Merge lines of several ranks: yield a line's ranks, the line, and its number of repetitions.

    The lines of each rank keep their order. A line that other ranks print later is delayed while something else
    can be printed first, so that a line of all ranks is yielded once.
    """
    pending = {rank: deque(_repeats(own)) for rank, own in sorted(lines.items()) if own}
    counts = {rank: Counter(own) for rank, own in pending.items()}
    num_ranks_with = Counter(line for own in counts.values() for line in own)
    ranks_at: dict[tuple[str, int], list[int]] = {}
    for rank, own in pending.items():
        ranks_at.setdefault(own[0], []).append(rank)
    # Order by how many ranks print a line later, then by the lowest rank that prints it now. Entries with outdated
    # numbers are skipped.
    order = [(num_ranks_with[line] - len(ranks), ranks[0], line) for line, ranks in ranks_at.items()]
    heapify(order)
    while order:
        later, lowest, chosen = heappop(order)
        ranks = ranks_at.get(chosen, [])
        if not ranks or (later, lowest) != (num_ranks_with[chosen] - len(ranks), ranks[0]):
            continue
        yield tuple(ranks), *chosen
        changed = {chosen}
        for rank in ranks_at.pop(chosen):
            own = pending[rank]
            counts[rank][own.popleft()] -= 1
            num_ranks_with[chosen] -= counts[rank][chosen] == 0
            if own:
                insort(ranks_at.setdefault(own[0], []), rank)
                changed.add(own[0])
        for line in changed:
            if ranks := ranks_at.get(line, []):
                heappush(order, (num_ranks_with[line] - len(ranks), ranks[0], line))


def _repeats(lines: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield each line with the number of its consecutive repetitions."""
    last, count = lines[0], 0
    for line in lines:
        if line == last:
            count += 1
        else:
            yield last, count
            last, count = line, 1
    yield last, count


def _displayed(line: bytes) -> str:
    """Return a line as a terminal displays it, without text that a progress bar has overwritten."""
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]


def _start_of_last_lines(file: BinaryIO, count: int) -> int:
    """Return the offset of the last ``count`` lines; an incomplete last line counts."""
    position = end = file.seek(0, os.SEEK_END)
    if count == 0 or end == 0:
        return end
    # The line end of the last line does not start a line.
    remaining = count
    searched_to = end - 1
    while searched_to > 0:
        position = max(0, searched_to - _BLOCK_BYTES)
        file.seek(position)
        block = file.read(searched_to - position)
        newline = len(block)
        while (newline := block.rfind(b"\n", 0, newline)) >= 0:
            remaining -= 1
            if remaining == 0:
                return position + newline + 1
        searched_to = position
    return 0


# --- Following a job whose cluster may be unavailable for a while ---


_MAX_SILENCE_S = 600.0
"""How long a cluster may be unavailable while a command waits for a job."""

_T = TypeVar("_T")


class StatusPoller:
    """A poller of a job's status that tolerates a cluster that is unavailable for a while.

    Args:
        intervals_s: the first and the longest polling interval.
        logs: location of the job's logs, for a message if the cluster no longer knows the job.
    """

    def __init__(
        self,
        status: Callable[[], JobStatus],
        intervals_s: tuple[float, float] = (0.5, 10.0),
        *,
        logs: str = "",
    ) -> None:
        self._status = status
        self._interval_s, self._last_s = intervals_s
        self._logs = logs
        self._next = 0.0
        self._silent_since: float | None = None

    def ended(self) -> bool:
        """Return whether the job is known to have ended; query only when the interval has passed.

        Raises:
            LaunchError: the cluster no longer knows the job, or has been unavailable for too long.
        """
        return time.monotonic() >= self._next and self._end() is not None

    def wait(self) -> JobStatus:
        """Return the job's final status once it has ended.

        Raises:
            LaunchError: the cluster no longer knows the job, or has been unavailable for too long.
        """
        while (end := self._end()) is None:
            time.sleep(max(0.0, self._next - time.monotonic()))
        return end

    def answer(self, question: Callable[[], _T]) -> _T | None:
        """Return the result of a query; None if the cluster is unavailable, but only for a while so far.

        Raises:
            LaunchError: the cluster has been unavailable for too long, or the client library is not installed.
        """
        try:
            answer = question()
        except LaunchError as error:
            if isinstance(error.__cause__, ImportError):  # waiting does not install a library
                raise
            now = time.monotonic()
            if self._silent_since is None:
                self._silent_since = now
                print(f"paceline: {error} Retrying for {_MAX_SILENCE_S / 60:.0f} min.", file=sys.stderr)
            if now - self._silent_since > _MAX_SILENCE_S:
                raise
            return None
        self._silent_since = None
        return answer

    def _end(self) -> JobStatus | None:
        """Query the job; return its final status, if it has ended."""
        self._next = time.monotonic() + self._interval_s
        self._interval_s = min(self._last_s, self._interval_s * 1.3)
        status = self.answer(self._status)
        if status is not None and status.state == "unknown":
            raise LaunchError(f"{status.detail}. Its logs: {self._logs}" if self._logs else status.detail)
        return status if status is not None and status.ended else None
