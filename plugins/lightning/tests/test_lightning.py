"""A LightningModule as a task: the same model from any number of processes, and after a kill."""

from __future__ import annotations

import copy
import csv
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import paceline
import paceline_lightning
from paceline.core.task import RankInfo, RunSchedule
from paceline.core.task_loading import build_task, load_task_class, task_fields
from paceline_lightning.metrics import LoggedValue, StepLog
from paceline_lightning.task import LightningTask

LIT = Path(__file__).parent / "lit.py"


@pytest.fixture(scope="module")
def lit() -> Iterator[Any]:
    """The module of the tasks, as ``paceline train`` loads it."""
    before = list(sys.path)
    load_task_class(f"{LIT}:Classified")
    yield sys.modules["paceline_task_lit"]
    sys.path[:] = before


@pytest.fixture(scope="module")
def runs(module_processes: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same run by one process, by three, and by two of which one is killed."""
    directory = tmp_path_factory.mktemp("runs")
    started = {
        name: module_processes.start(
            [
                *(sys.executable, "-m", "paceline", "train", f"{LIT}:Classified", "--run-dir", name),
                *("--threads", "1", "--seed", "3", "--log-every", "5", "--quiet", *arguments),
                # An end is seen without it, and a machine that stalls is no fault.
                *("--heartbeat", "60"),
            ],
            cwd=directory,
        )
        for name, arguments in {
            "one": [],
            "three": ["--nproc", "3"],
            "killed": ["--nproc", "2", "--set", "kill_at=17", "--recover", "inplace"],
        }.items()
    }
    for popen in started.values():
        finished = module_processes.finish(popen, timeout_s=240)
        assert finished.returncode == 0, finished.stderr
    return {name: directory / name for name in started}


def result_of(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "result.json").read_text()))


def records_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def logged_by(run: Path) -> list[dict[str, str]]:
    """The rows of the CSVLogger's file."""
    (file,) = run.glob("lightning/version_*/metrics.csv")
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


def test_any_number_of_processes_ends_with_the_same_bits_and_metrics(runs: dict[str, Path]) -> None:
    results = {name: result_of(run) for name, run in runs.items()}
    assert {name: result["recoveries"] for name, result in results.items()} == {
        "one": 0,
        "three": 0,
        "killed": 1,
    }
    for key in ("model_sha256", "metrics", "steps", "state_version"):
        assert len({json.dumps(result[key]) for result in results.values()}) == 1, key
    # EarlyStopping ended the run, and --best-metric names what validation_step logs.
    one = results["one"]
    assert one["epochs"] < 30
    assert one["best_step"] < one["steps"]
    assert {"val_loss", "loss", "val/accuracy", "val/auroc"} == set(one["metrics"]["val"])
    assert set(one["metrics"]["test"]) == {"loss"}


def test_loggers_and_callbacks_say_the_same_whoever_trains(runs: dict[str, Path]) -> None:
    one, three = logged_by(runs["one"]), logged_by(runs["three"])
    assert one == three
    rates = [float(row["lr-AdamW"]) for row in one if row["lr-AdamW"]]
    assert rates[0] == 0.02
    assert rates[-1] < rates[0]  # the plateau schedule has seen val_loss
    steps = [row for row in one if row["train_loss"] and row["grad_norm"]]
    assert [int(row["step"]) for row in steps[:3]] == [4, 9, 14]
    epochs = [row for row in one if row["train_accuracy"]]
    assert len(epochs) == result_of(runs["one"])["epochs"]
    assert all(0 < float(row["train_accuracy"]) < 1 for row in epochs)
    record = next(r for r in records_of(runs["one"]) if r["kind"] == "train")
    # A mean over the samples: training_step's loss is the step's.
    assert record["logged"]["train_loss"] == pytest.approx(record["loss"], rel=1e-6)


def test_the_weights_are_those_of_lightning_itself(lit: Any, tmp_path: Path) -> None:
    class Plain(lit.Classifier):  # type: ignore[name-defined, misc]
        def configure_optimizers(self) -> Any:
            # No Adam: before batch norm a bias has no gradient but noise, which Adam would make steps of.
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            each_step = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            steps = {"scheduler": each_step, "interval": "step", "frequency": 2}
            return {"optimizer": optimizer, "lr_scheduler": steps}

    class Ordered(lit.Points):  # type: ignore[name-defined, misc]
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(self.splits["train"], batch_size=24)

    seen: dict[str, Any] = {}

    class Watch(pl.Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            seen["metrics"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
            seen["step"], seen["epochs"] = trainer.global_step, trainer.max_epochs
            seen["weights"] = {name: value.clone() for name, value in module.state_dict().items()}

    class Ours(LightningTask):
        def build_module(self) -> Any:
            torch.manual_seed(0)
            return Plain(noise=0.0)

        def build_datamodule(self) -> Any:
            return Ordered()

        def build_callbacks(self) -> Any:
            return [Watch()]

    torch.manual_seed(0)
    module = Plain(noise=0.0)
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        callbacks=[Watch()],
        plugins=[LightningEnvironment()],
        logger=False,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own
        trainer.fit(module, datamodule=Ordered())
    theirs, seen = seen, {}
    fit(Ours(), tmp_path, epochs=2, microbatches=1, shuffle="none")
    assert (seen["step"], seen["epochs"]) == (theirs["step"], theirs["epochs"]) == (10, 2)
    torch.testing.assert_close(seen["weights"], theirs["weights"])
    # In training, Lightning's epoch metrics are those of the whole epoch: of a mean, the same number.
    for name in ("val_loss", "val/auroc", "val/accuracy", "train_accuracy"):
        assert seen["metrics"][name] == pytest.approx(theirs["metrics"][name], rel=1e-5), name


def fit(task: paceline.Task, directory: Path, **options: Any) -> paceline.Result:
    """Train in this process; the task's class is one of a test, which no other process could find."""
    kind = type(task)
    kind.__qualname__ = kind.__name__
    return paceline.fit(task, run_dir=str(directory / "run"), quiet=True, threads=1, **options)


@pytest.mark.parametrize(("eval_every", "steps"), [("2epochs", 20), ("2steps", 4)])
def test_early_stopping_looks_after_each_evaluation(lit: Any, tmp_path: Path, eval_every: str, steps: int) -> None:
    class Plain(lit.Classifier):  # type: ignore[name-defined, misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Stopped(LightningTask):
        def build_module(self) -> Any:
            return Plain()

        def build_datamodule(self) -> Any:
            return lit.Points()

        def build_callbacks(self) -> Any:
            return [EarlyStopping("val_loss", patience=1, min_delta=10.0)]  # nothing is that much better

    result = fit(Stopped(), tmp_path, epochs=8, microbatches=1, eval_every=eval_every)
    assert result.steps == steps


@pytest.mark.slow
def test_loaders_of_the_module_with_workers_and_two_schedules(run_processes: Any, tmp_path: Path, lit: Any) -> None:
    finished = run_processes.run(
        [
            *(sys.executable, "-m", "paceline", "train", f"{LIT}:Loaded", "--run-dir", "run", "--threads", "1"),
            *("--num-workers", "1", "--log-every", "1", "--quiet", "--json"),
        ],
        timeout_s=120,
    )
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout)["global_batch_size"] == 12  # the loader's
    records = records_of(tmp_path / "run")
    rates = [record["lr"] for record in records if record["kind"] == "train"]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.02)
    by_steps = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    by_epochs = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    expected = []
    for step in range(10):
        expected.append(optimizer.param_groups[0]["lr"])  # with which the step is taken
        optimizer.step()
        by_steps.step()
        if step == 4:
            by_epochs.step()
    assert rates == expected


def schedules_of(lit: Any, total_steps: int) -> Any:
    """One by steps and one by epochs, as a run of this length builds them."""
    task = lit.Loaded()
    module = task.build_model()
    task.build_callback(module, RunSchedule(total_steps=total_steps, steps_per_epoch=5, epochs=total_steps // 5))
    return task.build_scheduler(task.build_optimizer(module), total_steps)


@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
def test_a_longer_run_continues_each_schedule_in_its_interval(lit: Any) -> None:
    short, longer, straight = schedules_of(lit, 10), schedules_of(lit, 20), schedules_of(lit, 20)
    for schedule in (short, straight):
        for step in range(10):
            schedule.batch_idx = step % 5
            schedule.step()
            if step % 5 == 4:
                schedule.on_epoch_end(step // 5, {})
    longer.move_to(short.state_dict(), 10)
    by_steps, by_epochs = longer.state_dict()["_schedulers"]
    assert (by_steps["last_epoch"], by_epochs["last_epoch"]) == (10, 2)
    assert by_steps["total_steps"] == straight.state_dict()["_schedulers"][0]["total_steps"] == 20
    with pytest.raises(ValueError, match="holds 1 schedulers, and the module has 2"):
        longer.move_to({"_schedulers": [{}]}, 10)


def attached(task: LightningTask, directory: Path, *, trains: bool) -> Any:
    session = task.build_callback(task.build_model(), RunSchedule(total_steps=4, steps_per_epoch=2, epochs=2))
    alone = RankInfo(
        rank=0,
        world_size=1,
        local_rank=0,
        device=torch.device("cpu"),
        directory=directory,
        log_every=1,
        gather=lambda value: [value],
        trains=trains,
    )
    session.attach(alone, step=0, epoch=0)
    return session


def test_a_model_that_is_only_evaluated_has_no_tracker(lit: Any, tmp_path: Path) -> None:
    session = attached(lit.Classified(), tmp_path, trains=False)
    session.module.logger.experiment.add_text("a hook's own", "value")
    session.close()
    assert list(tmp_path.iterdir()) == []
    session = attached(lit.Classified(), tmp_path, trains=True)
    session.close()
    assert list(tmp_path.iterdir()) != []


class Average(pl.Callback):
    """As many write it: the average is nowhere but here."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.of, self.average = module, copy.deepcopy(module.model)


class SavedAverage(Average):
    def state_dict(self) -> dict[str, Any]:
        return dict(self.average.state_dict())


def test_a_callback_whose_weights_no_checkpoint_has_is_named(
    lit: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class WithAverages(lit.Classified):  # type: ignore[name-defined, misc]
        def build_callbacks(self) -> list[pl.Callback]:
            return [Average(), SavedAverage()]

    session = attached(WithAverages(), tmp_path, trains=True)
    for _ in range(2):
        session.state_dict()
    session.close()
    assert [record.getMessage().partition(" and has")[0] for record in caplog.records] == [
        "the callback Average keeps weights (average)"
    ]


def test_a_task_in_one_line_has_the_arguments_as_its_fields(lit: Any) -> None:
    made = build_task(lit.Made, {"lr": "0.5", "batch_size": "10"})
    assert task_fields(made) == {"lr": 0.5, "width": 8, "noise": 0.2, "batch_size": 10, "number": 107}
    assert made.recommended_batch_size() == 10
    assert len(made.build_dataset("train")) == 107
    assert (lit.Made.__module__, lit.Made.__name__) == ("paceline_task_lit", "Made")


# --- what is refused


def variant(lit: Any, *, module: type[Any] | None = None, data: type[Any] | None = None) -> LightningTask:
    class Variant(LightningTask):
        def build_module(self) -> Any:
            return (module or lit.Classifier)()

        def build_datamodule(self) -> Any:
            return (data or lit.Points)()

    return Variant()


def test_manual_optimization_is_refused(lit: Any) -> None:
    class Manual(lit.Classifier):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    with pytest.raises(paceline.TaskError, match=r"Manual\.automatic_optimization is False.*torchrun"):
        variant(lit, module=Manual).build_model()


def test_a_hook_that_cannot_be_kept_is_refused_with_what_helps(lit: Any) -> None:
    class Clipped(lit.Classifier):  # type: ignore[name-defined, misc]
        def configure_gradient_clipping(self, *arguments: Any) -> None: ...

    with pytest.raises(paceline.TaskError, match=r"Clipped\.configure_gradient_clipping.*--clip-norm"):
        variant(lit, module=Clipped).build_model()


def test_hooks_and_arguments_that_nothing_would_call_are_refused(lit: Any) -> None:
    class Old(lit.Classifier):  # type: ignore[name-defined, misc]
        def training_epoch_end(self, outputs: Any) -> None: ...

    class Iterating(lit.Classifier):  # type: ignore[name-defined, misc]
        def training_step(self, dataloader_iter: Any) -> Any: ...

    for module, message in ((Old, r"training_epoch_end.*Use on_train_epoch_end"), (Iterating, "Take a batch")):
        with pytest.raises(paceline.TaskError, match=message):
            variant(lit, module=module).build_model()


@pytest.mark.parametrize(
    ("callback", "hook", "message"),
    [
        (
            LearningRateMonitor(),
            "on_train_start",
            "LearningRateMonitor: .* The task's build_loggers returns the loggers",
        ),
        (EarlyStopping("train_loss", check_on_train_epoch_end=True), "on_train_epoch_end", "logged with on_epoch=True"),
    ],
)
def test_what_a_callback_misses_is_said_with_the_remedy(lit: Any, callback: Any, hook: str, message: str) -> None:
    class Watched(lit.Classifier):  # type: ignore[name-defined, misc]
        def configure_callbacks(self) -> Any:
            return [callback]

    task = variant(lit, module=Watched)
    session = task.build_callback(task.build_model(), RunSchedule(total_steps=4, steps_per_epoch=2, epochs=2))
    with pytest.raises(paceline.TaskError, match=message):
        session._hook(hook)


def test_a_callback_that_does_what_paceline_does_is_refused(lit: Any, tmp_path: Path) -> None:
    class Checkpointed(lit.Classifier):  # type: ignore[name-defined, misc]
        def configure_callbacks(self) -> Any:
            return ModelCheckpoint(dirpath=tmp_path)

    with pytest.raises(paceline.TaskError, match=r"ModelCheckpoint has no place here.*--checkpoint-every"):
        variant(lit, module=Checkpointed).build_model()


def test_several_optimizers_are_refused(lit: Any) -> None:
    class Two(lit.Classifier):  # type: ignore[name-defined, misc]
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]

    task = variant(lit, module=Two)
    with pytest.raises(paceline.TaskError, match=r"returned 2 optimizers.*parameter groups"):
        task.build_optimizer(task.build_model())


def test_a_sampler_is_refused(lit: Any) -> None:
    class OfHalf(lit.Points):  # type: ignore[name-defined, misc]
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(self.splits["train"], sampler=SubsetRandomSampler(range(50)))

    with pytest.raises(paceline.DataError, match=r"OfHalf\.train_dataloader has a SubsetRandomSampler.*sample_weights"):
        variant(lit, data=OfHalf).build_dataset("train")


def test_a_batch_sampler_gives_its_size_and_is_refused_for_the_sampler_in_it(lit: Any) -> None:
    class Batched(lit.Points):  # type: ignore[name-defined, misc]
        sampler: Any = SequentialSampler(range(107))

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(self.splits["train"], batch_sampler=BatchSampler(self.sampler, 12, drop_last=False))

    class OfHalf(Batched):
        sampler = SubsetRandomSampler(range(50))

    task = variant(lit, data=Batched)
    task.build_dataset("train")
    assert task._loaded().batch_size == 12
    with pytest.raises(paceline.DataError, match=r"OfHalf\.train_dataloader has a SubsetRandomSampler.*sample_weights"):
        variant(lit, data=OfHalf).build_dataset("train")


def test_a_weighted_sampler_gives_its_weights(lit: Any) -> None:
    sampler = WeightedRandomSampler([1.0] * 107, 80)

    class Weighted(lit.Points):  # type: ignore[name-defined, misc]
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(self.splits["train"], sampler=sampler)

    task = variant(lit, data=Weighted)
    assert task.sample_weights(task.build_dataset("train")) is sampler


def test_a_sampler_of_some_samples_is_refused(lit: Any) -> None:
    class Some(lit.Points):  # type: ignore[name-defined, misc]
        def train_dataloader(self) -> DataLoader[Any]:
            sampler = RandomSampler(self.splits["train"], replacement=True, num_samples=30)
            return DataLoader(self.splits["train"], sampler=sampler)

    with pytest.raises(paceline.DataError, match="RandomSampler that draws 30 samples with replacement"):
        variant(lit, data=Some).build_dataset("train")


def test_an_argument_that_would_hide_what_a_task_has_is_refused() -> None:
    class Chosen(pl.LightningModule):
        def __init__(self, loss: str = "ce") -> None:
            super().__init__()

    with pytest.raises(paceline.TaskError, match=r"Chosen\.__init__: 'loss' is also something that every"):
        paceline_lightning.task(Chosen, name="Hidden")


def test_what_ranks_keep_for_themselves_is_noticed() -> None:
    from paceline_lightning.bridge import LightningBridge

    session = LightningBridge.__new__(LightningBridge)
    session.module, session.trainer = object(), type("T", (), {"should_stop": False})()
    session._group = type("G", (), {"gather": staticmethod(lambda mine: [mine, [{"f1": "0.25"}, True]])})()
    with pytest.raises(paceline.TaskError, match=r"on_validation_epoch_end logged another 'f1' on rank 1"):
        session._agreed({"f1": 0.5}, "on_validation_epoch_end")
    assert session.should_stop  # one rank's wish is all ranks'


def test_hooks_of_checkpoints_find_the_weights_and_keep_what_they_add(lit: Any) -> None:
    class Curriculum(lit.Points):  # type: ignore[name-defined, misc]
        level = 1

        def state_dict(self) -> dict[str, Any]:
            return {"level": self.level}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.level = state["level"]

    class Sparing(lit.Classifier):  # type: ignore[name-defined, misc]
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"].pop("model.0.weight")
            checkpoint["kept"] = [checkpoint["epoch"], checkpoint["global_step"]]

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.loaded = (checkpoint["kept"], sorted(checkpoint["state_dict"]))

    task = variant(lit, module=Sparing, data=Curriculum)
    task.build_dataset("train")
    module = task.build_model()
    session = task.build_callback(module, RunSchedule(total_steps=4, steps_per_epoch=2, epochs=2))
    session.trainer.datamodule.level = 2
    state = session.state_dict()
    session.trainer.datamodule.level = 1
    assert state["checkpoint"] == {"kept": [0, 0]}
    session.load_state_dict(state)
    assert module.loaded == ([0, 0], sorted(module.state_dict()))
    assert session.trainer.datamodule.level == 2
    task = variant(lit, module=Sparing)
    alone = task.build_callback(task.build_model(), RunSchedule(total_steps=4, steps_per_epoch=2, epochs=2))
    alone.load_state_dict(state)


def test_means_do_not_depend_on_who_computed_them() -> None:
    def entry(value: float, *, epoch: bool = False) -> LoggedValue:
        return LoggedValue(torch.tensor(value), 3.0, on_step=True, on_epoch=epoch, to_logger=True)

    values = [0.1, 1e8, -1e8, 0.3, 1e-9, 7.7]

    def means(cuts: list[int]) -> list[float]:
        """With the micro-batches shared so; every rank computes the last one, too."""
        edges = [0, *cuts, len(values)]
        logs = [StepLog() for _ in edges[1:]]
        rows: list[Any] = []
        for log, first, stop in zip(logs, edges, edges[1:], strict=False):
            for microbatch in {*range(first, stop), len(values) - 1}:
                log.add("x", microbatch, entry(values[microbatch], epoch=True))
            log.reduce(lambda mine: [rows.append(mine) or mine][:0], due=True, first=True)
        found = StepLog()
        of_step, _ = found.reduce(lambda mine: rows, due=True, first=True)
        of_epoch, _ = found.end_epoch()
        return [of_step["x"], of_epoch["x"]]

    assert means([]) == means([1]) == means([2, 3]) == means([5])


def test_what_is_logged_by_epochs_must_be_there_from_the_start() -> None:
    log = StepLog()
    assert log.reduce(lambda mine: [mine], due=False, first=True) == ({}, {})
    log.add("late", 0, LoggedValue(1.0, 1.0, on_step=False, on_epoch=True, to_logger=True))
    with pytest.raises(paceline.TaskError, match=r"'late'.*on_epoch=True"):
        log.reduce(lambda mine: [mine], due=False, first=False)
