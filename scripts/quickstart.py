"""What ``make quickstart`` runs: train the main job on two processes, then say how to go on."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time

PACELINE = ".venv/bin/paceline"


def main() -> int:
    run = time.strftime("runs/quickstart-%Y%m%d-%H%M%S")
    command = [PACELINE, "train", "fashion-mnist", "--nproc", "2", "--epochs", "3", "--run", run]
    print(f"$ {shlex.join(command)}", flush=True)
    # It shows its progress, the test accuracy, where the run is, and how to look at it.
    with subprocess.Popen(command) as process:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            # The run got the Ctrl-C as well: it saves its state, and says how to continue.
            code = process.wait()
    if code == 0:
        print("""To have these commands at hand:
  . .venv/bin/activate

Your own task: copy examples/fashion_mnist.py, change it, and run it. Any of these will do:
  python examples/fashion_mnist.py
  paceline train examples/fashion_mnist.py:Clothes --nproc 2 --epochs 1

Every option: paceline train --help. All about tasks and runs: docs/index.md""")
    return code


if __name__ == "__main__":
    sys.exit(main())
