"""``paceline.Run``: a script with a loop of its own has the bits of ``fit``, stops, continues and is audited."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.processes import Processes
from torch import nn
from torch.optim import LBFGS, SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.data.audit import audit
from paceline.runs.checkpoint_store import newest_verified
from paceline.runs.checkpointer import load
from paceline.runs.directory import RunDirectory
from paceline_fine_tuning.fork import fork_run

# The same parts as a task and as a script.
PARTS = """
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset, default_collate

import paceline

OPTIONS = {
    "global_batch_size": 24,
    "microbatches": 6,
    "seed": 3,
    "threads": 1,
    "log_every": 1,
    "device": "cpu",
    "quiet": True,
}


def build_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))


def build_data():
    torch.manual_seed(2)
    x = torch.randn(150, 8)
    return x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long()


def loss_of(model, batch):
    output = model(batch[0])
    right = (output.argmax(1) == batch[1]).float()
    return nn.functional.cross_entropy(output, batch[1]), {"right": right, "rows": (output.sum(), len(output))}


@dataclass
class AsTask(paceline.Task):
    def build_model(self):
        return build_model()

    def build_dataset(self, split):
        return TensorDataset(*build_data()) if split == "train" else None

    def build_optimizer(self, model):
        return AdamW(model.parameters(), lr=0.01)

    def build_scheduler(self, optimizer, total_steps):
        return CosineAnnealingLR(optimizer, 21)

    def loss(self, model, batch):
        return loss_of(model, batch)
"""

SCRIPT = """
import json
import os
import signal
import sys
from pathlib import Path

import paceline
from paceline.runs.checkpoint_state import model_sha256
from parts import *

options = json.loads(sys.argv[1])
kill_at, ask_at, mixes = (options.pop(name, None) for name in ("kill_at", "ask_at", "mixes"))
model = build_model()
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
optimizer = AdamW(model.parameters(), lr=0.01)
scheduler = CosineAnnealingLR(optimizer, 21)
x, y = build_data()


def mixed(samples):
    inputs, labels = default_collate(samples)
    share = float(torch.rand(()))
    return share * inputs + (1 - share) * inputs.roll(1, 0), labels


run = paceline.Run(
    model=model,
    optimizer=optimizer,
    dataset=TensorDataset(x, y),
    state={"scheduler": scheduler, "ema": ema},
    collate=mixed if mixes else None,
    **{**OPTIONS, "checkpoint_every": "4steps", **options},
)


def metrics(batch):
    output = model(batch[0])
    loss = nn.functional.cross_entropy(output, batch[1], reduction="none")
    return {"right": (output.argmax(1) == batch[1]).float(), "loss": loss}


measured, drawn = [], []
for step in run.steps(epochs=3):
    step.backward(lambda batch: loss_of(model, batch))
    drawn.append(float(torch.rand(())))
    step.update(clip_norm=1.0)
    scheduler.step()
    if mixes:
        ema.update_parameters(model)
    if step.ends_epoch:
        measured.append(run.evaluate(metrics, TensorDataset(x[:50], y[:50])))
        drawn.append(float(torch.rand(())))
    if step.step == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    if step.step == ask_at:
        os.kill(os.getpid(), signal.SIGTERM)
