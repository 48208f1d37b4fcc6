"""``paceline fork``: a run that continues from another's checkpoint, with other hyperparameters."""

from __future__ import annotations

import json
import math
import os
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.faulty import Paceline, assert_refused, sha256
from tests.processes import Processes
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as schedules

from paceline.core.files import read_json_lines
from paceline.data.audit import audit
from paceline.runs.checkpoint_state import scheduler_state
from paceline.runs.checkpoint_store import copy
from paceline.runs.directory import RunDirectory
from paceline.training.state import move_scheduler

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("numerics")]

TASK = """
    import os
    from dataclasses import dataclass

    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    import paceline


    @dataclass
    class Annealed(paceline.Task):
        lr: float = 0.1
        dropout: float = 0.2
        note: str | None = None
        anneals: bool = True

        def build_model(self):
            return nn.Sequential(nn.Linear(13, 16), nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(16, 3))

        def build_dataset(self, split):
            points = torch.randn(120, 13, generator=torch.Generator().manual_seed(0))
            return TensorDataset(points, points[:, :3].argmax(1)) if split in ("train", "val") else None

        def build_optimizer(self, model):
            return torch.optim.AdamW(model.parameters(), lr=self.lr)

        def build_scheduler(self, optimizer, total_steps):
            return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total_steps) if self.anneals else None

        def on_batch_begin(self, info):
            if info.split == "train" and os.environ.get("DIES_AT") == str(info.step):
                os.kill(os.getpid(), 9)

        def loss(self, model, batch):
            points, labels = batch
            return nn.functional.cross_entropy(model(points), labels)
"""
OPTIONS = ("--epochs", "4", "--global-batch-size", "24", "--microbatches", "6", "--threads", "1", "--log-every", "1")
OPTIONS += ("--checkpoint-every", "5steps", "--keep-checkpoints", "9", "--quiet")
FORKED_AT, STEPS = 10, 20


@pytest.fixture
def trained(paceline: Paceline, tmp_path: Path) -> Path:
    """A run of 20 steps, which has a checkpoint of each fifth."""
    (tmp_path / "annealed.py").write_text(textwrap.dedent(TASK))
    assert paceline("train", "annealed.py:Annealed", *OPTIONS, "--run-dir", "old").code == 0
    return tmp_path / "old"


def learning_rates(run: Path) -> dict[int, float]:
    return {r["step"]: r["lr"] for r in read_json_lines(run / "metrics.jsonl") if r["kind"] == "train"}


def losses(run: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_json_lines(run / "metrics.jsonl") if r["kind"] == "train"}


@pytest.mark.parametrize("change", [(), ("--set", "note=another")])
def test_a_fork_with_the_same_training_has_the_bits_of_the_other_run(
    trained: Path, paceline: Paceline, change: tuple[str, ...]
) -> None:
    """Where a field changes that training does not use, the task builds the same hyperparameters and schedule."""
    with (trained / "ledger" / "gen-00000.jsonl").open("a") as ledger:
        ledger.write('{"v":99')  # an active run may be writing
    said = paceline("fork", "old", "--run-dir", "new", "--step", str(FORKED_AT), *change)
    assert said.code == 0
    assert "paceline resume new" in said.out
    new = trained.with_name("new")
    assert max(losses(new)) == FORKED_AT
    assert paceline("resume", "new", "--quiet").code == 0
    assert sha256(new) == sha256(trained)
    assert losses(new) == losses(trained)
    report = audit(RunDirectory(new))
    assert report.clean
    assert report.recomputed_steps == 0
    assert f"forked from step {FORKED_AT}" in paceline("runs", "show", "new").out


def test_a_fork_trains_with_the_new_hyperparameters_from_its_checkpoint_on(trained: Path, paceline: Paceline) -> None:
    assert paceline("fork", "old", "--run-dir", "new", "--step", "10", "--set", "lr=0.01").code == 0
    assert paceline("resume", "new", "--quiet").code == 0
    new, before, after = trained.with_name("new"), learning_rates(trained), learning_rates(trained.with_name("new"))
    for step in range(1, STEPS + 1):
        factor = 1.0 if step <= FORKED_AT else 0.1
        assert after[step] == pytest.approx(factor * before[step], rel=1e-9, abs=1e-12)
        assert (losses(new)[step] == losses(trained)[step]) is (step <= FORKED_AT + 1)
    assert RunDirectory(new).read_complete_manifest()["forked"]["changed"] == {"lr": 0.1}
    again = json.loads(paceline("fork", "new", "--run-dir", "third", "--step", "15", "--set", "lr=0.1", "--json").out)
    assert (again["run_dir"], again["step"], again["changed"]) == ("third", 15, {"lr": 0.01})


