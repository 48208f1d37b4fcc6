"""The output of ranks that share a pipe or a file: each rank's lines are written whole.

Python writes a line in several pieces where it is unbuffered, and in blocks that end anywhere where it is not. On a
terminal it writes lines, so ranks keep a terminal.
"""

from __future__ import annotations

import os
import selectors
import stat
import threading
import tty
from collections.abc import Callable, Iterable
from contextlib import suppress

from paceline.core.standard_streams import discard

_BLOCK_BYTES = 64 * 1024
_LONGEST_LINE = 2**20  # bytes; a longer one is written in pieces


class LinesOfRank:
    """One rank's stream: passes whole lines on to a descriptor, and keeps the unfinished one.

    Progress bars end their lines with a carriage return.
    """

    def __init__(self, output: int) -> None:
        self._output = output
        self._unfinished = b""

    def take(self, block: bytes) -> None:
        content = self._unfinished + block
        end = max(content.rfind(b"\n"), content.rfind(b"\r")) + 1
        if len(content) - end > _LONGEST_LINE:
            end = len(content)
        self._unfinished = content[end:]
        self.write(content[:end])

    def finish(self) -> None:
        """Write an unfinished last line, with the end that keeps another rank's apart."""
        rest, self._unfinished = self._unfinished, b""
        self.write(rest + b"\n" if rest else b"")

    def write(self, content: bytes) -> None:
        try:
            while content:
                content = content[os.write(self._output, content) :]
        except OSError:
            discard(self._output)  # its reader or its terminal is gone; the ranks continue


def _relay(lines: dict[int, LinesOfRank], stop: int | None = None) -> None:
    """Pass on the lines from these pipes until all of them, or only ``stop``, have closed; close them."""
    with selectors.DefaultSelector() as selector:
        for pipe in lines:
            selector.register(pipe, selectors.EVENT_READ)
        if stop is not None:
            selector.register(stop, selectors.EVENT_READ)
        left = set(lines)
        while left:
            ready = [key.fd for key, _ in selector.select()]
            for pipe in ready:
                if pipe == stop:
                    continue
                try:
                    block = os.read(pipe, _BLOCK_BYTES)
                except OSError:  # the end of a terminal's output
                    block = b""
                lines[pipe].take(block)
                if not block:
                    lines[pipe].finish()
                    selector.unregister(pipe)
                    left.discard(pipe)
            if ready == [stop]:
                break  # all ranks have ended; a process that they left behind may hold its pipe for ever
    for pipe, stream in lines.items():
        stream.finish()
        os.close(pipe)


def shared_outputs() -> tuple[int, ...]:
    """Return those of the descriptors 1 and 2 on which the lines of several ranks may be mixed."""
    return tuple(descriptor for descriptor in (1, 2) if not os.isatty(descriptor))


class RankOutputs:
    """Pipes for the output of the ranks that this process starts, and the thread that passes their lines on.

    Args:
        lines: makes what passes on the lines of a rank that are meant for a descriptor.
    """

    def __init__(self, outputs: Iterable[int], lines: Callable[[int], LinesOfRank] = LinesOfRank) -> None:
        self._lines_of = lines
        self._outputs = tuple(outputs)
        self._lines: dict[int, LinesOfRank] = {}
        self._stop, self._stopping = os.pipe2(os.O_CLOEXEC)
        self._thread: threading.Thread | None = None

    def open(self) -> dict[int, int]:
        """Return the ends that a rank writes to, by the descriptor that they replace; close them when it runs."""
        ends = {}
        for output in self._outputs:
            read, ends[output] = os.pipe2(os.O_CLOEXEC)
            self._lines[read] = self._lines_of(output)
        return ends

    def start(self) -> None:
        """Begin to pass lines on, once all ranks have started."""
        if not self._lines:
            return
        self._thread = threading.Thread(target=_relay, args=(self._lines, self._stop), name="paceline-rank-output")
        self._thread.start()

    def close(self) -> None:
        """Pass on the last lines of ranks that have ended; may be called twice."""
        if self._stopping < 0:
            return
        os.close(self._stopping)
        self._stopping = -1
        if self._thread is not None:
            self._thread.join()
        else:
            for pipe in self._lines:
                os.close(pipe)
        os.close(self._stop)


def pass_own_lines_on() -> None:
    """Have another process pass on the lines of this one, and of the program that it becomes.

    That process ends when all that write to its pipes have ended. It is not this one's child, for which a program may
    wait. Open MPI gives each rank a terminal, where Python writes lines; the rank keeps one.
    """
    outputs = [output for output in (1, 2) if os.isatty(output) or _is_pipe(output)]
    if not outputs:
        return
    pipes = {output: _terminal() if os.isatty(output) else os.pipe() for output in outputs}
    child = os.fork()
    if child == 0:
        os.setsid()  # signals are for the rank
        if os.fork() == 0:
            for _, write in pipes.values():
                os.close(write)
            with suppress(OSError):
                _relay({read: LinesOfRank(output) for output, (read, _) in pipes.items()})
        os._exit(0)
    os.waitpid(child, 0)
    for output, (read, write) in pipes.items():
        os.close(read)
        os.dup2(write, output)
        os.close(write)


def _terminal() -> tuple[int, int]:
    """Return both ends of a terminal that changes nothing."""
    read, write = os.openpty()
    tty.setraw(write)
    return read, write


def _is_pipe(descriptor: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except OSError:
        return False
