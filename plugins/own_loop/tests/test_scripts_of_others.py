"""How many lines of a script change for ``paceline.Run``, beside other libraries, and that its hash is one.

The scripts of others are in docs/own-loop-scripts.md; a script for Accelerate and Fabric is in ``peers``.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import pickle
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.moved_scripts import ORIGINALS, PAGE, move
from tests.processes import Processes

ROOT = Path(__file__).parents[3]
MOST_LINES = 12

SHA256_OF_VISION = "50e351e18f825fe8c87ba1cf0182c93b66f7351dab4588d20acdd5962a1076b9"


def prepare_nanogpt(directory: Path) -> list[str]:
    tokens = np.random.default_rng(0).integers(0, 20, 2000, dtype=np.uint16)
    data = directory / "data/some"
    data.mkdir(parents=True)
    tokens[:1500].tofile(data / "train.bin")
    tokens[1500:].tofile(data / "val.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 20}))
    options = {"dataset": "some", "device": "cpu", "dtype": "float32", "compile": False, "n_layer": 1, "n_head": 2}
    options |= {"n_embd": 16, "block_size": 8, "batch_size": 4, "dropout": 0.1, "gradient_accumulation_steps": 6}
    options |= {"max_iters": 24, "warmup_iters": 2, "lr_decay_iters": 24, "eval_interval": 8, "eval_iters": 2}
    return [f"--{name}={value}" for name, value in options.items()]


def prepare_mnist(directory: Path) -> list[str]:
    return ["--batch-size", "12", "--epochs", "2", "--log-interval", "4"]


def prepare_vision(directory: Path) -> list[str]:
    options = {"device": "cpu", "workers": 0, "batch-size": 12, "epochs": 6, "output-dir": "out", "clip-grad-norm": 1}
    options |= {"mixup-alpha": 0.2, "cutmix-alpha": 1, "model-ema-steps": 2, "model-ema-decay": 0.9}
    options |= {"lr-scheduler": "cosineannealinglr", "lr-warmup-epochs": 2, "label-smoothing": 0.1}
    return ["--model-ema", *(f"--{name}={value}" for name, value in options.items())]


def test_the_lines_that_change_are_counted() -> None:
    page = (ROOT / "docs/own-loop.md").read_text()
    (diff,) = re.findall(r"^```diff title=\"plain.py script.py\"\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    before = [line[1:] for line in diff.splitlines() if not line.startswith("+")]
    scripts = {"Paceline": [line[1:] for line in diff.splitlines() if not line.startswith("-")]}
    for name in ("Accelerate", "Fabric"):
        scripts[name] = (Path(__file__).parent / f"peers/with_{name.lower()}.py").read_text().splitlines()
    for name, script in scripts.items():
        new = [line for line in difflib.ndiff(before, script) if line.startswith("+ ") and line[2:].strip()]
        assert f"| {name} | {len(new)} |" in page


@pytest.mark.slow
@pytest.mark.parametrize("name", ["with_accelerate.py", "with_fabric.py"])
def test_the_scripts_of_other_libraries_train(name: str, tmp_path: Path, run_processes: Processes) -> None:
    environment = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = run_processes.run([sys.executable, Path(__file__).parent / "peers" / name], env=environment)
    assert done.returncode == 0, done.stderr
    assert [line[:7] for line in done.stdout.splitlines() if line.startswith("epoch")] == [
        "epoch 1",
        "epoch 2",
        "epoch 3",
    ]
    again = run_processes.run([sys.executable, Path(__file__).parent / "peers" / name], env=environment)
    assert (again.returncode, again.stdout.count("epoch ")) == (0, 0), again.stderr  # it has loaded what it saved


SCRIPTS = [
    ("nanogpt", "train.py", prepare_nanogpt, "out", 24, "iter 8:"),
    ("mnist", "main.py", prepare_mnist, "runs/mnist", 16, "Train step: 8\t"),
    # It is not in the repository: docs/own-loop-scripts.md says where it is from.
    *[("vision", "train.py", prepare_vision, "out", 48, "Test: EMA Acc@1") for _ in ORIGINALS.glob("vision/train.py")],
]


@pytest.mark.parametrize(
    ("name", "file", "prepare", "run_dir", "steps", "in_step_8"), SCRIPTS, ids=[script[0] for script in SCRIPTS]
)
def test_a_moved_script_has_one_hash(
    tmp_path: Path,
    run_processes: Processes,
    name: str,
    file: str,
    prepare: Callable[[Path], list[str]],
    run_dir: str,
    steps: int,
    in_step_8: str,
) -> None:
    original, script = ORIGINALS / name / file, tmp_path / file
    assert name != "vision" or hashlib.sha256(original.read_bytes()).hexdigest() == SHA256_OF_VISION
    move(name, file, tmp_path)
    before = original.read_text().splitlines()
    changes = list(difflib.unified_diff(before, script.read_text().splitlines(), lineterm="", n=0))[2:]
    added = sum(line.startswith("+") and bool(line[1:].strip()) for line in changes)
    deleted = sum(line.startswith("-") for line in changes)
    assert added <= MOST_LINES
    assert f"({len(before)} lines) | {added} | {deleted} |" in PAGE.read_text()
    options = prepare(tmp_path)
    environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

    def start(ranks: int) -> subprocess.Popen[str]:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        return run_processes.start([sys.executable, *launcher, file, *options], env=environment)

    def record() -> dict[str, object]:
        result = json.loads((tmp_path / run_dir / "result.json").read_text())
        shutil.move(tmp_path / run_dir, tmp_path / f"ended-{len(list(tmp_path.glob('ended-*')))}")
        assert result["steps"] == steps
        return dict(result)

    whole = run_processes.finish(start(1))
    assert whole.returncode == 0, whole.stderr
    first = record()
    stopped = start(2)
    assert stopped.stdout is not None
    assert any(line.startswith(in_step_8) for line in stopped.stdout)
    stopped.send_signal(signal.SIGTERM)
    run_processes.finish(stopped)
    assert not (tmp_path / run_dir / "result.json").exists()
    resumed = run_processes.finish(start(3))
    assert resumed.returncode == 0, resumed.stderr
    assert record()["model_sha256"] == first["model_sha256"]