def test_a_finished_run_becomes_longer(trained: Path, paceline: Paceline) -> None:
    said = paceline("fork", "old", "--run-dir", "longer", "--epochs", "6")
    assert "continues old from step 20, with epochs 4 -> 6" in said.out
    assert paceline("resume", "longer", "--quiet").code == 0
    longer = trained.with_name("longer")
    report = audit(RunDirectory(longer))
    assert report.clean
    assert max(losses(longer)) == 30
    # The schedule is that of 30 steps, from step 20 on.
    expected = {step: 0.05 * (1 + math.cos(math.pi * (step - 1) / 30)) for step in range(21, 31)}
    assert {s: rate for s, rate in learning_rates(longer).items() if s > STEPS} == pytest.approx(expected)
    manifest = RunDirectory(longer).read_complete_manifest()
    assert (manifest["config"]["epochs"], manifest["data"]["total_steps"]) == (6, 30)
    assert manifest["forked"]["options"] == {"epochs": 4}


def test_a_longer_run_has_the_bits_of_one_that_was_as_long_from_the_start(trained: Path, paceline: Paceline) -> None:
    flat = ("annealed.py:Annealed", *OPTIONS, "--set", "anneals=false")
    assert paceline("train", *flat, "--run-dir", "short").code == 0
    straight = ("--run-dir", "straight", *(word if word != "4" else "5" for word in flat))
    assert paceline("train", *straight).code == 0
    assert paceline("fork", "short", "--run-dir", "longer", "--max-steps", "25").code == 0
    assert paceline("resume", "longer", "--quiet").code == 0
    assert sha256(trained.with_name("longer")) == sha256(trained.with_name("straight"))


def test_a_length_that_cannot_work_is_refused(trained: Path, paceline: Paceline) -> None:
    assert_refused(paceline("resume", "old", "--epochs", "6"), "paceline fork old --epochs 6")
    assert_refused(paceline("fork", "old", "--run-dir", "new", "--epochs", "2"), "make it longer by --epochs")
    assert_refused(paceline("fork", "old", "--run-dir", "new", "--epochs", "9", "--max-steps", "9"), "not both")
    assert not trained.with_name("new").exists()


def test_other_batches_follow_the_end_of_an_epoch(
    trained: Path, paceline: Paceline, module_processes: Processes
) -> None:
    """The fork has one hash on any number of processes, also killed, and each sample of each epoch once."""
    batches = ("--global-batch-size", "48", "--microbatches", "4")
    said = paceline("fork", "old", "--run-dir", "one", "--step", "10", *batches)
    assert "with global_batch_size 24 -> 48, microbatches 6 -> 4" in said.out
    shutil.copytree(trained.with_name("one"), trained.with_name("two"))
    shutil.copytree(trained.with_name("one"), trained.with_name("killed"))
    assert paceline("resume", "one", "--quiet").code == 0
    one, two, killed = map(trained.with_name, ("one", "two", "killed"))
    dies = {"DIES_AT": "15"}
    done = module_processes.paceline("resume", killed, "--nproc", "3", "--recover", "none", "--quiet", env=dies)
    assert done.returncode != 0
    for run in (two, killed):
        done = module_processes.paceline("resume", run, "--nproc", "2", "--quiet")
        assert done.returncode == 0, done.stderr
        assert "differs from the one that wrote" not in done.stderr
    assert sha256(one) == sha256(two) == sha256(killed) != sha256(trained)
    # Epochs 3 and 4 have three steps each, of 48, 48 and 24 samples, after two epochs of five.
    assert max(losses(one)) == 16
    for run in (one, two, killed):
        report = audit(RunDirectory(run))
        assert report.clean, report.verdict
        assert [(epoch.steps, epoch.once) for epoch in report.epochs] == [(5, 120), (5, 120), (3, 120), (3, 120)]
    expected = {step: 0.05 * (1 + math.cos(math.pi * (step - 1) / 16)) for step in range(11, 17)}
    assert {s: rate for s, rate in learning_rates(one).items() if s > FORKED_AT} == pytest.approx(expected)
    assert "with another global_batch_size, microbatches" in " ".join(paceline("runs", "show", "one").out.split())
    assert_refused(paceline("fork", "one", "--step", "15", "--microbatches", "6"), "choose --step 16")
    assert paceline("fork", "one", "--run-dir", "again", "--epochs", "6", "--global-batch-size", "24").code == 0
    assert paceline("resume", "again", "--quiet").code == 0
    report = audit(RunDirectory(trained.with_name("again")))
    assert report.clean, report.verdict
    assert [epoch.steps for epoch in report.epochs] == [5, 5, 3, 3, 5, 5]
    assert all(
        record["epoch"] == 4
        for record in read_json_lines(trained.with_name("again") / "metrics.jsonl")
        if 16 < record["step"] <= 21 and record["kind"] == "train"
    )


