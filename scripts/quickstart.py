"""What ``make quickstart`` runs: train the main job on two processes, then say what came out."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

PACELINE = ".venv/bin/paceline"


def main() -> int:
    run = Path("runs") / time.strftime("quickstart-%Y%m%d-%H%M%S")
    command = [PACELINE, "train", "fashion-mnist", "--nproc", "2", "--epochs", "3", "--run", str(run)]
    print(f"$ {shlex.join(command)}", flush=True)
    # Progress goes to stderr; with --json the result is the last line of stdout.
    with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True) as process:
        try:
            output, _ = process.communicate()
        except KeyboardInterrupt:
            # The run got the Ctrl-C as well: it saves its state, and says how to go on.
            output, _ = process.communicate()
    if process.returncode != 0:
        return process.returncode
    result = json.loads(output.splitlines()[-1])
    print(f"""
  test accuracy   {result["metrics"]["test"]["accuracy"]:.4f}
  trained         {result["epochs"]} epochs, {result["steps"]:,} steps, {result["seconds"]:.0f} s
  run directory   {run}

What next:

  # Was every sample seen exactly once an epoch?
  {PACELINE} audit {run}

  # Your own task: copy this file, change it, run it.
  {PACELINE} train examples/fashion_mnist.py:FashionMNIST --nproc 2 --epochs 1

  # All your runs; and what each option does.
  {PACELINE} runs
  {PACELINE} train --help
""")
    return 0


if __name__ == "__main__":
    sys.exit(main())
