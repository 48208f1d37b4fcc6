"""Makes the run of this version in this directory: ``python tests/runs/released/make.py`` before each release.

It has trained 13 steps on two processes, and is kept without the names of the directories in which it was made.
``expected.json`` has the weights of a run of three epochs on one process, to which its fork must come.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import paceline

HERE = Path(__file__).resolve().parent
TRAIN = (
    *("train", "task.py:Largest", "--global-batch-size", "12", "--microbatches", "6", "--seed", "3"),
    *("--threads", "1", "--device", "cpu", "--checkpoint-every", "5steps", "--log-every", "2", "--quiet"),
)
KEPT = ("run.toml", "ledger", "checkpoints", "events.jsonl", "metrics.jsonl", "code.jsonl", "result.json")
STOPPED = 13


def train(*words: str | Path) -> None:
    """Train the task."""
    subprocess.run([sys.executable, "-m", "paceline", *TRAIN, *words], cwd=HERE, stdout=subprocess.DEVNULL, check=True)


def main() -> None:
    """Write the run and what it comes to."""
    os.chdir(HERE)
    with tempfile.TemporaryDirectory() as folder:
        train("--epochs", "3", "--run-dir", f"{folder}/whole")
        run = Path(folder) / "run"
        train("--nproc", "2", "--max-steps", str(STOPPED), "--run-dir", run)
        weights = paceline.load(f"{folder}/whole").state_dict()
        target = HERE / paceline.__version__
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(run, target, ignore=lambda at, names: {*names} - {*KEPT} if at == str(run) else ())
    lines = (target / "run.toml").read_text().splitlines()
    kept = [line for line in lines if not line.startswith(("directory = ", "run_dir = "))]
    (target / "run.toml").write_text("\n".join(kept) + "\n")
    result = json.loads((target / "result.json").read_text())
    (target / "result.json").write_text(json.dumps({**result, "run": ""}, indent=2) + "\n")
    code = [json.loads(line) for line in (target / "code.jsonl").read_text().splitlines()]
    (target / "code.jsonl").write_text("".join(json.dumps({**line, "directory": ""}) + "\n" for line in code))
    expected = {name: [round(x, 7) for x in values.double().flatten().tolist()] for name, values in weights.items()}
    (target / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main()
