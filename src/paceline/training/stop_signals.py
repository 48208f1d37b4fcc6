"""The signals by which a worker is asked to stop."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from paceline.core.signals import ECHO_S, WORKER_STOP_SIGNALS, StopRequests, forwarded_signal
from paceline.training.control import StopCause

_END = b"\0"
_entered: list[StopSignals] = []


class StopSignals:
    """Turns SIGTERM, SIGUSR1 and SIGINT into a flag; Ctrl-C after another signal ends the process immediately.

    The end of its terminal (SIGHUP) counts as SIGTERM where no launcher hears it, and ``nohup`` has not been used.

    Python runs handlers in the main thread, and not while that is inside C++ (a long operation, a
    wait for a dead peer). So a thread of its own reads the signals' numbers from a pipe, and
    judges them. Outside the main thread signals cannot be handled, and none is.

    Args:
        launched: another process may pass on what a terminal sends to this one, too.

    Attributes:
        received: the first signal, or ``StopCause.NONE``.
    """

    def __init__(self, *, launched: bool = False) -> None:
        self.received = StopCause.NONE
        self._launched = launched
        self._requests = StopRequests(ECHO_S if launched else 0.0)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._pipe = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(self._pipe[1], False)
            self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            self._watcher = threading.Thread(target=self._watch, name="paceline-signals", daemon=True)
            self._watcher.start()
            hears_hangup = not self._launched and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
            for number in (*WORKER_STOP_SIGNALS, *([signal.SIGHUP] if hears_hangup else [])):
                self._before[number] = signal.signal(number, self._on_signal)
            _entered.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._before:
            _entered.remove(self)
            signal.set_wakeup_fd(self._wakeup_before)
            os.write(self._pipe[1], _END)
            self._watcher.join()
            for descriptor in self._pipe:
                os.close(descriptor)

    @property
    def handled(self) -> tuple[int, ...]:
        """The signals that it handles now."""
        return tuple(self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or StopCause(forwarded_signal(number))

    def _watch(self) -> None:
        while (content := os.read(self._pipe[0], 1)) != _END:
            if content[0] in self._before:
                if self._requests.hear(content[0]) == "end":
                    os._exit(128 + content[0])
                self.received = self.received or StopCause(forwarded_signal(content[0]))


def _let_go() -> None:
    """Reset the handlers in a forked child, whose signals must not reach its parent's pipe."""
    if _entered:
        signal.set_wakeup_fd(-1)
        for number in _entered[-1].handled:
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_let_go)
