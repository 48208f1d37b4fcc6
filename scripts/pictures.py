"""Pictures of real runs for the README and the docs: ``python scripts/pictures.py`` writes them to docs/images.

``terminal.svg`` is what commands printed on a terminal while a process of the run was killed; ``recovery.svg`` are the
steps of the same run; ``report.png`` is its report in a browser (Debian's chromium). Takes a minute on an idle machine.

``python scripts/pictures.py rate`` measures training on one process and on as many as there are cores, in turns, for
``rate.svg``; ``python scripts/pictures.py search`` runs a search, whose curves are ``search.svg``.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

IMAGES = Path(__file__).parents[1] / "docs/images"
COLUMNS, ROWS = 100, 50
CONTROL = re.compile(r"\x1b\[(\?25[lh]|2K|1A)|\r\n|\r|\n")
TRAIN = "paceline train fashion-mnist-mlp --log-every 5 --threads 1"
KILLED_AT = 30  # records


class Terminal:
    """A terminal that keeps what was printed on it, but for progress that was drawn over."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.lines: list[str] = []

    def show(self, command: str) -> None:
        """Show a command that was typed."""
        self.lines.append(f"\x1b[1;32m$\x1b[0m \x1b[1m{command}\x1b[0m")

    def type(self, command: str, meanwhile: Callable[[], None] | None = None) -> None:
        """Run a command, and do something else meanwhile."""
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        environment = {
            **os.environ,
            "TERM": "xterm-256color",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=self.directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        printed = bytearray()
        reader = threading.Thread(target=_read, args=(ours, printed))
        reader.start()
        self.show(command)
        if meanwhile is not None:
            meanwhile()
        assert process.wait() == 0, printed.decode()
        reader.join()
        self.lines += _drawn(printed.decode())

    def write(self, picture: Path, title: str) -> None:
        """Draw the terminal."""
        console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
        console.print(Text.from_ansi("\n".join(self.lines)))
        picture.write_text(console.export_svg(title=title, theme=MONOKAI, unique_id="paceline"))


def _read(terminal: int, printed: bytearray) -> None:
    while True:
        try:
            found = os.read(terminal, 2**16)
        except OSError:  # Linux: the other end was closed
            return
        if not found:
            return
        printed += found


def _drawn(printed: str) -> list[str]:
    """Return the lines as they are at the end, after the moves of a progress bar."""
    lines, row, place = [""], 0, 0
    for match in [*CONTROL.finditer(printed), None]:
        end = len(printed) if match is None else match.start()
        lines[row] += printed[place:end]
        if match is None:
            break
        place = match.end()
        match match[0]:
            case "\n" | "\r\n":
                row += 1
                lines += [""] * (row == len(lines))
            case "\x1b[2K":
                lines[row] = ""
            case "\x1b[1A":
                row -= 1
    return [line for line in lines if line.strip()]


def pid_in_the_middle(run: Path) -> int:
    """Wait until a run is in the middle; return the number of rank 1's process."""
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < KILLED_AT:
        time.sleep(0.01)
    return int(json.loads((run / "heartbeats/rank-1.json").read_text())["pid"])


def draw_recovery(run: Path, picture: Path) -> None:
    """Draw the steps of a run over time, with what happened to its processes."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    trained = [record for record in records if record["kind"] == "train"]
    begin = next(event["time"] for event in events if event["event"] == "started")
    figure = Figure(figsize=(7.2, 2.8), layout="constrained")
    axes = figure.subplots()
    axes.plot([record["time"] - begin for record in trained], [record["step"] for record in trained], color="#3264c8")
    top = trained[-1]["step"]
    for event in events:
        at = event["time"] - begin
        if event["event"] == "fault":
            axes.axvline(at, color="#c83232", linewidth=1)
            axes.annotate("kill -9", (at, top * 0.95), (3, 0), textcoords="offset points", color="#c83232", fontsize=8)
        elif event["event"] == "joined":
            count = next(
                e["world_size"] for e in events if e.get("generation") == event["generation"] and "world_size" in e
            )
            text = f"{count} processes" if count > 1 else "1 process continues"
            axes.axvline(at, color="#329650", linewidth=1)
            axes.annotate(
                text,
                (at, top * (0.08 if count > 1 else 0.02)),
                (3, 0),
                textcoords="offset points",
                color="#329650",
                fontsize=8,
            )
    axes.set_xlabel("seconds")
    axes.set_ylabel("step")
    save(figure, picture)


ROUNDS = 5
RATE = (
    "paceline train fashion-mnist --microbatches 12 --global-batch-size 192 --max-steps 80 --log-every 10 --threads 1"
)
SEARCH = (
    "paceline tune fashion-mnist-mlp --search lr=log:1e-3:1 --search momentum=uniform:0:0.95 --trials 12 --epochs 8 "
    "--val-fraction 0.1 --seed 1"
)


def run_quietly(command: str, directory: Path) -> None:
    """Run a command in a directory."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", command], cwd=directory, env=environment, check=True, stdout=subprocess.DEVNULL)


