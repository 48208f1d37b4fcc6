"""What processes of a job owe each other: a record of their end, stacks when asked, signals. No torch."""

from __future__ import annotations

import faulthandler
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Literal

from paceline.core.parent_death import die_with_parent as die_with_parent
from paceline.core.stack_dump import install_dump_handler

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""What asks a launcher to stop its job."""

WORKER_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""What asks a worker to finish its step, save, and end. Slurm warns with SIGUSR1 where it is asked to."""

ECHO_S = 1.0
"""Within this time a second SIGINT is the first one, on another way: from a terminal and a launcher."""

_TURN_S = 0.5


class StopRequests:
    """Tells the first request to stop from those that change nothing and from the one that ends all.

    Only somebody who presses Ctrl-C (SIGINT) beside another request ends at once. Schedulers repeat
    SIGTERM and SIGUSR1, send them to a launcher and to what it started, and kill by themselves when
    their patience ends: a state that is being saved by then must not be given up sooner.

    Signals that come together are handled in the order of their numbers, SIGINT first, so which of two
    was sent first cannot matter. It does where a launcher may pass a Ctrl-C on as another signal.

    Args:
        echo_s: for so long after a SIGINT another one is its echo; above 0, nothing else after it ends.
    """

    def __init__(self, echo_s: float = 0.0) -> None:
        self.first: int | None = None
        self._echo_s = echo_s
        self._interrupted_at = -math.inf

    def hear(self, number: int) -> Literal["first", "again", "end"]:
        """What a signal means: stop in good order, nothing new, or end at once."""
        now = time.monotonic()
        echo = number == signal.SIGINT and now - self._interrupted_at < self._echo_s
        if number == signal.SIGINT and not echo:
            self._interrupted_at = now
        if self.first is None:
            self.first = number
            return "first"
        hurried = number == signal.SIGINT or (self.first == signal.SIGINT and not self._echo_s)
        return "end" if hurried and not echo else "again"


def forwarded_signal(number: int) -> signal.Signals:
    """The signal by which a launcher passes on one that it got: workers know no SIGHUP."""
    return signal.Signals(number) if number in WORKER_STOP_SIGNALS else signal.SIGTERM


@contextmanager
def handle_signals(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], None] | signal.Handlers
) -> Iterator[None]:
    """Handle these signals so until the block ends; nothing outside the main thread, as Python cannot."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def interrupt_at_exit(numbers: Iterable[int] = (signal.SIGINT,)) -> Iterator[None]:
    """Ctrl-C is raised where the block ends, if it ends well: by then it is known what was done.

    A second one is raised at once; any of these signals is Ctrl-C.
    """
    asked: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    with handle_signals(numbers, on_signal):
        yield
    if asked:
        raise KeyboardInterrupt


def join_all(threads: Iterable[threading.Thread]) -> None:
    """Wait in the main thread until these have ended, or until a signal's handler raises.

    In turns, as :func:`wait_for` says.
    """
    for thread in threads:
        while thread.is_alive():
            thread.join(_TURN_S)


def wait_for(event: threading.Event) -> None:
    """Wait in the main thread for what a signal's handler may set.

    In turns: Python looks for signals before it begins a wait, and one that comes just then would be heard
    only when the wait is over.
    """
    while not event.wait(_TURN_S):
        pass


def dump_stacks_on_signal() -> None:
    """Print all threads' Python stacks to stderr on SIGUSR2, and on a crash such as SIGSEGV.

    Whoever watches over this process gets them without a trace; see :mod:`paceline.core.stack_dump`.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True, chain=False)
    install_dump_handler()


@contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """SIGTERM ends a command as Ctrl-C does, so that what it has started is ended too."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with handle_signals((signal.SIGTERM,), interrupt):
        yield
