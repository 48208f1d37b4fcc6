"""The log of each rank, and the silencing of other libraries' loggers."""

from __future__ import annotations

import io
import json
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
from typing import Any, Literal, TextIO, cast

from paceline.core.built_in import PACKAGES
from paceline.core.errors import DataError, PacelineError
from paceline.core.files import ResilientLog
from paceline.core.standard_streams import lasting, lasting_streams
from paceline.runs.directory import RunDirectory

# --- Other libraries' internal messages ---


@contextmanager
def silence_loggers(*names: str) -> Iterator[None]:
    """Hide these loggers' messages below the level of an error."""
    previous_levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in previous_levels.items():
            logging.getLogger(name).setLevel(level)


@contextmanager
def silence_loggers_and_warnings(*names: str) -> Iterator[None]:
    """Hide warnings, and these loggers' messages below the level of an error."""
    with silence_loggers(*names), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# --- Each rank's output, in ``logs/rank-N.log``; rank 0 also prints to the terminal ---


_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


@contextmanager
def open_rank_log(
    directory: RunDirectory, rank: int, world_size: int, *, quiet: bool, log_format: Literal["text", "json"] = "text"
) -> Iterator[tuple[Tee, Tee]]:
    """Log this process's output and show Paceline's own messages within the block; remove an earlier start's error.

    Yields:
        stdout and stderr, for :func:`show_on`.

    Raises:
        RunDirectoryError: the log cannot be written.
    """
    with suppress(OSError):
        directory.error_of(rank).unlink(missing_ok=True)
    with capture_rank_output(directory, rank, world_size) as streams, _show_messages(quiet, log_format):
        yield streams


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json_line("message", level=record.levelname.lower(), message=record.getMessage())


def json_line(kind: str, **fields: Any) -> str:
    """Return a line of ``--log-format json``, with the time of now."""
    return json.dumps({"time": round(time.time(), 3), "kind": kind, **fields})


@contextmanager
def _show_messages(quiet: bool, log_format: str) -> Iterator[None]:
    """Show log messages of the core and of plug-ins, on stderr as it is now; with ``quiet`` only warnings."""
    handler = logging.StreamHandler(sys.stderr)
    is_json = log_format == "json" and not sys.stderr.isatty()
    handler.setFormatter(_JsonFormatter() if is_json else logging.Formatter("paceline: %(message)s"))
    previous_levels = {logger: logger.level for logger in map(logging.getLogger, PACKAGES)}
    for logger in previous_levels:
        logger.setLevel(logging.WARNING if quiet else logging.INFO)
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger, level in previous_levels.items():
            logger.removeHandler(handler)
            logger.setLevel(level)


