"""``paceline logs``: what the ranks of a run printed, live if wanted."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, BinaryIO

from cyclopts import Parameter

from paceline.errors import ConfigError, RunDirectoryError
from paceline.run_directory import RunDirectory

_POLL_S = 0.2
_BLOCK_BYTES = 64 * 1024
_RESTART_S = 5.0
"""How long a run without a lock and without a last word may be between two of its processes."""

_COLOURS = (36, 33, 32, 35, 34, 31)


def logs(
    run: Annotated[Path, Parameter(help="The run's directory.")],
    *,
    rank: Annotated[int | None, Parameter(help="Only this rank; else all, each line with its rank.")] = None,
    follow: Annotated[
        bool, Parameter(name=["--follow", "-f"], negative="", help="Go on until the run ends or Ctrl-C.")
    ] = False,
    lines: Annotated[int, Parameter(name=["--lines", "-n"], help="How many last lines of each rank.")] = 50,
) -> int:
    """Print what the ranks printed: the last lines of each, then, with -f, new ones as they come."""
    if lines < 0:
        raise ConfigError(f"--lines must be 0 or more, but is {lines}.")
    directory = RunDirectory(run)
    if not directory.exists():
        raise RunDirectoryError(
            f"{run} is not a run directory: it has no run.toml. `paceline runs` lists runs."
        )
    ranks = ranks_with_logs(directory)
    if rank is not None and rank not in ranks:
        raise RunDirectoryError(f"{run} has no log of rank {rank}. {_which_there_are(ranks)}")
    if not ranks and not follow:
        raise RunDirectoryError(f"{run} has no logs: it has not started yet. Wait for it with -f.")
    try:
        _print_logs(directory, rank, follow, lines)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader (`| head`) has seen enough; Python's own flush at exit must not fail on it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def ranks_with_logs(directory: RunDirectory) -> list[int]:
    """The ranks that have a log, in order."""
    names = (re.fullmatch(r"rank-(\d+)\.log", path.name) for path in directory.logs.glob("rank-*.log"))
    return sorted(int(match[1]) for match in names if match)


def _which_there_are(ranks: list[int]) -> str:
    return f"There are: {', '.join(map(str, ranks))}." if ranks else "There are no logs yet."


def _print_logs(directory: RunDirectory, rank: int | None, follow: bool, lines: int) -> None:
    with ExitStack() as stack:
        tails: dict[int, _Tail] = {}

        def open_new(last_lines: int | None) -> None:
            for number in ranks_with_logs(directory):
                if number not in tails and rank in (None, number):
                    prefix = "" if rank is not None else _prefix(number)
                    tails[number] = stack.enter_context(_Tail(directory.log_of(number), prefix, last_lines))

        def print_new() -> None:
            for tail in tails.values():
                for line in tail.new_lines():
                    sys.stdout.write(line)
            sys.stdout.flush()

        open_new(lines)
        print_new()
        if follow:
            for _ in _until_ended(directory):
                # A rank whose log appears while we watch is shown from its first line.
                open_new(None)
                print_new()
        for tail in tails.values():
            sys.stdout.write(tail.unfinished_line())
        sys.stdout.flush()


def _until_ended(directory: RunDirectory) -> Iterator[None]:
    """Yield now and then, and once more after the run has ended."""
    last_alive = time.monotonic()
    while True:
        if directory.is_running():
            last_alive = time.monotonic()
        else:
            events = directory.read_events()
            has_ended = bool(events) and events[-1]["event"] in ("finished", "stopped", "failed")
            if has_ended or time.monotonic() - last_alive > _RESTART_S:
                yield
                return
        yield
        time.sleep(_POLL_S)


class _Tail:
    """The last lines of a file, and then those that are added, also after it was cut or replaced."""

    def __init__(self, path: Path, prefix: str, last_lines: int | None) -> None:
        self._path = path
        self._prefix = prefix
        self._file: BinaryIO = path.open("rb")
        if last_lines is not None:
            self._file.seek(_start_of_last_lines(self._file, last_lines))
        self._partial = b""

    def __enter__(self) -> _Tail:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def new_lines(self) -> Iterator[str]:
        """The whole lines since the last call, each with its prefix and line end."""
        self._reopen_if_replaced()
        while block := self._file.read(_BLOCK_BYTES):
            *complete, self._partial = (self._partial + block).split(b"\n")
            for line in complete:
                yield self._shown(line)

    def unfinished_line(self) -> str:
        """What follows the last line end, as a line; empty if there is nothing."""
        return self._shown(self._partial) if self._partial else ""

    def _shown(self, line: bytes) -> str:
        return f"{self._prefix}{line.decode(errors='replace')}\n"

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


def _prefix(rank: int) -> str:
    text = f"rank {rank} | "
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return text
    return f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m"
