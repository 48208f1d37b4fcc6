"""Stop signals and stack dumps, shared by all processes of a job. No torch."""

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
"""The signals that request a launcher to stop its job."""

WORKER_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""The signals that request a worker to finish its step, save and exit. Slurm can warn with SIGUSR1."""

ECHO_S = 1.0
"""A second SIGINT within this time is an echo: the terminal and the launcher both delivered the first one."""

_TURN_S = 0.5


class StopRequests:
    """Classifies stop signals: the first request, repetitions, and the one that ends the process at once.

    Only Ctrl-C (SIGINT) on top of another request ends the process at once. Schedulers repeat SIGTERM and
    SIGUSR1, send them to a launcher and to its children, and kill by themselves after a grace period; a save in
    progress must not be abandoned earlier.

    Python handles simultaneous signals in the order of their numbers, SIGINT first, so which of two was sent
    first cannot matter, except when a launcher may forward Ctrl-C as another signal.

    Args:
        echo_s: another SIGINT within this time after one is its echo; if above 0, only SIGINT ends the process.
    """

    def __init__(self, echo_s: float = 0.0) -> None:
        self.first: int | None = None
        self._echo_s = echo_s
        self._interrupted_at = -math.inf

    def hear(self, number: int) -> Literal["first", "again", "end"]:
        """Classify a signal: the first request to stop, a repetition, or a request to end at once."""
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
    """Return the signal by which a launcher forwards a signal that it received; workers do not handle SIGHUP."""
    return signal.Signals(number) if number in WORKER_STOP_SIGNALS else signal.SIGTERM


@contextmanager
def handle_signals(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], None] | signal.Handlers
) -> Iterator[None]:
    """Handle these signals within the block; do nothing outside the main thread, where Python cannot.

    A SIGHUP that is ignored stays ignored: the user has started the command with ``nohup``.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handlers = {number: signal.signal(number, handler) for number in numbers if not _by_nohup(number)}
    try:
        yield
    finally:
        for number, previous in previous_handlers.items():
            signal.signal(number, previous)


def _by_nohup(number: int) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


@contextmanager
def interrupt_at_exit(numbers: Iterable[int] = (signal.SIGINT,)) -> Iterator[None]:
    """Postpone Ctrl-C to the end of the block, so that the block's work completes.

    A second one is raised at once; all of these signals count as Ctrl-C.
    """
    received: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    with handle_signals(numbers, on_signal):
        yield
    if received:
        raise KeyboardInterrupt


def wait_for(event: threading.Event) -> None:
    """Wait in the main thread for an event that a signal handler may set.

    It polls: Python checks for signals before it begins a wait, and would handle one that arrives right then only after
    the wait.
    """
    while not event.wait(_TURN_S):
        pass


def dump_stacks_on_signal() -> None:
    """Print all threads' Python stacks to stderr on SIGUSR2, and on a crash such as SIGSEGV.

    Also install the handler through which a supervisor reads them silently; see :mod:`paceline.core.stack_dump`.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True, chain=False)
    install_dump_handler()
