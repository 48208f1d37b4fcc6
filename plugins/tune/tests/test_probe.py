"""What a search finds out before it begins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError, TaskError
from paceline_tune.plan_search import estimate_search, measure_search, probe
from paceline_tune.search import Search

SEARCH = Search(
    options={
        "task": f"{Path(__file__).parent / 'tasks.py'}:Line",
        "threads": 1,
        "max_steps": 20,
        "eval_every": "5steps",
        "set": ["kind=relu", "fail_above=1e32"],
        "seed": 4,
    },
    space=("lr=choice:1e30,0.01,1e35,1e36",),
    trials=4,
    metric="loss:min",
)


@pytest.mark.integration
def test_first_trials_that_fail_or_diverge_do_not_end_the_search() -> None:
    order = [float(str(SEARCH.parameters(number)["lr"])) for number in range(4)]
    assert order == [1e30, 1e36, 1e35, 0.01]
    facts = probe(SEARCH)
    assert set(facts.metrics) == {"near", "loss"}
    assert (facts.search.total_steps, facts.search.evaluations) == (20, 4)
    assert [failure.partition(":")[0] for failure in facts.failures] == [f"lr={lr}" for lr in order[:-1]]
    reasons = dict(failure.split(": ", 1) for failure in facts.failures)
    assert "is NaN or infinite" in reasons["lr=1e+30"]
    assert "paceline resume" not in reasons["lr=1e+30"]  # a run that is gone
    assert "no model for lr 1e+35" in reasons["lr=1e+35"]
    with pytest.raises(TaskError, match="no configuration could be trained") as raised:
        probe(replace(SEARCH, trials=3))
    assert all(failure in str(raised.value) for failure in facts.failures)


def test_a_task_that_cannot_be_run_is_one_error_and_prints_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text("import os\n\nos.system('echo native')\nraise ValueError('no such data')\n")
    with pytest.raises(ConfigError, match="the task could not be run: ValueError: no such data"):
        probe(replace(SEARCH, options={"task": f"{tmp_path / 'broken.py'}:Broken"}))
    print("seen")
    assert capfd.readouterr().out == "seen\n"


SLOW_START = """
import time
from dataclasses import dataclass
import torch
from torch.utils.data import TensorDataset
import paceline

@dataclass
class SlowStart(paceline.Task):
    lr: float = 0.1

    def build_model(self):
        time.sleep(0.5)
        return torch.nn.Linear(3, 1)

    def build_dataset(self, split):
        x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, x.sum(dim=1, keepdim=True))

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=self.lr)

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()
"""


@pytest.mark.integration
def test_a_trials_start_is_measured_and_estimated(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_START)
    options = {"task": f"{tmp_path / 'slow.py'}:SlowStart", "threads": 1, "max_steps": 20, "eval_every": "10steps"}
    search = replace(SEARCH, options=options, space=("lr=choice:0.01,0.02",), trials=2, scheduler="none")
    measured, _ = measure_search(search, None)
    assert measured.start_s >= 0.5
    expected = estimate_search(measured, cpus=1)
    assert expected is not None
    assert measured.seconds_per_evaluation is not None
    assert expected.trial.seconds == pytest.approx(measured.start_s + 2 * measured.seconds_per_evaluation)
    assert expected.search.seconds == pytest.approx(2 * expected.trial.seconds)


@pytest.mark.integration
def test_what_is_measured_is_in_no_tracker_and_no_backup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    backup = tmp_path / "backup"
    backup.mkdir()
    kept = {**SEARCH.options, "log_to": ["mlflow"], "backup_to": str(backup)}
    facts = probe(replace(SEARCH, options=kept, space=("lr=choice:0.01,0.02",), trials=2))
    assert facts.failures == ()
    assert [path.name for path in tmp_path.iterdir()] == ["backup"]
    assert list(backup.iterdir()) == []
    with pytest.raises(ConfigError, match="nothing"):
        probe(replace(SEARCH, options={**SEARCH.options, "log_to": ["nothing"]}))
