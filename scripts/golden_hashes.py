"""Records the hashes of final models, and compares: a refactoring must keep the bits.

Short trainings of built-in tasks and of the tasks in ``golden_tasks.py``, under several strategies, and once
killed and resumed. Only the command line is used, so one record serves many versions of the package::

    python scripts/golden_hashes.py --source OLD/src --record golden.json
    python scripts/golden_hashes.py --source src --compare golden.json

It exits with 1 if a hash differs or a training fails, and with 2 if it could not begin.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import psutil

Hashes: TypeAlias = dict[str, dict[str, str]]

# The spelling of the command line may change between versions; all of it is here.
TRAIN, RESUME = "train", "resume"
COMMON = ("--quiet", "--json", "--threads", "1", "--device", "cpu", "--seed", "3")
FLAGS = {
    "run": "--run-dir",
    "set": "--set",
    "strategy": "--strategy",
    "processes": "--nproc",
    "microbatches": "--microbatches",
    "batch": "--global-batch-size",
    "epochs": "--epochs",
    "steps": "--max-steps",
    "save": "--checkpoint-every",
    "evaluate": "--eval-every",
}
HASH = "model_sha256"  # in the result, the last line that --json prints
EVENTS, SAVED, RESULT = "events.jsonl", '"event": "checkpoint"', "result.json"  # in a run's directory
REFUSED_CODE = 2  # what a command exits with where the user must change something

REFUSED, FAILED = "refused", "failed"
TIMEOUT_S, KILL_ATTEMPTS = 180, 3

_SMALL = ("layers=2", "width=32", "heads=2", "context=32", "held_out=8", "dropout=0.1")
_EPOCHS: dict[str, object] = {"batch": 16, "microbatches": 4, "epochs": 2}
TASKS: dict[str, dict[str, object]] = {
    "fashion-mnist": {"batch": 32, "microbatches": 4, "steps": 12, "evaluate": "6steps"},
    "transformer": {"batch": 16, "microbatches": 4, "steps": 12, "evaluate": "6steps", "set": _SMALL},
    "BatchNorm": _EPOCHS,
    "Dropout": _EPOCHS,
    "Uneven": {"batch": 24, "microbatches": 5, "epochs": 3},
    "TwoOptimizers": _EPOCHS,
    "Stream": _EPOCHS,
}
CASES: dict[str, dict[str, object]] = {
    "single": {"strategy": "single", "processes": 1},
    "ddp-2": {"strategy": "ddp", "processes": 2},
    "ddp-3": {"strategy": "ddp", "processes": 3},
    "fsdp-2": {"strategy": "fsdp", "processes": 2},
    "pp-2": {"strategy": "pp", "processes": 2},
    "killed": {"strategy": "ddp", "processes": 2, "save": "3steps"},
}


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    def outcome(self, may_refuse: bool = True) -> str:
        """The model's hash, or why there is none."""
        if self.code == 0:
            return str(json.loads(self.stdout.splitlines()[-1])[HASH])
        message = next((line.strip() for line in self.stderr.splitlines() if line.strip()), "no message")
        refused = may_refuse and self.code == REFUSED_CODE
        return f"{REFUSED if refused else f'{FAILED} with {self.code}'}: {message}"