measured.append(run.evaluate(metrics, TensorDataset(x[:50], y[:50])))
told = {"measured": measured, "drawn": drawn, "sha256": run.result.model_sha256}
weights = run.model_state_dict()
assert bool(weights) is (run.rank == 0)
told["weights"] = model_sha256(weights) if weights else told["sha256"]
told["ema"] = model_sha256(ema.state_dict())
told["best"] = run.result.record["best_step"]
Path(f"{options['directory']}.told-{os.environ.get('RANK', 0)}").write_text(json.dumps(told))
"""


WEIGHTS = [float(number % 3) for number in range(150)]  # a third of the samples is never drawn


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "parts.py").write_text(PARTS)
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def command(script: Path, ranks: int, **options: Any) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return [sys.executable, *launcher, str(script), json.dumps(options)]


def told_by(popen: subprocess.Popen[str], processes: Processes, directory: Path) -> list[dict[str, Any]]:
    """Wait for a script; return what each of its ranks has told, and forget it."""
    done = processes.finish(popen)
    assert done.returncode == 0, done.stderr
    files = sorted(directory.parent.glob(f"{directory.name}.told-*"))
    told = [json.loads(file.read_text()) for file in files]
    for file in files:
        file.unlink()
    return told


def logged_by(directory: Path) -> list[Any]:
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [record["logged"] for record in records if record["kind"] == "train"]


def test_an_own_loop_has_the_bits_of_fit_under_each_strategy(
    run_processes: Processes, script: Path, tmp_path: Path
) -> None:
    sys.path.insert(0, str(tmp_path))
    try:
        from parts import OPTIONS, AsTask  # type: ignore[import-not-found]

        fitted = paceline.fit(AsTask(), run_dir=str(tmp_path / "fit"), epochs=3, clip_norm=1.0, **OPTIONS)
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("parts", None)
    started = {
        f"{ranks}-{strategy}": run_processes.start(
            command(script, ranks, directory=f"{ranks}-{strategy}", strategy=strategy, best_metric="right:max")
        )
        for ranks, strategy in ((1, "auto"), (2, "zero1"), (3, "fsdp"))
    }
    told = [told_by(popen, run_processes, tmp_path / name) for name, popen in started.items()]
    assert [len(of_ranks) for of_ranks in told] == [1, 2, 3]
    first = told[0][0]
    assert first["sha256"] == fitted.model_sha256
    assert all(of_rank == first for of_ranks in told for of_rank in of_ranks)
    assert first["weights"] == first["sha256"]
    right = [measured["right"] for measured in first["measured"][:3]]
    assert first["best"] == 7 * (1 + right.index(max(right)))
    assert len(first["measured"]) == 4
    assert first["measured"][2] == first["measured"][3]  # within the last step, and after the loop
    logged = [logged_by(tmp_path / name) for name in ("fit", *started)]
    assert len(logged[0]) == 21
    norms = [[values.pop("grad_norm") for values in of_run] for of_run in logged]
    assert norms == [pytest.approx(norms[0])] * len(norms)  # fsdp sums the shards' in another order
    assert all(values == logged[0] for values in logged)
    assert all(0 <= values["right"] <= 1 for values in logged[0])
    records = [json.loads(line) for line in (tmp_path / "3-fsdp/metrics.jsonl").read_text().splitlines()]
    evaluations = [record for record in records if record["kind"] == "eval"]
    assert [record["step"] for record in evaluations] == [7, 14, 21]
    assert [record["metrics"] for record in evaluations] == first["measured"][:3]


def test_a_killed_loop_continues_on_another_number_of_ranks(
    run_processes: Processes, script: Path, tmp_path: Path
) -> None:
    options = {"sample_weights": WEIGHTS, "best_metric": "loss:min", "mixes": True}

    def run(ranks: int, name: str) -> list[dict[str, Any]]:
        started = run_processes.start(command(script, ranks, directory=name, **options))
        return told_by(started, run_processes, tmp_path / name)

    (whole,) = run(1, "whole")
    killed = run_processes.run(command(script, 2, directory="run", **options, kill_at=9))
    assert killed.returncode != 0
    asked = run_processes.run(command(script, 1, directory="run", **options, ask_at=13))
    assert asked.returncode == 75, asked.stderr
    assert '"stopped"' in (tmp_path / "run/events.jsonl").read_text()
    resumed = run(3, "run")
    assert {of_rank["sha256"] for of_rank in resumed} == {whole["sha256"]}
    assert {of_rank["ema"] for of_rank in resumed} == {whole["ema"]}
    assert resumed[0]["measured"] == whole["measured"][-2:]
    assert resumed[0]["best"] == whole["best"]
    metrics = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "run")]
    assert [text.count('"kind": "eval"') for text in metrics] == [3, 3]
    assert logged_by(tmp_path / "run") == logged_by(tmp_path / "whole")
    assert "Clean: every weighted draw of 3 epochs made exactly once" in run_processes.paceline("audit", "run").stdout
    (again,) = run(1, "run")
    assert again["drawn"] == []  # nothing is left to train, and the script has the trained model
    assert again["measured"] == whole["measured"][-1:]
    assert again["ema"] == whole["ema"]


# --- In this process ---


def points(number: int = 48) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(number, 4, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def start(directory: Path, model: Any, optimizer: Any, **options: Any) -> paceline.Run:
    return paceline.Run(
        directory,
        model,
        optimizer,
        points(),
        **{"global_batch_size": 12, "microbatches": 3, "device": "cpu", "quiet": True, **options},
    )


def squares(model: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], torch.Tensor]:
    return lambda batch: nn.functional.mse_loss(model(batch[0]), batch[1])


def saved_model(directory: Path) -> dict[str, torch.Tensor]:
    path = newest_verified(directory / "checkpoints").path
    assert path is not None
    model: dict[str, torch.Tensor] = load(path).state["model"]
    return model


def test_break_and_errors_leave_a_run_that_continues(tmp_path: Path) -> None:
    model = linear()
    with start(tmp_path / "whole", model, SGD(model.parameters(), 0.1)) as whole:
        for step in whole.steps(max_steps=8):
            step.backward(squares(model))
            step.update()
    seen, left = [], []

    def counted(steps: Any) -> Iterator[Any]:
        left.append(len(steps))
        yield from steps

    for attempt in range(3):
        model = linear()
        run = start(tmp_path / "run", model, SGD(model.parameters(), 0.1), checkpoint_every="2steps")
        with suppress(KeyError), run:
            for step in counted(run.steps(max_steps=8)):
                seen.append(step.step)
                step.backward(squares(model))
                step.update()
                if attempt == 0 and step.step == 3:
                    break
                if attempt == 1 and step.step == 5:
                    raise KeyError("the script's own")
            if attempt == 0:  # the model is there, and nothing is recorded any more
                assert run.evaluate(lambda batch, model=model: {"out": model(batch[0]).flatten()}, points())["out"]
    assert "eval" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert seen == [0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7]
    assert left == [8, 6, 4]
    assert whole.result is not None
    assert run.result is not None
    assert run.result.model_sha256 == whole.result.model_sha256
    # The script that comes again has the trained model.
    fresh = linear()
    with start(tmp_path / "run", fresh, SGD(fresh.parameters(), 0.1)) as again:
        assert list(again.steps(max_steps=8)) == []
    assert again.result is not None
    assert again.result.model_sha256 == whole.result.model_sha256
    assert torch.equal(fresh.weight, saved_model(tmp_path / "run")["weight"])


def test_a_run_does_not_continue_with_other_weights(tmp_path: Path) -> None:
    for weights in ([1.0, 2.0] * 24, [2.0, 1.0] * 24):
        model = linear()
        with start(tmp_path / "run", model, SGD(model.parameters(), 0.1), sample_weights=weights) as run:
            if weights[0] == 1.0:
                next(run.steps(max_steps=2))
            else:
                with pytest.raises(paceline.RunDirectoryError, match="sample_weights differ from those in"):
                    next(run.steps(max_steps=2))


def test_the_best_model_is_kept_by_the_metric_of_the_run(tmp_path: Path) -> None:
    model, measured = linear(), [0.2, 0.9, 0.5, 0.9]
    with start(tmp_path / "run", model, SGD(model.parameters(), 0.1), best_metric="score:max") as run:
        for step in run.steps(max_steps=4):
            step.backward(squares(model))
            step.update()
            if step.step == 1:
                best = {name: value.clone() for name, value in run.model_state_dict().items()}
            score = torch.tensor(measured[step.step])
            run.evaluate(lambda batch, score=score: {"score": score.expand(len(batch[0]))}, points())
    assert run.result is not None
    assert (run.result.record["best_step"], run.result.metrics["val"]) == (2, {"score": pytest.approx(0.9)})
    loaded = paceline.load(tmp_path / "run", "best", model=linear())
    assert torch.equal(loaded.state_dict()["weight"], best["weight"])
    assert not torch.equal(model.weight, best["weight"])


def test_an_update_after_the_evaluation_is_refused(tmp_path: Path) -> None:
    model = linear()
    with start(tmp_path / "run", model, SGD(model.parameters(), 0.1), best_metric="out:max") as run:
        steps = run.steps(max_steps=2)
        step = next(steps)
        step.backward(squares(model))
        run.evaluate(lambda batch: {"out": model(batch[0]).flatten()}, points())
        with pytest.raises(paceline.TaskError, match="Update first, then evaluate"):
            step.update()


def test_a_fork_continues_the_loop_with_other_batches(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def train(name: str, batch: int, steps: int, lr: float = 0.1) -> list[tuple[int, int | None, bool]]:
        model = linear()
        optimizer = SGD(model.parameters(), lr)
        schedule = CosineAnnealingLR(optimizer, steps)
        options = {"global_batch_size": batch, "checkpoint_every": "1epochs", "keep_checkpoints": 9, "log_every": 1}
        with start(tmp_path / name, model, optimizer, **options, state={"schedule": schedule}) as run:
            positions = []
            for step in run.steps(epochs=3):
                step.backward(squares(model))
                step.update()
                schedule.step()
                positions.append((step.step, step.epoch, step.ends_epoch))
        return positions

    train("run", 12, 12)
    with pytest.raises(paceline.ConfigError, match=r"paceline fork .*/run --global-batch-size 24"):
        train("run", 24, 8)
    fork_run(
        RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "fork"), {}, options={"global_batch_size": 24}, step=4
    )
    assert train("fork", 24, 8, lr=0.2) == [(4, 1, False), (5, 1, True), (6, 2, False), (7, 2, True)]
    assert "other hyperparameters" not in caplog.text
    records = [json.loads(line) for line in (tmp_path / "fork/metrics.jsonl").read_text().splitlines()]
    # The schedule that the script builds now, after four steps.
    expected = [0.1 * (1 + math.cos(math.pi * step / 8)) for step in range(4, 8)]
    assert [record["lr"] for record in records[4:]] == pytest.approx(expected)
    assert audit(RunDirectory(tmp_path / "fork")).clean


def test_a_step_without_an_update_counts_its_samples(tmp_path: Path) -> None:
    model = linear()
    start_weight = model.weight.detach().clone()
    with start(tmp_path / "run", model, SGD(model.parameters(), 0.1)) as run:
        for step in run.steps(epochs=1):
            assert step.backward(squares(model)) > 0
            step.log(looked=step.step)
    assert run.result is not None
    assert (run.result.steps, run.result.samples) == (4, 48)
    assert torch.equal(model.weight, start_weight)


def test_names_select_whose_gradients_a_pass_fills(tmp_path: Path) -> None:
    models = {"left": linear(), "right": linear()}
    optimizers = {name: SGD(model.parameters(), 0.1) for name, model in models.items()}
    with start(tmp_path / "run", models, optimizers) as run:
        for step in run.steps(max_steps=2):
            step.backward(squares(lambda x: models["left"](x) + models["right"](x)), "right")
            assert models["left"].weight.grad is None
            assert models["right"].weight.grad is not None
            step.update()
            assert torch.equal(models["left"].weight, linear().weight)
            assert not torch.equal(models["right"].weight, linear().weight)
    assert set(saved_model(tmp_path / "run")) == {"left.weight", "left.bias", "right.weight", "right.bias"}


def test_lbfgs_computes_its_loss_again(tmp_path: Path) -> None:
    model = linear()
    losses = []
    with start(tmp_path / "run", model, LBFGS(model.parameters(), lr=0.5, max_iter=3)) as run:
        for step in run.steps(max_steps=4):

            def loss_again(step: paceline.LoopStep = step) -> float:
                losses.append(step.backward(squares(model)))
                return losses[-1]

            step.update(closure=loss_again)
    assert len(losses) > 4
    assert losses[-1] < losses[0] / 5


def trained(directory: Path, body: Callable[[paceline.LoopStep, nn.Module], object]) -> str:
    model = linear()
    with start(directory, model, SGD(model.parameters(), 0.1)) as run:
        for step in run.steps(max_steps=2):
            body(step, model)
            step.update()
    assert run.result is not None
    return run.result.model_sha256


def test_gradients_add_up_within_a_body_as_in_pytorch(tmp_path: Path) -> None:
    def both(model: nn.Module) -> Callable[[Any], torch.Tensor]:
        return lambda batch: squares(model)(batch) + model.weight.square().sum()

    def apart(step: paceline.LoopStep, model: nn.Module) -> None:
        step.backward(lambda batch: model.weight.square().sum())
        alone = model.weight.grad
        assert alone is not None
        before = alone.clone()
        step.backward(squares(model))
        assert model.weight.grad is not None
        assert not torch.equal(model.weight.grad, before)
        expected = 2 * model.weight.detach()
        torch.testing.assert_close(before, expected)

    def dropped(step: paceline.LoopStep, model: nn.Module) -> None:
        step.backward(lambda batch: model.weight.square().sum())
        model.zero_grad()
        step.backward(squares(model))

    def own(step: paceline.LoopStep, model: nn.Module) -> None:
        model.weight.square().sum().backward()
        step.backward(squares(model))

    alone = trained(tmp_path / "alone", lambda step, model: step.backward(squares(model)))
    assert trained(tmp_path / "dropped", dropped) == alone
    sums = {}
    for name, body in (("apart", apart), ("own", own), ("whole", lambda step, model: step.backward(both(model)))):
        trained(tmp_path / name, body)
        sums[name] = saved_model(tmp_path / name)["weight"]
    torch.testing.assert_close(sums["apart"], sums["whole"])
    torch.testing.assert_close(sums["own"], sums["whole"])
    assert not torch.allclose(sums["whole"], saved_model(tmp_path / "alone")["weight"])


def test_an_update_uses_gradients_up(tmp_path: Path) -> None:
    models = {"left": linear(), "right": linear()}
    optimizers = {name: SGD(model.parameters(), 0.1) for name, model in models.items()}
    with start(tmp_path / "run", models, optimizers) as run:
        for step in run.steps(max_steps=1):
            step.backward(squares(models["left"]), "left")
            step.update("left")
            step.backward(squares(lambda x: models["left"](x) + models["right"](x)))
            found = models["left"].weight.grad
            assert found is not None
            kept = found.clone()
            models["left"].zero_grad()
            models["right"].zero_grad()
            step.backward(squares(lambda x: models["left"](x) + models["right"](x)))
            assert torch.equal(kept, models["left"].weight.grad)  # type: ignore[arg-type]


def test_gradients_that_no_update_used_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = linear()
    with start(tmp_path / "run", model, SGD(model.parameters(), 0.1)) as run:
        for step in run.steps(max_steps=6):
            step.backward(squares(model))
            if (step.step + 1) % 2 == 0:
                step.update()
    assert [record.message[:34] for record in caplog.records if "no update used" in record.message] == [
        "step 1 has computed gradients that"
    ]


def test_a_model_that_stays_in_evaluation_mode_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    models = {"body": nn.Sequential(linear(), nn.Dropout(0.5)), "teacher": linear().eval()}
    with start(tmp_path / "run", models, SGD(models["body"].parameters(), 0.1)) as run:
        for step in run.steps(max_steps=6):
            step.backward(squares(models["body"]))
            step.update()
            if step.step == 2:
                models["body"].eval()  # for an evaluation, and not back
    assert [record.message for record in caplog.records if "evaluation mode" in record.message] == [
        "step 4 computed its gradients with the model in evaluation mode, in which the run did not begin: "
        "call model.train() after an evaluation of your own."
    ]


def test_hyperparameters_that_the_script_has_changed_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for lr, betas in ((0.1, (0.9, 0.99)), (0.1, (0.9, 0.99)), (0.2, (0.8, 0.99))):
        assert not [record for record in caplog.records if "hyperparameters" in record.message]
        model = linear()
        optimizer = Adam(model.parameters(), lr, betas)
        with start(tmp_path / "run", model, optimizer, checkpoint_every="1steps") as run:
            for step in run.steps(max_steps=9):
                step.backward(squares(model))
                step.update()
                if step.step in (3, 6):
                    break
    (said,) = [record.message for record in caplog.records if "hyperparameters" in record.message]
    assert "(main: lr 0.1 -> 0.2, main: betas [0.9, 0.99] -> [0.8, 0.99])" in said
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_frozen_modules_stay_frozen(tmp_path: Path) -> None:
    """After an evaluation, and where the run continues."""
    for attempt in range(2):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        if attempt == 0:
            model[1].eval()  # the checkpoint has it afterwards
        with start(tmp_path / "run", model, SGD(model.parameters(), 0.1), checkpoint_every="1steps") as run:
            for step in run.steps(max_steps=6):
                assert [module.training for module in model.children()] == [True, False, True]
                step.backward(squares(model))
                step.update()
                run.evaluate(lambda batch, model=model: {"out": model(batch[0]).flatten()}, points())
                if attempt == 0 and step.step == 3:
                    break
        assert torch.equal(model[1].running_mean, torch.zeros(4))
    assert run.result is not None


def test_stop_ends_the_run_with_its_result(tmp_path: Path) -> None:
    for expected in ([0, 1, 2], []):
        model, seen = linear(), []
        with start(tmp_path / "run", model, SGD(model.parameters(), 0.1)) as run:
            for step in run.steps(max_steps=8):
                seen.append(step.step)
                step.backward(squares(model))
                step.update()
                if step.step == 2:
                    step.stop()
        assert seen == expected
        assert run.result is not None
        assert run.result.steps == 3
        assert run.rank == 0


def test_a_run_whose_loop_failed_is_left_by_the_next_one(tmp_path: Path) -> None:
    """As in a notebook, where nothing closes it."""
    for attempt in range(2):
        model = linear()
        run = start(tmp_path / "run", model, SGD(model.parameters(), 0.1), checkpoint_every="1steps")
        with suppress(KeyError):
            for step in run.steps(max_steps=4):
                step.backward(squares(model))
                step.update()
                if attempt == 0 and step.step == 1:
                    raise KeyError
    assert run.result is not None
    run.close()


def test_a_failed_rank_is_seen_on_the_terminal(run_processes: Processes, script: Path) -> None:
    failing = script.read_text().replace("    scheduler.step()\n", "    scheduler.step()\n    fails_on_rank_1(step)\n")
    head = "import os\n\n\ndef fails_on_rank_1(step):\n    if os.environ['RANK'] == '1' and step.step == 2:\n"
    script.write_text(head + "        raise ValueError('of my own')\n" + failing)
    failed = run_processes.run(command(script, 2, directory="run"))
    assert failed.returncode != 0
    assert "ValueError: of my own" in failed.stderr


def used(model: nn.Module) -> SGD:
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (lambda model: {"optimizer": used(model)}, "has stepped before"),
        (lambda model: {"optimizer": SGD(linear().parameters(), 0.1)}, "not one of the run's model"),
        (lambda model: {"state": {"count": 3}}, r"state\['count'\] is a int"),
        (lambda model: {"optimizer": [SGD(model.parameters(), 0.1)]}, "optimizer is a list"),
        (lambda model: {"seeds": 3}, "seeds"),
        (lambda model: {"nodes": 2}, "has no option nodes. nproc=4 starts four ranks here"),
        (lambda model: {"epochs": 2}, "has no option epochs. Give it to the loop"),
        (lambda model: {"reduction": "allreduce"}, "has no option reduction. The loss calls the script's own model"),
        (lambda model: {"eval_every": "epoch"}, "has no option eval_every. It is for tasks"),
    ],
    ids=[
        "used-optimizer",
        "other-model",
        "no-state-dict",
        "list-of-optimizers",
        "unknown",
        "launchers-option",
        "loops-option",
        "wrappers-option",
        "tasks-option",
    ],
)
def test_parts_that_cannot_work_are_refused_at_once(
    tmp_path: Path, parts: Callable[[nn.Module], dict[str, Any]], message: str
) -> None:
    model = linear()
    given = {"optimizer": SGD(model.parameters(), 0.1), **parts(model)}
    with pytest.raises(paceline.UserError, match=message):
        start(tmp_path / "run", model, **given)
    assert not (tmp_path / "run").exists()


def test_a_loader_is_refused_for_its_dataset(tmp_path: Path) -> None:
    model = linear()
    with pytest.raises(paceline.TaskError, match="give it the loader's dataset"):
        paceline.Run(tmp_path, model, SGD(model.parameters(), 0.1), DataLoader(points()), global_batch_size=4)


def looks(run: paceline.Run, model: nn.Module, optimizer: Any) -> None:
    for _step in run.steps(max_steps=2):
        pass


def steps_itself(run: paceline.Run, model: nn.Module, optimizer: Any) -> None:
    for step in run.steps(max_steps=2):
        step.backward(squares(model))
        optimizer.step()


def schedules(run: paceline.Run, model: nn.Module, optimizer: Any) -> None:
    scheduler = StepLR(optimizer, 1)
    for step in run.steps(max_steps=2):
        step.backward(squares(model))
        step.update()
        scheduler.step()


def names_another(run: paceline.Run, model: nn.Module, optimizer: Any) -> None:
    for step in run.steps(max_steps=2):
        step.backward(squares(model), "critic")


def logs_text(run: paceline.Run, model: nn.Module, optimizer: Any) -> None:
    for step in run.steps(max_steps=2):
        step.backward(squares(model))
        step.log(name="x")  # type: ignore[arg-type]


def loops_twice(run: paceline.Run, model: nn.Module, optimizer: Any) -> None:
    for _ in range(2):
        for step in run.steps(max_steps=2):
            step.backward(squares(model))


def evaluates_before(run: paceline.Run, model: nn.Module, optimizer: Any) -> None:
    run.evaluate(lambda batch: {}, points())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (looks, "each step must call step.backward"),
        (steps_itself, r"optimizer.step\(\) was called in the loop. Call step.update\(\)"),
        (schedules, r'Give it to the run: Run\(..., state={"scheduler": scheduler}\)'),
        (names_another, "there is no optimizer 'critic'; the optimizers are main"),
        (logs_text, r"step.log\(name=...\) takes a number, not 'x'"),
        (loops_twice, "a run has one loop"),
        (evaluates_before, r"call it within the loop over Run.steps\(\), or after it"),
    ],
)
def test_mistakes_in_the_loop_are_named(tmp_path: Path, body: Callable[..., None], message: str) -> None:
    model = linear()
    optimizer = Adam(model.parameters(), 0.1)
    with start(tmp_path / "run", model, optimizer) as run, pytest.raises(paceline.UserError, match=message):
        body(run, model, optimizer)
    optimizer.step()  # the guard of the loop is gone
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_other_commands_say_that_the_script_continues_the_run(run_processes: Processes, tmp_path: Path) -> None:
    model = linear()
    with start(tmp_path / "run", model, SGD(model.parameters(), 0.1)) as run:
        for step in run.steps(max_steps=3):
            step.backward(squares(model))
            if step.step == 1:
                break
    # The name under which runs have recorded it since the first release; the class may be elsewhere.
    assert RunDirectory(tmp_path / "run").read_manifest()["task"]["spec"] == "paceline.own_loop:OwnLoop"
    done = run_processes.paceline("resume", str(tmp_path / "run"))
    assert done.returncode == 2
    assert f"the loop in {Path(sys.argv[0]).name}, which builds the model itself" in done.stderr
