"""The logs of a job, read and followed from any process."""

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
from paceline.launch.launcher import JobStatus

# --- Lines of log files as they come: several files as one stream, what several say alike said once ---


_POLL_S = 0.2
_BLOCK_BYTES = 64 * 1024


class Tail:
    """The last lines of a file, and then those that are added, also after it was cut or replaced.

    Args:
        path: the file; it exists.
        last_lines: how many of its lines to begin with; None: all.
    """

    def __init__(self, path: Path, last_lines: int | None = None) -> None:
        self._path = path
        self._file: BinaryIO = path.open("rb")
        if last_lines is not None:
            self._file.seek(_start_of_last_lines(self._file, last_lines))
        self._partial = b""

    def __enter__(self) -> Tail:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def new_lines(self) -> Iterator[str]:
        """The whole lines since the last call, without their ends."""
        self._reopen_if_replaced()
        while block := self._file.read(_BLOCK_BYTES):
            *complete, self._partial = (self._partial + block).split(b"\n")
            for line in complete:
                yield _shown(line)

    def unfinished_line(self) -> str:
        """What follows the last line end; "" if there is nothing."""
        return _shown(self._partial)

    def _reopen_if_replaced(self) -> None:
        try:
            now = self._path.stat()
        except FileNotFoundError:
            return
        opened = os.fstat(self._file.fileno())
        if not os.path.samestat(now, opened):
            self._file.close()
            self._file = self._path.open("rb")
        elif now.st_size < self._file.tell():
            self._file.seek(0)
            self._partial = b""


def follow_files(paths: Sequence[Path], *, ended: Callable[[], bool] | None = None) -> Iterator[str]:
    """Yield lines without their ends, an unfinished one last; with a prefix where files are several.

    Args:
        paths: files; one that is not there yet is waited for.
        ended: True once nothing more will be written; None: what is there now is all.
    """
    prefixes = {path: f"{path.name} | " if len(paths) > 1 else "" for path in paths}
    with ExitStack() as stack:
        tails: dict[Path, Tail] = {}
        while True:
            last = ended is None or ended()
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
                yield prefixes[path] + rest


def merge_rank_lines(lines: Mapping[int, Sequence[str]]) -> Iterator[tuple[tuple[int, ...], str, int]]:
    """Merge what several ranks printed: yield a line's ranks, the line, and how often it came in a row.

    The lines of each rank keep their order. A line that other ranks print later is held back for them while
    something else can be printed first, so that a line which all ranks print comes once.
    """
    waiting = {rank: deque(_repeats(own)) for rank, own in sorted(lines.items()) if own}
    counts = {rank: Counter(own) for rank, own in waiting.items()}
    having = Counter(line for own in counts.values() for line in own)
    first_of: dict[tuple[str, int], list[int]] = {}
    for rank, own in waiting.items():
        first_of.setdefault(own[0], []).append(rank)
    # How many ranks print a line later, and the lowest that prints it now: the least comes next. Of a line
    # whose numbers have changed there is another entry, and the old one is passed over.
    order = [(having[line] - len(ranks), ranks[0], line) for line, ranks in first_of.items()]
    heapify(order)
    while order:
        later, lowest, chosen = heappop(order)
        ranks = first_of.get(chosen, [])
        if not ranks or (later, lowest) != (having[chosen] - len(ranks), ranks[0]):
            continue
        yield tuple(ranks), *chosen
        changed = {chosen}
        for rank in first_of.pop(chosen):
            own = waiting[rank]
            counts[rank][own.popleft()] -= 1
            having[chosen] -= counts[rank][chosen] == 0
            if own:
                insort(first_of.setdefault(own[0], []), rank)
                changed.add(own[0])
        for line in changed:
            if ranks := first_of.get(line, []):
                heappush(order, (having[line] - len(ranks), ranks[0], line))


def _repeats(lines: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Each line, and how often it comes in a row."""
    last, times = lines[0], 0
    for line in lines:
        if line == last:
            times += 1
        else:
            yield last, times
            last, times = line, 1
    yield last, times


def _shown(line: bytes) -> str:
    """A line as a terminal would show it: what a progress bar has written over is gone."""
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]


def _start_of_last_lines(file: BinaryIO, count: int) -> int:
    """The offset at which the last ``count`` lines begin; an unfinished last line counts."""
    position = end = file.seek(0, os.SEEK_END)
    if count == 0 or end == 0:
        return end
    # The line end of the last line begins no line.
    wanted = count
    searched_to = end - 1
    while searched_to > 0:
        position = max(0, searched_to - _BLOCK_BYTES)
        file.seek(position)
        block = file.read(searched_to - position)
        found = len(block)
        while (found := block.rfind(b"\n", 0, found)) >= 0:
            wanted -= 1
            if wanted == 0:
                return position + found + 1
        searched_to = position
    return 0


# --- Following a job whose system may be away for a while ---


_PATIENCE_S = 600.0
"""How long a system may not answer while one waits for a job."""

_T = TypeVar("_T")


class StatusPoller:
    """Asks after a job now and then, and bears with a system that does not answer for a while.

    Args:
        status: asks where the job stands.
        intervals_s: the first interval, from which they grow to the last.
        logs: where the job's logs are, for the one whose system has forgotten it.
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
        """Whether the job has, as far as is known; asks only when it is time to.

        Raises:
            LaunchError: the system has forgotten the job, or has not answered for long.
        """
        return time.monotonic() >= self._next and self._end() is not None

    def wait(self) -> JobStatus:
        """The job's last status, once it has ended.

        Raises:
            LaunchError: the system has forgotten the job, or has not answered for long.
        """
        while (end := self._end()) is None:
            time.sleep(max(0.0, self._next - time.monotonic()))
        return end

    def answer(self, question: Callable[[], _T]) -> _T | None:
        """What the system says to a question; None where it does not answer, and may yet.

        Raises:
            LaunchError: it has not answered for long, or the library that asks it is not installed.
        """
        try:
            answer = question()
        except LaunchError as error:
            if isinstance(error.__cause__, ImportError):  # no library comes of waiting
                raise
            now = time.monotonic()
            if self._silent_since is None:
                self._silent_since = now
                print(f"paceline: {error} Asking again, for {_PATIENCE_S / 60:.0f} min.", file=sys.stderr)
            if now - self._silent_since > _PATIENCE_S:
                raise
            return None
        self._silent_since = None
        return answer

    def _end(self) -> JobStatus | None:
        """Ask; the status that the job has ended with, if it has."""
        self._next = time.monotonic() + self._interval_s
        self._interval_s = min(self._last_s, self._interval_s * 1.3)
        status = self.answer(self._status)
        if status is not None and status.state == "unknown":
            raise LaunchError(f"{status.detail}. Its logs: {self._logs}" if self._logs else status.detail)
        return status if status is not None and status.ended else None
