"""The log of each rank, and the loggers of other libraries."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import TextIO, cast

from paceline.core.errors import DataError, PacelineError
from paceline.core.files import DISK_ERRORS, ResilientLog
from paceline.runs.directory import RunDirectory

# --- Other libraries' notes on their own inside, which are not for Paceline's users ---


@contextmanager
def silence_loggers(*names: str) -> Iterator[None]:
    """Without what these loggers say below an error."""
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


@contextmanager
def silence_logger_and_warnings(logger_name: str) -> Iterator[None]:
    """Without warnings, and without what a logger says below an error."""
    with silence_loggers(logger_name), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# --- What each rank prints, in ``logs/rank-N.log``; rank 0 prints to the terminal as well ---


_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


@contextmanager
def capture_rank_output(directory: RunDirectory, rank: int, world_size: int) -> Iterator[None]:
    """Send what this process prints to its log, appending, until the block ends.

    Rank 0 keeps its terminal and Python's output is copied to the log. On other ranks the file
    descriptors 1 and 2 themselves become the log, so that native libraries and child processes
    are caught too. A process whose descriptor 2 is the log already (a launcher did it) is left
    as it is. An exception that leaves the block is written to the log and raised further.

    Raises:
        RunDirectoryError: the log cannot be written.
    """
    path = directory.log_of(rank)
    with ExitStack() as stack:
        log = cast(TextIO, stack.enter_context(ResilientLog(path)))
        if not _is_same_file(2, path):
            if rank == 0:
                _tee_python_output(stack, log)
            else:
                _redirect_descriptors(stack, log)
        if rank != 0:
            # A print must not fail where the disk is full.
            stack.enter_context(redirect_stdout(log))
            stack.enter_context(redirect_stderr(log))
        log.write(f"--- rank {rank} of {world_size}, pid {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        try:
            yield
        except Exception as error:
            # A DataError is about the user's own code, which its traceback leads to.
            if isinstance(error, PacelineError) and not isinstance(error, DataError):
                log.write(f"{type(error).__name__}: {error}\n")
            else:
                traceback.print_exc(file=log)
            raise


def show_on(terminal: tuple[int, int], stack: ExitStack) -> None:
    """Show what this process prints on a terminal as well as in its log; until ``stack`` is closed.

    Args:
        terminal: descriptors to show stdout and stderr on.
        stack: undoes it.
    """
    out, err = (
        Tee(stack.enter_context(open(descriptor, "w", buffering=1, closefd=False)), stream)  # noqa: SIM115
        for descriptor, stream in zip(terminal, (sys.stdout, sys.stderr), strict=True)
    )
    for tee in (out, err):
        stack.callback(tee.end_line)
    stack.enter_context(redirect_stdout(out))
    stack.enter_context(redirect_stderr(err))


class Tee(io.TextIOBase):
    """A stream that goes to the terminal as it is, and to the log in plain lines.

    The log gets no control codes, and of a line that was redrawn with carriage returns only the
    last state.

    Attributes:
        terminal: where the text is shown; a progress bar puts itself in between while it lives.
        log: the log file.
    """

    def __init__(self, terminal: TextIO, log: TextIO) -> None:
        self.terminal = terminal
        self.log = log
        self._line = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        """Show the text, and log the lines that it completes."""
        try:
            self.terminal.write(text)
        except OSError as error:  # a terminal that is a file on a full disk
            if error.errno not in DISK_ERRORS:
                raise
        with self._lock:
            complete, newline, self._line = (self._line + text).rpartition("\n")
            if newline:
                self.log.write("".join(plain(line) + "\n" for line in complete.split("\n")))
        return len(text)

    def flush(self) -> None:
        """Flush the terminal; the log is line buffered."""
        with suppress(OSError):
            self.terminal.flush()

    def isatty(self) -> bool:
        """Whether the text is shown on a terminal."""
        return self.terminal.isatty()

    def fileno(self) -> int:
        """The terminal's descriptor."""
        return self.terminal.fileno()

    def writable(self) -> bool:
        """Always."""
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The terminal's encoding."""
        return self.terminal.encoding

    def end_line(self) -> None:
        """Write an unfinished last line to the log."""
        with self._lock:
            if self._line:
                self.log.write(plain(self._line) + "\n")
                self._line = ""


def plain(line: str) -> str:
    """A terminal line as a reader sees it: no control codes, the last of its redrawn states."""
    return _ESCAPES.sub("", line).rstrip("\r").rpartition("\r")[2]


def terminal_and_log(stream: TextIO) -> tuple[TextIO, TextIO | None]:
    """The terminal behind ``sys.stderr`` or ``sys.stdout``, and the log beside it if there is one."""
    return (stream.terminal, stream.log) if isinstance(stream, Tee) else (stream, None)


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _tee_python_output(stack: ExitStack, log: TextIO) -> None:
    out, err = Tee(sys.stdout, log), Tee(sys.stderr, log)
    for tee in (out, err):
        stack.callback(tee.end_line)
    stack.enter_context(redirect_stdout(out))
    stack.enter_context(redirect_stderr(err))


def _redirect_descriptors(stack: ExitStack, log: TextIO) -> None:
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        saved = os.dup(descriptor)
        # Last in, first out: what is still buffered goes to the log, then the descriptor comes back.
        stack.callback(os.close, saved)
        stack.callback(os.dup2, saved, descriptor)
        stack.callback(stream.flush)
        with suppress(OSError):  # the disk is so full that there is no log
            os.dup2(log.fileno(), descriptor)
        if isinstance(stream, io.TextIOWrapper):
            stack.callback(stream.reconfigure, line_buffering=stream.line_buffering)
            stream.reconfigure(line_buffering=True)
