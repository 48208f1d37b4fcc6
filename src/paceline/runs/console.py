"""Terminal output of a run: the progress bar, the lines above it, and the final summary."""

from __future__ import annotations

import io
import shlex
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TextIO, cast

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from paceline.core.output import Console
from paceline.runs.directory import EpochSteps, RunDirectory
from paceline.runs.metric_writers import Imbalance, finite
from paceline.runs.rank_log import Tee, TerminalStream, json_line, terminal_and_log

# --- Rank 0's stderr: a progress bar on terminals, a few plain lines in files and pipes ---


REFRESH_S = 0.2
"""Seconds between two refreshes; one costs about 0.4 ms."""

LINE_S = 30.0
"""Seconds between two lines where there is no terminal."""

_LEAST_LINE_S = 1.0
_WINDOW_S = 30.0
_SHOWN_IMBALANCE = 1.2


class ProgressSnapshot(NamedTuple):
    """The progress of the run at a step; sums count from this process's start.

    Attributes:
        step: steps done, over all restarts.
        epoch: index from 0.
        loss: of this step.
        learning_rate: of the first parameter group.
        samples: samples seen by all ranks.
        training_s: seconds in training steps.
        logged: what the last record has from the task, by name.
    """

    step: int
    epoch: int
    loss: float
    learning_rate: float | None
    samples: int
    training_s: float
    logged: Mapping[str, float] = MappingProxyType({})