def test_a_damaged_lineage_of_other_batches_is_found(trained: Path, paceline: Paceline) -> None:
    assert paceline("fork", "old", "--run-dir", "new", "--step", "10", "--microbatches", "4").code == 0
    assert paceline("resume", "new", "--quiet").code == 0
    ledger = trained.with_name("new") / "ledger"
    first = ledger / "gen-00000.jsonl"
    first.write_bytes(b"".join(first.read_bytes().splitlines(keepends=True)[:-1]))
    assert "epoch 1: 1 step (4) missing" in audit(RunDirectory(trained.with_name("new"))).verdict


def test_other_batches_of_the_same_run_are_refused(trained: Path, paceline: Paceline) -> None:
    batches = ("--global-batch-size", "48", "--microbatches", "4")
    assert_refused(paceline("resume", "old", *batches), "paceline fork old --global-batch-size 48 --microbatches 4")
    new = ("fork", "old", "--run-dir", "new", "--step", "10")
    assert_refused(paceline(*new, "--global-batch-size", "4"), "--global-batch-size 4 is too small")
    manifest = trained / "run.toml"
    manifest.write_text(manifest.read_text().replace("steps_per_epoch = 5\n", ""))  # as that of a stream
    assert_refused(paceline(*new, "--microbatches", "4"), "old is trained on a stream")


def test_a_fork_does_not_continue_from_before_its_beginning(trained: Path, paceline: Paceline) -> None:
    """It may have such a checkpoint, the best model, whose next steps would have the fork's hyperparameters."""
    assert paceline("fork", "old", "--run-dir", "new", "--step", "10", "--set", "lr=0.01").code == 0
    new = RunDirectory(trained.with_name("new"))
    (earlier,) = (trained / "checkpoints").glob("step-00000005-*")
    copy(earlier, new.checkpoints, run=new.read_manifest()["id"])
    shutil.rmtree(next(new.checkpoints.glob("step-00000010-*")))
    assert_refused(paceline("resume", "new", "--quiet"), "is from before step 10, at which this run was forked", code=1)
    assert_refused(paceline("fork", "new", "--set", "lr=0.1"), "is from before step 10", code=1)


def test_a_fork_may_add_and_remove_a_scheduler(trained: Path, paceline: Paceline) -> None:
    assert paceline("train", "annealed.py:Annealed", *OPTIONS, "--set", "anneals=false", "--run-dir", "flat").code == 0
    for source, name, anneals in (("old", "without", "false"), ("flat", "with", "true")):
        step = ("--step", str(FORKED_AT))
        assert paceline("fork", source, "--run-dir", name, *step, "--set", f"anneals={anneals}").code == 0
        assert paceline("resume", name, "--quiet").code == 0
    annealed = learning_rates(trained)
    expected = {step: annealed[step] if step > FORKED_AT else 0.1 for step in annealed}
    assert learning_rates(trained.with_name("with")) == pytest.approx(expected)
    removed = {step: annealed[step] if step <= FORKED_AT else 0.1 for step in annealed}
    assert learning_rates(trained.with_name("without")) == pytest.approx(removed)


