"""A parameter that a step does not use has no gradient, so the optimizer leaves it as it is: as in plain PyTorch."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tests.training.branch_tasks import Branches
from tests.training.states import newest
from torch import nn

import paceline
from paceline.core.task import BatchInfo

pytestmark = pytest.mark.matrix

NEVER = ("never", "uncalled.weight", "uncalled.bias")
FIELDS = {"adamw": {"adamw": True}, "sgd": {"adamw": False}}
ON_ONE: dict[str, dict[str, Any]] = {
    "single": {"strategy": "single"},
    "threads": {"strategy": "dp", "dp_devices": 2},
    "clipped": {"strategy": "single", "clip_norm": 0.1},
    "averaged": {"strategy": "single", "ema": 0.9},
}
ON_TWO: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp, a unit for each layer": {"strategy": "fsdp", "fsdp_wrap": "Linear,Branch"},
    "pp": {"strategy": "pp"},
    "zero-bubble": {"strategy": "pp", "pp_schedule": "zero-bubble"},
    "ps": {"strategy": "ps"},
    "checked": {"strategy": "ddp", "sdc_check_every": 1},
    "clipped": {"strategy": "ddp", "clip_norm": 0.1},
    "clipped pp": {"strategy": "pp", "clip_norm": 0.1},
    "averaged": {"strategy": "ddp", "ema": 0.9},
}
OTHER_BITS: dict[str, dict[str, Any]] = {
    "allreduce": {"strategy": "ddp", "reduction": "allreduce"},
    "allreduce fsdp": {"strategy": "fsdp", "reduction": "allreduce"},
    "torch's ddp": {"strategy": "ddp", "reduction": "ddp"},
    "compressed": {"strategy": "ddp", "comm_hook": "bf16"},
    "powersgd": {"strategy": "ddp", "comm_hook": "powersgd"},
    "tp": {"strategy": "tp"},
    "async": {"strategy": "ps", "ps_mode": "async"},
    "hogwild": {"strategy": "hogwild"},
    "local": {"strategy": "ddp", "local_sgd_steps": 2},
    "scaled": {"strategy": "ddp", "precision": "fp16"},
}
ON_THREE: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "fsdp": {"strategy": "fsdp"},
    "two servers": {"strategy": "ps", "ps_servers": 2},
}
STOPPED = ("ddp", "zero1", "fsdp", "pp", "ps")
LIKE = {"clipped": "clipped", "clipped pp": "clipped", "averaged": "averaged"}
"""The run of one process that a run must equal, where it is not the first."""


def _jobs(runs: dict[str, dict[str, Any]], optimizer: str = "", **job: Any) -> dict[str, dict[str, Any]]:
    return {
        f"{name}, {fields}": {"task": "Branches", "fields": FIELDS[fields], "options": options, **job}
        for name, options in runs.items()
        for fields in FIELDS
        if fields.startswith(optimizer)
    }


KILLED = """
import os, signal
from pathlib import Path
from tests.training.branch_tasks import Branches


class Killed(Branches):
    def on_batch_begin(self, info):
        super().on_batch_begin(info)
        if (info.step, info.number) == (5, 2) and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def on_one(start_trainings: Any) -> Any:
    return start_trainings(_jobs(ON_ONE))


@pytest.fixture(scope="module")
def on_two(start_trainings: Any) -> Any:
    network = {f"{name} over the network": job | {"network": True} for name, job in _jobs({"ddp": {}}).items()}
    watched = {"strategy": "ddp"}, {"strategy": "fsdp"}
    return start_trainings(
        _jobs(ON_TWO)
        | _jobs(OTHER_BITS, "adamw")
        | network
        | {f"stopped {name}": {"task": "Branches", "options": {"strategy": name}, "stop_at": 6} for name in STOPPED}
        | {f"continued {name}": {"task": "Branches", "options": {"run_dir": f"stopped {name}"}} for name in STOPPED}
        | {f"watched {o['strategy']}": {"task": "Branches", "fields": {"watches": True}, "options": o} for o in watched}
        | {f"passes {name}": {"task": "TwoPasses", "options": {"strategy": name}} for name in ("ddp", "fsdp")},
        ranks=2,
    )


@pytest.fixture(scope="module")
def on_three(start_trainings: Any) -> Any:
    return start_trainings(_jobs(ON_THREE), ranks=3)


@pytest.mark.parametrize("optimizer", FIELDS)
@pytest.mark.parametrize("name", [name for name in ON_ONE if name not in LIKE])
def test_the_bits_on_one_process(on_one: Any, name: str, optimizer: str) -> None:
    _require_untouched(on_one, f"{name}, {optimizer}")
    assert on_one[f"{name}, {optimizer}"]["model_sha256"] == on_one[f"single, {optimizer}"]["model_sha256"]