class Terminal:
    """Shows the run; everything but the bar also goes to the rank's log, as plain text.

    Args:
        total_steps: of the whole run; None if unknown.
        epochs: where they begin; None if they have no fixed length.
        quiet: show nothing (the log still gets it).
        log_format: of lines where there is no terminal.
    """

    def __init__(
        self,
        *,
        total_steps: int | None,
        epochs: EpochSteps | None,
        quiet: bool,
        log_format: Literal["text", "json"] = "text",
    ) -> None:
        stream, log = terminal_and_log(sys.stderr)
        self._console = Console(file=stream, quiet=quiet, highlight=False)
        # In a notebook rich would show it in the cell, and write nothing into the file.
        self._log = (
            Console(file=log, width=100, color_system=None, highlight=False, force_jupyter=False) if log else None
        )
        self._epochs = epochs
        self._num_epochs = None if epochs is None else epochs.number(total_steps)
        self._total_steps = total_steps
        self._metrics = ""
        self._warning = ""
        self._history: deque[tuple[float, ProgressSnapshot]] = deque()
        self._last_line_s = time.monotonic()
        self._drawn_s = 0.0
        self._is_json = log_format == "json" and not self._console.is_terminal
        has_bar = self._console.is_terminal and not self._console.is_dumb_terminal and not quiet
        self._bar = _Bar(self._console, total_steps) if has_bar else None

    @property
    def interval_s(self) -> float:
        """How often it needs :meth:`progress`, in seconds."""
        return LINE_S if self._bar is None else REFRESH_S

    def progress(self, snapshot: ProgressSnapshot) -> None:
        """Redraw the bar; without one, print a line every :data:`LINE_S` and at an epoch's end."""
        now = time.monotonic()
        if self._bar is not None and now - self._drawn_s < REFRESH_S and snapshot.step != self._total_steps:
            return
        self._drawn_s = now
        self._history.append((now, snapshot))
        while len(self._history) > 2 and now - self._history[0][0] > _WINDOW_S:
            self._history.popleft()
        logged = [f"{name} {number(value)}" for name, value in snapshot.logged.items()]
        if self._bar is not None:
            status = Text("  ".join([f"loss {number(snapshot.loss)}", *logged]))
            if rate := self._samples_per_s():
                status.append(f"  {rate:,.0f} samples/s")
            if self._warning:
                status.append(f"  {self._warning}", style="yellow")
            if self._metrics:
                status.append(f"  {self._metrics}", style="cyan")
            self._bar.show(self._epoch(snapshot.epoch), snapshot.step, self._time_left(snapshot.step), status)
        elif self._line_is_due(snapshot.step, now - self._last_line_s):
            self._last_line_s = now
            if self._is_json:
                speed, left_s = self._samples_per_s(), self._seconds_left(snapshot.step)
                speed = None if speed is None else round(speed, 1)
                self._print_json(
                    "progress",
                    step=snapshot.step,
                    total_steps=self._total_steps,
                    epoch=snapshot.epoch,
                    loss=snapshot.loss,
                    **({"logged": dict(snapshot.logged)} if snapshot.logged else {}),
                    lr=snapshot.learning_rate,
                    samples_per_s=speed,
                    seconds_left=left_s,
                )
                return
            parts = [self._position(snapshot.epoch, snapshot.step), f"loss {number(snapshot.loss)}", *logged]
            if snapshot.learning_rate is not None:
                parts.append(f"lr {number(snapshot.learning_rate)}")
            if rate := self._samples_per_s():
                parts.append(f"{rate:,.0f} samples/s")
            if snapshot.step != self._total_steps and (left := self._time_left(snapshot.step)):
                parts.append(left)
            self.print("  ".join(parts))

    def _line_is_due(self, step: int, since_s: float) -> bool:
        if step == self._total_steps or since_s >= LINE_S:
            return True
        # Very short epochs would fill a file.
        return self._epochs is not None and self._epochs.position(step)[1] == 0 and since_s >= _LEAST_LINE_S

    def imbalance(self, slowest: Imbalance | None) -> None:
        """Show a warning in the bar while a rank is slow."""
        is_large = slowest is not None and slowest.ratio > _SHOWN_IMBALANCE
        self._warning = (
            f"rank {slowest.rank} is {slowest.ratio:.1f}x slower than the mean" if slowest and is_large else ""
        )

    def on_eval_end(self, split: str, step: int, epoch: int, metrics: Mapping[str, float]) -> None:
        """Print an evaluation's metrics and keep them in the bar."""
        values = "  ".join(f"{name} {number(value)}" for name, value in metrics.items())
        self._metrics = f"{split} {values}"
        self.set_status("")
        if self._is_json:
            self._print_json("eval", step=step, epoch=epoch, split=split, metrics=dict(metrics))
            return
        self.print(Text.assemble(f"{self._position(epoch, step)}  ", (self._metrics, "cyan")))

    def finish(self, result: Mapping[str, Any], directory: RunDirectory) -> None:
        """Print the summary of a finished run, or its result as JSON."""
        if self._is_json:
            self._print_json("result", **result)
        else:
            self.print(summary(result, directory))

    def _print_json(self, kind: str, **fields: Any) -> None:
        self._print(Text(json_line(kind, **finite(fields))))

    def set_status(self, text: str) -> None:
        """Show the current activity in the bar."""
        if self._bar is not None:
            self._bar.show_activity(text)

    def print(self, content: RenderableType) -> None:
        """Print above the bar, and into the log."""
        content = Text(content) if isinstance(content, str) else content
        if self._is_json:
            lines = Console(file=io.StringIO(), width=100, color_system=None)
            lines.print(content, soft_wrap=isinstance(content, Text))
            self._print_json("message", message=cast(io.StringIO, lines.file).getvalue().rstrip("\n"))
        else:
            self._print(content)

    def _print(self, content: RenderableType) -> None:
        # The terminal wraps long lines; unbroken ones stay searchable in files.
        is_text = isinstance(content, Text)
        self._console.print(content, soft_wrap=is_text, crop=False)
        if self._log is not None:
            self._log.print(content, soft_wrap=is_text, crop=False)

    def close(self) -> None:
        """Stop the bar and restore the terminal."""
        if self._bar is not None:
            self._bar.stop()

    def _epoch(self, epoch: int) -> str:
        return f"epoch {epoch + 1}/{self._num_epochs}" if self._num_epochs else f"epoch {epoch + 1}"

    def _position(self, epoch: int, step: int) -> str:
        if self._bar is not None:
            return f"{self._epoch(epoch)}  step {step}"
        of = f"/{self._total_steps}" if self._total_steps else ""
        return f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {self._epoch(epoch)}  step {step}{of}"

    def _samples_per_s(self) -> float | None:
        (_, first), (_, last) = self._history[0], self._history[-1]
        if first is last:  # the first report counts from the process's start
            return last.samples / last.training_s if last.training_s > 0 else None
        seconds = last.training_s - first.training_s
        return (last.samples - first.samples) / seconds if seconds > 0 else None

    def _time_left(self, step: int) -> str:
        seconds = self._seconds_left(step)
        return "" if seconds is None else f"{duration(seconds)} left"

    def _seconds_left(self, step: int) -> int | None:
        (then, first), (now, last) = self._history[0], self._history[-1]
        if self._total_steps is None or last.step == first.step:
            return None
        return round((now - then) / (last.step - first.step) * max(self._total_steps - step, 0))