class Halved:
    """A schedule of a user's own, which keeps its count under a name of its own."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.done = optimizer, 0

    def step(self) -> None:
        self.done += 1
        self.optimizer.param_groups[0]["lr"] = 0.1 * 0.5 ** (self.done // 2)

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}


@pytest.mark.parametrize(
    "build",
    [
        lambda optimizer: schedules.CosineAnnealingLR(optimizer, 9),
        lambda optimizer: schedules.OneCycleLR(optimizer, 0.5, total_steps=9),
        lambda optimizer: schedules.SequentialLR(
            optimizer, [schedules.LinearLR(optimizer, 0.1, total_iters=3), schedules.StepLR(optimizer, 2)], [3]
        ),
        lambda optimizer: schedules.ChainedScheduler(
            [schedules.ConstantLR(optimizer, 0.1, total_iters=3), schedules.ExponentialLR(optimizer, 0.9)]
        ),
        Halved,
    ],
    ids=["cosine", "one cycle", "sequence", "chain", "own"],
)
def test_each_kind_of_schedule_moves_to_where_it_was(build: Callable[[Optimizer], Any]) -> None:
    optimizers = [SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9) for _ in range(2)]
    stepped, as_built = map(build, optimizers)
    for _ in range(5):
        optimizers[0].step()
        stepped.step()
    move_scheduler(as_built, scheduler_state(stepped), 5)
    assert optimizers[1].param_groups[0]["lr"] == optimizers[0].param_groups[0]["lr"]
    assert as_built.state_dict() == stepped.state_dict()


def test_a_fork_has_the_same_bits_on_any_number_of_processes(
    trained: Path, paceline: Paceline, module_processes: Processes
) -> None:
    hashes = set()
    for name, more in (("one", ()), ("three", ("--nproc", "3")), ("sharded", ("--nproc", "2", "--strategy", "fsdp"))):
        change = ("--set", "lr=0.01", "--set", "dropout=0.5")
        assert paceline("fork", "old", "--run-dir", name, "--step", "10", *change).code == 0
        directory = trained.with_name(name)
        done = module_processes.paceline("resume", str(directory), *more, "--quiet")
        assert done.returncode == 0, done.stderr
        hashes.add(sha256(directory))
    assert len(hashes) == 1
    assert hashes != {sha256(trained)}


def test_what_a_killed_command_left_behind_is_no_part_of_the_fork(trained: Path, paceline: Paceline) -> None:
    left, foreign = trained.with_name(".tmp-left"), trained.with_name(".tmp-foreign")
    for draft in (left, foreign):
        draft.mkdir()
        (draft / "result.json").write_text("{}")
    os.utime(left, (0, 0))
    assert paceline("fork", "old", "--run-dir", "new", "--step", "10").code == 0
    assert not left.exists()
    assert foreign.exists(), "another node may be writing it"
    assert not trained.with_name("new").joinpath("result.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("old", "--step", "7"), "no checkpoint of step 7. The nearest: 5, 10, 15, 20"),
        (("old", "--run-dir", "old", "--step", "5"), "old exists already"),
        (("old",), "step 20 is the end of old, so a fork of it has no step to train. Choose an earlier checkpoint by"),
        (("old", "--step", "20"), "by --step: 5, 10, 15"),
        (("nothing",), "nothing is not a run directory"),
        (("old", "--set", "lrr=1"), "no field 'lrr'. Its fields: lr, dropout, note"),
        (("old", "--set", "lr=fast"), "must be float"),
    ],
)
def test_a_bad_request_makes_no_run(
    trained: Path, paceline: Paceline, arguments: tuple[str, ...], message: str
) -> None:
    before: Any = sorted(trained.parent.iterdir())
    assert_refused(paceline("fork", *arguments), message)
    assert sorted(trained.parent.iterdir()) == before


def test_a_damaged_record_of_the_fork_is_refused(trained: Path, paceline: Paceline) -> None:
    assert paceline("fork", "old", "--run-dir", "new", "--step", "10").code == 0
    manifest = trained.with_name("new") / "run.toml"
    manifest.write_text(manifest.read_text().replace("version = ", "versions = "))
    assert_refused(paceline("resume", "new", "--quiet"), "the table [forked] of run.toml is damaged")
