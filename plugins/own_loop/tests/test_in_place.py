"""``paceline.Run(nproc=3)``: ranks that die are replaced, and the others go on in the script where they are."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.processes import Processes

from paceline.data.audit import audit
from paceline.runs.directory import RunDirectory

SCRIPT = """
import logging
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset

import paceline

here, nproc = Path(sys.argv[1]), int(sys.argv[2])
with open(here / "starts", "a") as starts:
    starts.write(f"{os.getpid()}\\n")
print("before the loop")
logging.basicConfig(stream=sys.stdout)  # holds the stream of now


def die_if_asked(name):
    plan = here / f"{name}-{run.rank}"
    if plan.exists():
        plan.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def loss_of(batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def dying_loss(batch):
    die_if_asked(f"second-{step.step}")
    return loss_of(batch)


def metrics(batch):
    die_if_asked(f"evaluation-{step.step}")
    return {"right": (model(batch[0]).argmax(1) == batch[1]).float()}


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
optimizer = AdamW(model.parameters(), lr=0.01)
scheduler = CosineAnnealingLR(optimizer, 40)
x = torch.randn(240, 8)
data = TensorDataset(x, (x.sum(1) > 0).long())
run = paceline.Run(
    here / "run", model, optimizer, data, state={"scheduler": scheduler}, nproc=nproc, global_batch_size=24,
    microbatches=6, seed=3, threads=1, device="cpu", quiet=True, heartbeat=30, checkpoint_every="5steps",
)
seen, measured = [], []
for step in run.steps(epochs=3):
    seen.append(step.step)
    if step.step % 2:
        scheduler.step()
    optimizer.param_groups[0]["weight_decay"] *= 1.01
    if step.step == 27 and (here / "break").exists():
        break
    step.backward(loss_of)
    step.update(clip_norm=1.0)
    die_if_asked(f"step-{step.step}")
    if step.step % 2 == 0:
        scheduler.step()
    if step.step % 6 == 4:
        step.backward(dying_loss)
        assert all(parameter.grad is not None for parameter in model.parameters())
        step.update()
    if step.ends_epoch:
        measured.append(run.evaluate(metrics, data))
if run.result is not None:
    measured.append(run.evaluate(metrics, data))
    print("after the loop on rank", run.rank)
    logging.getLogger("mine").warning("logged on rank %d", run.rank)
(here / f"seen-{os.getpid()}").write_text(f"{seen}\\n{measured[-2:]}")
"""


def train(run_processes: Processes, here: Path, nproc: int, *plans: str) -> str:
    """Run the script where these plans lie; return what it has printed."""
    here.mkdir()
    (here / "script.py").write_text(SCRIPT)
    for plan in plans:
        (here / plan).touch()
    done = run_processes.run([sys.executable, str(here / "script.py"), str(here), str(nproc)])
    assert done.returncode == 0, done.stderr
    assert [plan for plan in plans if plan != "break" and (here / plan).exists()] == []
    return done.stdout


def sha256_of(here: Path) -> str:
    return str(json.loads((here / "run" / "result.json").read_text())["model_sha256"])


@pytest.fixture(scope="module")
def alone(module_processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where one process has run the script."""
    here = tmp_path_factory.mktemp("undisturbed") / "alone"
    train(module_processes, here, 1)
    return here


@pytest.mark.timeout(300)
def test_survivors_go_on_in_the_body_that_they_are_in(run_processes: Processes, tmp_path: Path, alone: Path) -> None:
    harmed = tmp_path / "harmed"
    printed = train(run_processes, harmed, 3, "step-7-0", "evaluation-19-1")
    assert sha256_of(harmed) == sha256_of(alone)
    assert printed.count("before the loop") == printed.count("after the loop on rank 0") == 1
    assert printed.count("logged on rank") == printed.count("logged on rank 0") == 1
    # The process that the user starts, three ranks, and two replacements.
    assert len((harmed / "starts").read_text().split()) == 6
    told = {path.name: path.read_text().splitlines() for path in harmed.glob("seen-*")}
    (expected,) = [path.read_text().splitlines()[1] for path in alone.glob("seen-*")]
    assert {measured for _, measured in told.values()} == {expected}
    whole = [json.loads(seen) for seen, _ in told.values() if seen.startswith("[0,")]
    # Two were lost, so one at least was there all the time, and has computed the step again in which one was lost.
    assert [0, 1, 2, 3, 4, 5, 6, 7, 8, 8, *range(9, 21)] in [seen[:22] for seen in whole]
    assert all(sorted({*seen}) == [*range(30)] for seen in whole)
    assert audit(RunDirectory(harmed / "run")).clean


@pytest.mark.timeout(300)
def test_a_loss_between_two_updates_continues_from_the_checkpoint(
    run_processes: Processes, tmp_path: Path, alone: Path
) -> None:
    harmed = tmp_path / "harmed"
    train(run_processes, harmed, 2, "second-10-1", "break")
    assert len((harmed / "starts").read_text().split()) == 4
    assert not RunDirectory(harmed / "run").has_result()
    seen = [path.read_text().splitlines()[0] for path in harmed.glob("seen-*")]
    assert "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 11," in " ".join(seen)
    (harmed / "break").unlink()
    done = run_processes.run([sys.executable, str(harmed / "script.py"), str(harmed), "2"])  # after the break
    assert done.returncode == 0, done.stderr
    assert sha256_of(harmed) == sha256_of(alone)
