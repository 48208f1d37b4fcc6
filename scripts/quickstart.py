"""The program of ``make quickstart``: train on two processes, analyse, export, serve, predict; then suggest next steps.

Options go to ``paceline train``.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from PIL import Image

from paceline_tasks.fashion_mnist import LABELS, load_fashion_mnist

PACELINE = os.path.relpath(Path(sys.executable).with_name("paceline"))
PACKAGE = "fashion-mnist@quickstart"


def main(options: list[str]) -> int:
    run = Path(time.strftime("runs/quickstart-%Y%m%d-%H%M%S"))
    # It shows its progress, the test accuracy, the run's directory, and the commands to inspect it.
    code = call("train", "fashion-mnist", "--nproc", "2", *options, "--run-dir", str(run))
    code = code or call("report", str(run))
    code = code or call("export", str(run), "--name", "fashion-mnist", "--tag", "quickstart")
    code = code or predict_one(run)
    if code == 0:
        print(f"""
What came out of the run: {run}/report.html

To have these commands at hand:
  . .venv/bin/activate

Your own task: copy examples/fashion_mnist.py, change it, and run it. Any of these will do:
  python examples/fashion_mnist.py
  paceline train examples/fashion_mnist.py:Clothes --nproc 2 --epochs 1

Every option: paceline train --help-all. All about tasks and runs: docs/index.md""")
    return code


def call(*words: str) -> int:
    """Run a command of Paceline's; return its exit code."""
    show(words)
    with subprocess.Popen([PACELINE, *words]) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            # The command got the Ctrl-C as well: it tidies up, and a run says how to continue.
            return process.wait()


def predict_one(run: Path) -> int:
    """Serve the package, and ask the server what is on the first image of the test split."""
    images, labels = load_fashion_mnist("test")
    picture = run / f"test-image-0-{LABELS[labels[0]].replace(' ', '-')}.png"
    Image.fromarray(images[0, 0].numpy()).save(picture)
    words = ("serve", PACKAGE, "--port", "0", "--json")
    show(words)
    with subprocess.Popen([PACELINE, *words], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            ready = server.stdout.readline()
            return call("predict", json.loads(ready)["url"], str(picture)) if ready else server.wait() or 1
        finally:
            server.terminate()


def show(words: tuple[str, ...]) -> None:
    """What a person would type."""
    print(f"\n$ {shlex.join((PACELINE, *words))}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
