"""Makes the runs in this directory: checkpoints of format 1, in which an optimizer's state goes by positions.

It needs a Paceline that writes that format, as of the commit before format 2::

    python make.py --source OLD/src

Each run is ``STOPPED`` steps of the task in ``task.py``; ``expected.json`` has the model's weights and hash after
``STEPS`` steps, of a run that was not stopped, and the stopped one continued by that Paceline comes to the same. Only
the files that continuing a run needs are kept, without the directory in which it was made.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
STEPS, STOPPED = 6, 3
COMMON = ("--threads", "1", "--device", "cpu", "--seed", "3", "--eval-every", "never", "--quiet", "--json")
KEPT = ("run.toml", "ledger", "checkpoints")

RUNS: dict[str, tuple[str, ...]] = {
    "single": ("--set", "scheduled=true"),
    "adafactor": ("--set", "optimizer=adafactor"),
    "tied": ("--set", "tied=true"),
    "groups": ("--set", "optimizer=groups", "--nproc", "2"),
    "reversed": ("--set", "order=reversed", "--set", "optimizer=groups"),
    "lr-scale": ("--lr-scale", "2.weight=3", "--lr-scale", "0=0.5"),
    "two": ("--set", "optimizer=two", "--nproc", "2"),
    "fp16": ("--precision", "fp16", "--set", "factor=100"),
    "ema": ("--ema", "0.9"),
    "zero1": ("--strategy", "zero1", "--nproc", "2"),
    "fsdp": ("--strategy", "fsdp", "--nproc", "2"),
    "pp": ("--strategy", "pp", "--nproc", "2"),
    "ps": ("--strategy", "ps", "--ps-servers", "2", "--nproc", "3"),
    "outer": ("--local-sgd-steps", "3", "--outer-optimizer", "nesterov", "--nproc", "2"),
}


def make(name: str, options: tuple[str, ...], folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Make a run, and return what its continuation must come to."""

    def paceline(*words: str | Path) -> str:
        command = [sys.executable, "-m", "paceline", *words]
        done = subprocess.run(command, cwd=HERE, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        return str(json.loads(done.stdout.splitlines()[-1])["model_sha256"])

    run = folder / name
    train = ("train", "task.py:Square", *COMMON, *options, "--max-steps", str(STEPS), "--run-dir", run)
    whole = paceline(*train, "--checkpoint-every", f"{STOPPED}steps")
    (last,) = (run / "checkpoints").glob(f"step-{STEPS:08d}-*/model.safetensors")
    weights = {key: [round(x, 7) for x in value.flatten().tolist()] for key, value in load_file(last).items()}
    for checkpoint in (run / "checkpoints").iterdir():
        if not checkpoint.name.startswith(f"step-{STOPPED:08d}-"):
            checkpoint.unlink() if checkpoint.is_symlink() else shutil.rmtree(checkpoint)
    target = HERE / name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for entry in KEPT:
        (shutil.copytree if (run / entry).is_dir() else shutil.copyfile)(run / entry, target / entry)
    text = (target / "run.toml").read_text()
    kept = [line for line in text.splitlines() if not line.startswith(("directory = ", "run_dir = "))]
    (target / "run.toml").write_text("\n".join(kept) + "\n")
    again = folder / f"{name}-again"
    shutil.copytree(target, again)
    if paceline("resume", again, "--quiet", "--json") != whole:
        raise SystemExit(f"{name}: the continued run has another hash than the whole one")
    return {"model_sha256": whole, "weights": weights}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="the directory that has paceline in it")
    environment = os.environ | {"PYTHONPATH": str(parser.parse_args().source.resolve())}
    with tempfile.TemporaryDirectory() as folder:
        expected = {name: make(name, options, Path(folder), environment) for name, options in RUNS.items()}
    lines = [f'"{name}": {json.dumps(values)}' for name, values in expected.items()]
    (HERE / "expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