class Command:
    """A running command of Paceline."""

    def __init__(self, package: Package, words: list[str], folder: Path, hold: Path | None = None) -> None:
        environment = dict(os.environ) | {"PYTHONPATH": str(package.source)}
        if hold is not None:
            environment["GOLDEN_HOLD"] = str(hold)
        self._out, self._err = folder / "stdout", folder / "stderr"
        # Into files, not pipes: a pipe without a reader fills up.
        with self._out.open("w") as out, self._err.open("w") as err:
            self._process = subprocess.Popen(
                [str(package.python), "-m", "paceline", *words],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL to it and all it has started: these are in process groups of their own."""
        others: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            others = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        for process in others:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                # While it is there, the run is in use; a zombie may stay, and holds nothing.
                while process.status() != psutil.STATUS_ZOMBIE:
                    time.sleep(0.01)

    def end(self) -> Ended:
        """Wait for it, or kill it if it takes too long."""
        try:
            self._process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        code = self._process.wait()
        return Ended(code, self._out.read_text(), self._err.read_text())


@dataclass(frozen=True)
class Package:
    """The Paceline that is examined.

    Attributes:
        python: the interpreter.
        source: the directory that has the package in it.
    """

    python: Path
    source: Path

    def check(self, folder: Path) -> None:
        """The interpreter must import the package from there, not one that is installed."""
        where = [str(self.python), "-c", "import paceline; print(paceline.__file__)"]
        environment = dict(os.environ) | {"PYTHONPATH": str(self.source)}
        found = subprocess.run(where, cwd=folder, env=environment, stdout=subprocess.PIPE)
        if not Path(found.stdout.decode().strip()).is_relative_to(self.source):
            print(f"{self.python} does not import Paceline from {self.source}.", file=sys.stderr)
            raise SystemExit(2)

    def train(self, task: str, case: str, folder: Path) -> str:
        """The final model's hash of one case, or why there is none."""
        if case != "killed":
            return Command(self, _words(task, case, folder / "run"), folder).end().outcome()
        for attempt in range(KILL_ATTEMPTS):
            run = folder / f"run-{attempt}"
            ended = self._train_and_kill(_words(task, case, run), run)
            if ended.code > 0 or not _saved(run):
                return ended.outcome()
            if not (run / RESULT).exists():
                resumed = Command(self, [RESUME, str(run), *COMMON[:2]], folder).end()
                return resumed.outcome(may_refuse=False)
        return f"{FAILED}: in {KILL_ATTEMPTS} attempts it was finished before it was killed"

    def _train_and_kill(self, words: list[str], run: Path) -> Ended:
        hold = run.with_suffix(".hold")  # so tiny a training waits in its middle
        hold.touch()
        command = Command(self, words, run.parent, hold)
        deadline = time.monotonic() + TIMEOUT_S
        while command.running() and not _saved(run) and time.monotonic() < deadline:
            time.sleep(0.002)
        command.kill()
        hold.unlink()
        return command.end()


def _saved(run: Path) -> bool:
    """Whether there is a checkpoint."""
    return (run / EVENTS).exists() and SAVED in (run / EVENTS).read_text(encoding="utf-8")


def _words(task: str, case: str, run: Path) -> list[str]:
    own = Path(__file__).with_name("golden_tasks.py").resolve()
    words = [TRAIN, task if task.islower() else f"{own}:{task}", *COMMON]
    for name, value in (TASKS[task] | CASES[case] | {"run": run}).items():
        for each in value if isinstance(value, tuple) else (value,):
            words += [FLAGS[name], str(each)]
    return words


def train_all(package: Package, selection: str) -> Hashes:
    """Train every case whose ``task/case`` has the selection in it, one after another."""
    hashes: Hashes = {}
    chosen = [(task, case) for task in TASKS for case in CASES if selection in f"{task}/{case}"]
    for number, (task, case) in enumerate(chosen, start=1):
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="golden-", ignore_cleanup_errors=True) as folder:
            found = hashes.setdefault(task, {})[case] = package.train(task, case, Path(folder))
        took = time.monotonic() - begin
        print(f"[{number}/{len(chosen)}] {task}/{case}: {found[:120]} ({took:.1f} s)", flush=True)
    return hashes


def differences(old: Hashes, new: Hashes) -> list[str]:
    """One line for each case that has another outcome; the words of a refusal may change."""
    lines = []
    for task, cases in new.items():
        for case, found in cases.items():
            expected = old.get(task, {}).get(case, "not recorded")
            if found != expected and not (found.startswith(REFUSED) and expected.startswith(REFUSED)):
                lines.append(f"{task}/{case}: was {expected}, is {found}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="the interpreter")
    parser.add_argument("--source", type=Path, required=True, help="the directory that has paceline in it")
    parser.add_argument("-k", metavar="TEXT", default="", help="only cases with this in their TASK/CASE")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--record", type=Path, metavar="FILE", help="write the hashes")
    action.add_argument("--compare", type=Path, metavar="FILE", help="compare with recorded hashes")
    options = parser.parse_args()

    # An interpreter in a virtual environment is a link, which must be called by its own name.
    package = Package(options.python.absolute(), options.source.resolve())
    package.check(Path(tempfile.gettempdir()))
    old: Hashes | None = json.loads(options.compare.read_bytes()) if options.compare else None
    begin = time.monotonic()
    hashes = train_all(package, options.k)
    outcomes = [outcome for cases in hashes.values() for outcome in cases.values()]
    failed = sum(outcome.startswith(FAILED) for outcome in outcomes)
    print(f"{len(outcomes)} trainings in {time.monotonic() - begin:.0f} s, {failed} failed")
    if old is None:
        options.record.write_text(json.dumps(hashes, indent=2) + "\n", encoding="utf-8")
        return 1 if failed else 0
    different = differences(old, hashes)
    print(*different, f"{len(outcomes) - len(different)} equal, {len(different)} different", sep="\n")
    return 1 if different or failed else 0


if __name__ == "__main__":
    sys.exit(main())