class _Bar:
    """A line with the bar and one with the numbers; drawn on request, without a thread."""

    def __init__(self, console: Console, total_steps: int | None) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}", style="bold"),
            BarColumn(bar_width=30),
            TextColumn("step {task.completed:.0f}" + ("/{task.total:.0f}" if total_steps else "")),
            TextColumn("{task.fields[note]}", style="dim"),
            auto_refresh=False,
        )
        # Without a known end the bar pulses.
        self._row = self._progress.add_task("", total=total_steps, note="")
        self._status = Text()
        self._live = Live(
            console=console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            get_renderable=lambda: Group(self._progress.get_renderable(), self._status),
        )
        self._restore = ExitStack()

    def show(self, description: str, step: int, note: str, status: Text) -> None:
        if not self._live.is_started:
            self._redirect_above_bar()
            self._live.start()
        status.no_wrap = True
        status.overflow = "ellipsis"
        self._status = status
        self._progress.update(self._row, description=description, completed=step, note=note)
        self._live.refresh()

    def show_activity(self, text: str) -> None:
        if self._live.is_started:
            self._progress.update(self._row, note=text)
            self._live.refresh()

    def stop(self) -> None:
        self._restore.close()
        self._live.stop()

    def _redirect_above_bar(self) -> None:
        """Print other output to this terminal above the bar instead of through it."""
        for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            terminal, _ = terminal_and_log(stream)
            if not terminal.isatty():
                continue
            above = _StreamAboveBar(self._console, terminal)
            if isinstance(stream, Tee):
                self._restore.callback(setattr, stream, "terminal", terminal)
                stream.terminal = cast(TextIO, above)
            else:
                self._restore.enter_context(redirect(cast(TextIO, above)))
            self._restore.callback(above.end_line)


class _StreamAboveBar(TerminalStream):
    """A terminal stream that prints complete lines above the bar."""

    def __init__(self, console: Console, terminal: TextIO) -> None:
        super().__init__(terminal)
        self._console = console

    def write(self, text: str) -> int:
        with self._lock:
            complete, newline, self._line = (self._line + text).rpartition("\n")
        if newline:
            self._print(complete)
        return len(text)

    def _print(self, lines: str) -> None:
        self._console.print(Text.from_ansi(lines), soft_wrap=True)

    def end_line(self) -> None:
        with self._lock:
            rest, self._line = self._line, ""
        if rest:
            self._print(rest)


def number(value: Any) -> str:
    """Format a metric: four significant digits, whole numbers in full."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def duration(seconds: float) -> str:
    """Format seconds: 0:00:07, 1:02:03 or 2d 1:02:03."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    return (f"{days}d " if days else "") + f"{h}:{m:02d}:{s:02d}"


# --- The final summary: metrics, paths and next steps ---


def summary(result: Mapping[str, Any], directory: RunDirectory) -> RenderableType:
    """Render ``result.json``'s content for people."""
    metrics = result.get("metrics")
    return Group(
        *([_metrics_table(metrics)] if metrics else []),
        _facts(result, directory),
        Text("Next steps", style="bold"),
        _next_steps(directory),
    )


def _metrics_table(metrics: Mapping[str, Mapping[str, float]]) -> Table:
    names = list(dict.fromkeys(name for values in metrics.values() for name in values))
    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("split")
    for name in names:
        table.add_column(Text(name), justify="right", style="cyan")
    for split, values in metrics.items():
        table.add_row(Text(split), *(number(values[name]) if name in values else "" for name in names))
    return table


def _facts(result: Mapping[str, Any], directory: RunDirectory) -> Text:
    return _pairs(
        {
            "steps": number(result["steps"]) if "steps" in result else None,
            "samples": number(result["samples"]) if "samples" in result else None,
            "speed": f"{result['samples_per_s']:,.0f} samples/s" if result.get("samples_per_s") else None,
            "devices": result.get("devices"),
            "time": duration(result["seconds"]) if "seconds" in result else None,
            "staleness": _staleness(result.get("staleness")),
            "restarts": number(result["restarts"]) if result.get("restarts") else None,
            "model sha256": result.get("model_sha256"),
            "run": str(directory.path),
        }
    )


def _staleness(staleness: Mapping[str, Any] | None) -> str | None:
    if not staleness:
        return None
    return f"{staleness['mean']:.2f} updates on average, {staleness['max']} at most"


def _next_steps(directory: RunDirectory) -> Text:
    path = shlex.quote(str(directory.path))
    has_task = directory.continuation().startswith("paceline resume")
    return _pairs(
        {
            "report": f"paceline report {path}" if has_task else None,
            "export": f"paceline export {path}" if has_task else None,
            "audit": f"paceline audit {path}",
            "curves": f"tensorboard --logdir {shlex.quote(str(directory.tensorboard))}"
            if directory.tensorboard.is_dir()
            else None,
            "all runs": "paceline runs",
        }
    )


def _pairs(rows: Mapping[str, str | None]) -> Text:
    # Hashes, paths and commands are not broken, so that they can be copied.
    text = Text(no_wrap=True, overflow="ignore")
    for name, value in rows.items():
        if value is not None:
            text.append(f"{name:{len('model sha256')}}  ", style="dim").append(f"{value}\n")
    return text
