"""An agent's work on the run's files, in a thread of its own. No torch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class FileWork:
    """Works on files in the order in which that is asked for, while the agent's loop continues.

    A network file system may take seconds for what a disk does at once. An agent that is silent for as long is lost to
    the others, and its workers are lost to it.

    Args:
        wake: wakes the loop, which then calls :meth:`deliver`; thread-safe.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="paceline-files")
        self._done: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._last: dict[Callable[[], object], Future[Any]] = {}  # of :meth:`do_again`

    def do(self, work: Callable[[], T], then: Callable[[T], object] | None = None) -> Future[T]:
        """Have ``work`` done, and ``then`` called in the loop with its result; an exception is raised there."""
        future = self._thread.submit(work)
        if then is not None:
            future.add_done_callback(partial(self._on_done, then))
        return future

    def do_again(self, work: Callable[[], T], then: Callable[[T], object] | None = None) -> None:
        """Have work done that is asked for again and again, unless it still waits for the disk."""
        if work not in self._last or self._last[work].done():
            self._last[work] = self.do(work, then)

    def deliver(self) -> None:
        """Call the follow-ups of all work that is done."""
        while not self._done.empty():  # no other thread takes any
            self._done.get()()

    def close(self) -> None:
        """Finish the work; nothing follows it any more."""
        self._thread.shutdown()

    def _on_done(self, then: Callable[[T], object], future: Future[T]) -> None:
        self._done.put(lambda: then(future.result()))
        self._wake()
