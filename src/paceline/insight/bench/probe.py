"""What a measured process records of itself; the same clock for every peer, and no torch in it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.files import write_atomically

_MEMORY = Path("/proc/self/status")
_ROLLUP = Path("/proc/self/smaps_rollup")
_RESET_PEAK = Path("/proc/self/clear_refs")


@dataclass
class Probe:
    """Clock and memory of one process, read when a step's forward pass begins.

    The clock runs from the start of step ``warmup`` to the start of step ``warmup + steps``: exactly
    ``steps`` whole steps, with all that a framework does in between. No barrier is needed, as every
    step waits for the other ranks' gradients.

    Attributes:
        warmup: steps before the clock starts.
        steps: steps that are measured.
        ticks_per_step: calls of :meth:`tick` a step.
    """

    warmup: int
    steps: int
    ticks_per_step: int = 1
    _ticks: int = field(default=0, init=False)
    _started_s: float = field(default=0.0, init=False)
    _seconds: float = field(default=0.0, init=False)
    _imports_kib: int | None = field(default=None, init=False)
    _peak_kib: int | None = field(default=None, init=False)

    def note_imports(self) -> None:
        """Take the memory held now, on the first call, as the imports'; forget its peak so far."""
        if self._imports_kib is not None or not _RESET_PEAK.exists():
            return
        # 5 resets the peak resident set size: proc(5). Some containers forbid it.
        try:
            _RESET_PEAK.write_text("5", encoding="ascii")
        except OSError:
            return
        self._imports_kib = _status_kib("VmRSS")

    def tick(self) -> bool:
        """Count a forward pass; True when it is the one that ends the measurement."""
        tick, self._ticks = self._ticks, self._ticks + 1
        if tick == self.warmup * self.ticks_per_step:
            self._started_s = time.perf_counter()
        elif tick == (self.warmup + self.steps) * self.ticks_per_step:
            self._seconds = time.perf_counter() - self._started_s
            if self._imports_kib is not None:
                self._peak_kib = _status_kib("VmHWM") - _shared_with_others_kib()
            return True
        return False

    def write(self, path: Path, loss: float) -> None:
        """Write what was measured, and a loss that shows that the peer did train."""
        report = {"steps": self.steps, "seconds": self._seconds, "loss": loss}
        if self._imports_kib is not None and self._peak_kib is not None:
            report["memory_mib"] = (self._peak_kib - self._imports_kib) / 1024
        write_atomically(path, json.dumps(report).encode())


def _shared_with_others_kib() -> int:
    """The part of shared memory that is others': a page that two processes map is half each one's."""
    values = dict(line.split(":", 1) for line in _ROLLUP.read_text(encoding="ascii").splitlines()[1:])
    shares = int(values["Pss_Shmem"].split()[0])
    return _status_kib("RssShmem") - shares


def _status_kib(name: str) -> int:
    for line in _MEMORY.read_text(encoding="ascii").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise OSError(f"{_MEMORY} has no {name}")