@contextmanager
def capture_rank_output(directory: RunDirectory, rank: int, world_size: int) -> Iterator[tuple[Tee, Tee]]:
    """Append this process's output to its log within the block.

    Rank 0 keeps its terminal, and Python's output is copied to the log. On other ranks the descriptors 1 and 2
    themselves become the log, which includes native libraries and child processes. They stay as they are where a
    launcher has made descriptor 2 the log. An exception is written to the log and re-raised.

    Yields:
        stdout and stderr, for :func:`show_on`.

    Raises:
        RunDirectoryError: the log cannot be written.
    """
    path = directory.log_of(rank)
    with ExitStack() as stack:
        stack.enter_context(lasting_streams())
        log = cast(TextIO, stack.enter_context(ResilientLog(path)))
        is_redirected = _is_same_file(2, path)
        if rank != 0 and not is_redirected:
            _redirect_descriptors(stack, log)
        has_terminal = rank == 0 and not is_redirected
        streams = (Tee(sys.stdout, log), Tee(sys.stderr, log)) if has_terminal else (Tee(log, log), Tee(log, log))
        _print_through(*streams, stack)
        log.write(f"--- rank {rank} of {world_size}, pid {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        try:
            yield streams
        except Exception as error:
            # A DataError comes from the user's own code, which its traceback shows.
            if isinstance(error, PacelineError) and not isinstance(error, DataError):
                log.write(f"{type(error).__name__}: {error}\n")
            else:
                traceback.print_exc(file=log)
            raise


def show_on(terminal: tuple[int, int], streams: tuple[Tee, Tee], stack: ExitStack) -> None:
    """Show this process's output on a terminal as well as in its log, until ``stack`` is closed.

    Args:
        terminal: descriptors for stdout and stderr.
        streams: stdout and stderr; a handler of ``logging`` that holds one of them prints there, too.
    """
    for descriptor, stream in zip(terminal, streams, strict=True):
        file = stack.enter_context(open(descriptor, "w", buffering=1, closefd=False))  # noqa: SIM115
        stack.callback(setattr, stream, "terminal", stream.terminal)  # before the file is closed
        stream.terminal = lasting(file)


class TerminalStream(io.TextIOBase):
    """A stream in the place of a terminal's; a subclass does something with complete lines.

    Attributes:
        terminal: the stream of the terminal, which drops what cannot be written; an active progress bar replaces it.
    """

    def __init__(self, terminal: TextIO) -> None:
        self.terminal = terminal
        self._line = ""
        self._lock = threading.Lock()

    def isatty(self) -> bool:
        return self.terminal.isatty()

    def fileno(self) -> int:
        return self.terminal.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.terminal.encoding


class Tee(TerminalStream):
    """A stream that copies text to the terminal, and plain lines to the log, which may be in the terminal's place.

    The log gets no control codes, and only the last state of a line that was redrawn with carriage returns.
    """

    def __init__(self, terminal: TextIO, log: TextIO) -> None:
        super().__init__(terminal)
        self.log = log
        self._is_begun = False  # the log has the beginning of this line

    def write(self, text: str) -> int:
        """Show the text, and log the lines that it completes."""
        if self.terminal is not self.log:
            self.terminal.write(text)
        with self._lock:
            *complete, line = (self._line + text).split("\n")
            self._log(complete)
            self._line = line[max(0, line.rstrip("\r").rfind("\r")) :]  # of a redrawn line, the last state
        return len(text)

    def flush(self) -> None:
        """Flush the terminal; the log gets an unfinished line only in its place, and is line buffered otherwise."""
        if self.terminal is self.log:
            with self._lock:
                self.log.write(_ESCAPES.sub("", self._line))
                self._is_begun |= self._line != ""
                self._line = ""
        self.terminal.flush()

    def end_line(self) -> None:
        """Write an unfinished last line to the log."""
        with self._lock:
            if self._line or self._is_begun:
                self._log([self._line])
                self._line = ""

    def _log(self, lines: list[str]) -> None:
        if lines:
            redraw = "\r" if self._is_begun and "\r" in lines[0].rstrip("\r") else ""
            self.log.write(redraw + "".join(plain(line) + "\n" for line in lines))
            self._is_begun = False


def plain(line: str) -> str:
    """Return the visible text of a terminal line: without control codes, in its last redrawn state."""
    return _ESCAPES.sub("", line).rstrip("\r").rpartition("\r")[2]


def terminal_and_log(stream: TextIO) -> tuple[TextIO, TextIO | None]:
    """Return the terminal behind ``sys.stderr`` or ``sys.stdout``, and its log, if any."""
    if isinstance(stream, Tee) and stream.terminal is not stream.log:
        return stream.terminal, stream.log
    return stream, None


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _print_through(out: Tee, err: Tee, stack: ExitStack) -> None:
    for tee in (out, err):
        stack.callback(tee.end_line)
    stack.enter_context(redirect_stdout(out))
    stack.enter_context(redirect_stderr(err))


def _redirect_descriptors(stack: ExitStack, log: TextIO) -> None:
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        saved = os.dup(descriptor)
        # Last in, first out: flush buffered text to the log, then restore the descriptor.
        stack.callback(os.close, saved)
        stack.callback(os.dup2, saved, descriptor)
        stack.callback(stream.flush)
        with suppress(OSError):  # the disk is full, and the log could not be opened
            os.dup2(log.fileno(), descriptor)
        if hasattr(stream, "reconfigure"):
            stack.callback(stream.reconfigure, line_buffering=stream.line_buffering)
            stream.reconfigure(line_buffering=True)