def records_of(run: Path, kind: str) -> list[dict[str, Any]]:
    """Return a run's records of steps or of evaluations."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == kind]


def machine() -> str:
    """Return the machine on which a picture was measured, with what else it computes."""
    models = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    load = os.getloadavg()[0]
    busy = f", busy with other work: load {load:.0f}" if load > 2 else ""  # some of it is the picture's own work
    return f"{len(os.sched_getaffinity(0))} cores of {models[0]}{busy}"


def draw_rate(directory: Path, picture: Path) -> None:
    """Measure the samples a second for numbers of processes up to that of the cores, in turns, and draw them."""
    counts = range(1, len(os.sched_getaffinity(0)) + 1)
    where, rates, hashes = machine(), {count: list[float]() for count in counts}, set()
    for number in range(ROUNDS):
        for count in counts:
            run = directory / f"rate-{count}-{number}"
            run_quietly(f"{RATE} --nproc {count} --quiet --run-dir {run}", directory)
            steady = [record["samples_per_s"] for record in records_of(run, "train")[2:]]
            rates[count].append(statistics.median(steady))
            hashes.add(json.loads((run / "result.json").read_text())["model_sha256"])
    assert len(hashes) == 1, "the bits differ"
    print({count: [round(rate) for rate in of_count] for count, of_count in rates.items()}, where)
    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    axes = figure.subplots()
    best = [max(rates[count]) for count in counts]
    axes.plot(counts, [best[0] * count for count in counts], color="#969696", linestyle=":", label="linear")
    axes.plot(counts, best, color="#3264c8", marker="o", label="the fastest round")
    for count in counts:
        axes.scatter([count] * ROUNDS, rates[count], color="#3264c8", s=12, alpha=0.5)
    axes.set_xticks(list(counts))
    axes.set_ylim(0)
    axes.set_xlabel("processes")
    axes.set_ylabel("samples a second")
    axes.set_title(f"{where}. All {len(counts) * ROUNDS} runs end with the same model.", fontsize=8, loc="left")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    save(figure, picture)


def draw_search(directory: Path, picture: Path) -> None:
    """Search; the picture is the search's own."""
    run_quietly(f"{SEARCH} --quiet --run-dir search", directory)
    shutil.copy(directory / "search/curves.svg", picture)


def save(figure: Figure, picture: Path) -> None:
    """Write a figure, with the same names of its parts each time."""
    figure.axes[0].spines[["top", "right"]].set_visible(False)
    with mpl.rc_context({"svg.hashsalt": "paceline"}):
        figure.savefig(picture, metadata={"Date": None})


def main() -> None:
    """Write the pictures."""
    drawings = {"rate": draw_rate, "search": draw_search}
    if wanted := sys.argv[1:]:
        for name in wanted:
            with tempfile.TemporaryDirectory() as folder:
                drawings[name](Path(folder), IMAGES / f"{name}.svg")
        return
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        terminal = Terminal(directory)
        two = directory / "runs/two"

        pids: list[int] = []

        def kill() -> None:
            pids.append(pid_in_the_middle(two))
            os.kill(pids[0], signal.SIGKILL)

        terminal.type(f"{TRAIN} --nproc 2 --run-dir runs/two", kill)
        terminal.show(f"kill -9 {pids[0]}  # meanwhile, in another terminal: the process of rank 1")
        terminal.type("paceline runs show runs/two")
        terminal.type(f"{TRAIN} --quiet --run-dir runs/one  # one process")
        terminal.type("grep -h model_sha256 runs/*/result.json")
        terminal.type("paceline audit runs/two")
        terminal.write(IMAGES / "terminal.svg", "Paceline")
        draw_recovery(two, IMAGES / "recovery.svg")
        terminal.type("paceline report runs/two --output report.html")
        browser = shutil.which("chromium")
        if browser is None:
            sys.exit("there is no chromium: report.png was not written")
        page = [f"--screenshot={IMAGES / 'report.png'}", "--window-size=1000,1320", f"file://{directory}/report.html"]
        subprocess.run([browser, "--headless", "--no-sandbox", "--hide-scrollbars", *page], check=True, cwd=directory)


if __name__ == "__main__":
    main()