@pytest.mark.parametrize("optimizer", FIELDS)
@pytest.mark.parametrize("name", ON_TWO)
def test_the_bits_on_two_ranks(on_one: Any, on_two: Any, name: str, optimizer: str) -> None:
    expected = on_one[f"{LIKE.get(name, 'single')}, {optimizer}"]["model_sha256"]
    assert on_two[f"{name}, {optimizer}"]["model_sha256"] == expected
    _require_untouched(on_two, f"{name}, {optimizer}")


@pytest.mark.parametrize("optimizer", FIELDS)
def test_the_bits_over_the_network(on_one: Any, on_two: Any, optimizer: str) -> None:
    expected = on_one[f"single, {optimizer}"]["model_sha256"]
    assert on_two[f"ddp, {optimizer} over the network"]["model_sha256"] == expected


@pytest.mark.parametrize("optimizer", FIELDS)
@pytest.mark.parametrize("name", ON_THREE)
def test_the_bits_on_three_ranks(on_one: Any, on_three: Any, name: str, optimizer: str) -> None:
    expected = on_one[f"single, {optimizer}"]["model_sha256"]
    assert on_three[f"{name}, {optimizer}"]["model_sha256"] == expected
    _require_untouched(on_three, f"{name}, {optimizer}")


@pytest.mark.parametrize("name", STOPPED)
def test_a_stopped_and_continued_run(on_one: Any, on_two: Any, name: str) -> None:
    assert on_two[f"stopped {name}"]["error"] == "StopRequested"
    assert on_two[f"continued {name}"]["model_sha256"] == on_one["single, adamw"]["model_sha256"]


def test_a_killed_worker(on_one: Any, run_processes: Any, tests_importable: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    options = ["--nproc", "2", "--device", "cpu", "--threads", "1", "--purity", "off"]
    options += ["--run-dir", "run", "--quiet", "--json"]
    command = [sys.executable, "-m", "paceline", "train", "killed.py:Killed", *options]
    done = run_processes.finish(
        run_processes.start(command, env=tests_importable, cwd=tmp_path, shared=False), timeout_s=120
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert (tmp_path / "killed").exists()
    assert result["recoveries"] == 1
    assert result["model_sha256"] == on_one["single, adamw"]["model_sha256"]


@pytest.mark.parametrize("name", OTHER_BITS)
def test_what_no_step_uses_stays_as_it_is(on_two: Any, name: str) -> None:
    _require_untouched(on_two, f"{name}, adamw")


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_all_ranks_see_which_parameters_have_a_gradient(on_two: Any, name: str) -> None:
    on_two.results()
    seen = newest(on_two.run(f"watched {name}"))["callback"]["seen"]
    assert seen["always"] == seen["once"] == [True] * 10
    assert seen["seldom"] == [False, True] * 5
    assert [seen[never] for never in NEVER] == [[False] * 10] * 3


def test_each_pass_of_a_step_counts_alone(on_two: Any) -> None:
    assert on_two["passes ddp"]["model_sha256"] == on_two["passes fsdp"]["model_sha256"]
    _require_untouched(on_two, "passes ddp")


def _require_untouched(trainings: Any, name: str) -> None:
    """The parameters that no step uses are as they were built, and the optimizer keeps nothing of them."""
    assert trainings[name].get("steps") == 10, trainings[name]
    state = newest(trainings.run(name))
    assert torch.equal(state["model"]["3.never"], torch.full((12,), 1.28))
    saved = {name for name, values in state["optimizers"]["main"]["state"].items() if values}
    assert "3.always" in saved or "hogwild" in name  # there the other process may have computed all steps
    assert saved.isdisjoint(f"3.{name}" for name in NEVER)


class Recorded(Branches):
    """Keeps the model as it was built, and the micro-batches."""

    built: ClassVar[nn.Module]
    computed: ClassVar[list[tuple[BatchInfo, list[torch.Tensor]]]]

    def build_model(self) -> nn.Module:
        model = super().build_model()
        Recorded.built, Recorded.computed = copy.deepcopy(model), []
        return model

    def on_batch_begin(self, info: BatchInfo) -> None:
        super().on_batch_begin(info)
        self.info = info

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor | paceline.Loss:
        self.computed.append((self.info, batch))
        return super().loss(model, batch)


@pytest.mark.integration
@pytest.mark.parametrize("optimizer", FIELDS)
def test_the_weights_are_those_of_an_ordinary_loop(optimizer: str, tmp_path: Any) -> None:
    task = Recorded(**FIELDS[optimizer])
    paceline.fit(task, run_dir=str(tmp_path / "run"), strategy="single", microbatches=4, purity="off", quiet=True)
    model = Recorded.built
    plain = task.build_optimizer(model)
    for step in range(10):
        plain.zero_grad()
        of_step = [(info, batch) for info, batch in Recorded.computed if info.step == step]
        size = sum(info.samples for info, _ in of_step)
        for info, batch in of_step:
            task.on_batch_begin(info)
            (nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum") / size).backward()
        plain.step()
    torch.testing.assert_close(newest(tmp_path / "run")["model"], dict(model.state_dict()))
