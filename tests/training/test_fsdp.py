"""Fully sharded training: the bits of one process, and checkpoints that any strategy continues."""

from __future__ import annotations

import copy
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.states import newest
from torch import nn

from paceline.core.errors import ConfigError
from paceline.parallel.strategy import compile_model
from paceline.parallel.wrap_units import exclude_tied, model_blocks, wrap_units

pytestmark = pytest.mark.matrix

EXACT: dict[str, dict[str, Any]] = {
    # Carved validation, plateau schedule, early stop; dropout, batch norm, AdamW; a short last batch.
    "everything": {"task": "Everything", "options": {"val_fraction": 0.2, "early_stop": "accuracy:4"}},
    "in-blocks": {"task": "Everything", "options": {"fsdp_wrap": "8", "max_steps": 8}},
    "two-optimizers": {"task": "TwoOptimizers", "options": {"precision": "bf16"}},
    "fp16": {"task": "Overflowing", "options": {"precision": "fp16"}},
    "overflow-in-one-part": {"task": "OverflowingFirst", "options": {"precision": "fp16"}},
    "few-samples": {"task": "Overflowing", "fields": {"num": 8}, "options": {"precision": "fp16"}},
    "metrics": {"task": "ManyMetrics"},
    "uneven-stream": {"task": "Uneven"},
    "average": {
        "task": "Everything",
        "options": {
            "ema": 0.9,
            "max_steps": 12,
            "val_fraction": 0.2,
            "eval_every": "4steps",
            "best_metric": "accuracy:max",
        },
    },
    "frozen": {"task": "Frozen"},
    # Tensors of a MiB and more are built one by one.
    "large": {"task": "Text", "fields": {"width": 256, "tied": True}, "options": {"ema": 0.9, "max_steps": 2}},
    "kept": {"task": "Everything", "options": {"fsdp_wrap": "8", "fsdp_reshard": "never", "max_steps": 6}},
    "freed": {"task": "Everything", "options": {"fsdp_wrap": "8", "fsdp_reshard": "always", "max_steps": 6}},
    "offloaded": {"task": "TwoOptimizers", "options": {"fsdp_offload": True}},
    "low-precision": {"task": "Noisy", "options": {"precision": "bf16", "fsdp_mixed_precision": True}},
    "own-in-low-precision": {
        "task": "Skipping",
        "options": {"precision": "bf16", "fsdp_mixed_precision": True, "max_steps": 3},
    },
    "tied": {
        "task": "Text",
        "fields": {"tied": True},
        "options": {"fsdp_wrap": "Linear,Embedding", "max_steps": 3},
    },
    "tied-in-low-precision": {
        "task": "Text",
        "fields": {"tied": True},
        "options": {"precision": "bf16", "fsdp_mixed_precision": True, "max_steps": 3},
    },
    "shared-inputs": {"task": "Sharing", "options": {"fsdp_wrap": "Branches", "max_steps": 6}},
    "shared-inputs-recomputed": {
        "task": "Sharing",
        "options": {
            "fsdp_wrap": "Linear,Branches",
            "max_steps": 6,
            "checkpoint_activations": "block",
            "checkpoint_blocks": "Branches",
        },
    },
    "best": {
        "task": "Points",
        "fields": {"num_val": 40, "num_test": 20},
        "options": {"best_metric": "accuracy:max"},
    },
}
OTHER: dict[str, dict[str, Any]] = {
    "fast": {"task": "Points", "options": {"reduction": "allreduce"}},
    "clipped": {"task": "Points", "options": {"clip_norm": 0.05}},
}
REFUSED = {
    "scalar": ({"task": "Parts", "fields": {"scale": 0}}, "the parameter 'scale', which is a single number"),
    "channels-last": ({"task": "Parts", "fields": {"channels_last": True}}, "but 'conv.weight' has the strides"),
    "pixels-last": ({"task": "Parts", "fields": {"channels_last": True, "use": "pixel"}}, "but 'conv.weight' has the"),
    "hook": ({"task": "Parts", "fields": {"use": "hook"}}, "so the hook on its gradient (register_hook) would never"),
    "alias": (
        {"task": "Parts", "fields": {"use": "alias"}},
        "but the parameter 'scale' and the parameter 'head.bias' share memory",
    ),
    "scripted": ({"task": "Parts", "fields": {"use": "scripted"}}, "which a module of torch.jit does not run"),
    "types": ({"task": "Parts", "fields": {"use": "types"}}, "PartsModel has torch.float32 and torch.float64"),
    "Adafactor": ({"task": "Parts", "fields": {"optimizer": "Adafactor"}}, "the optimizer 'main', Adafactor, needs"),
    "Muon": ({"task": "Parts", "fields": {"optimizer": "Muon"}}, "the optimizer 'main', Muon, needs whole ones"),
    "own-muon": ({"task": "Parts", "fields": {"optimizer": "Indexing"}}, "Indexing does not work with sharded"),
    "own-state": ({"task": "Parts", "fields": {"optimizer": "OwnState"}}, "OwnState has no state of each parameter"),
    "part": ({"task": "Parts", "fields": {"use": "part"}}, "the module 'head' is called without the model around it"),
    "uncalled": (
        {"task": "Parts", "fields": {"use": "uncalled"}},
        "for one micro-batch the loss does not call the model",
    ),
    "direct": ({"task": "Parts", "fields": {"use": "direct"}}, "the task's loss uses parameters directly"),
    "derivative": ({"task": "Parts", "fields": {"use": "derivative"}}, "one backward through the model for each"),
    "second-derivative": ({"task": "Parts", "fields": {"use": "meta"}}, "one backward through the model for each"),
    "functional-call": ({"task": "Parts", "fields": {"use": "functional"}}, "the parameter 'scale', but the model is"),
}

ON_THREE = (
    "everything",
    "in-blocks",
    "two-optimizers",
    "fp16",
    "few-samples",
    "metrics",
    "best",
    "frozen",
    *OTHER,
)
HYBRID = ("in-blocks", "fp16", "average", "frozen", "uneven-stream", "fast")


@pytest.fixture(scope="module")
def worlds(start_trainings: Any) -> dict[int, Any]:
    """The same jobs on each number of ranks; one rank is no world to shard over, and four are two by two."""
    jobs = EXACT | OTHER
    names = {1: list(jobs), 2: list(jobs), 3: ON_THREE, 4: HYBRID}
    return {
        ranks: start_trainings({name: with_options(jobs[name], ranks) for name in chosen}, ranks=ranks)
        for ranks, chosen in names.items()
    }


def with_options(job: dict[str, Any], ranks: int) -> dict[str, Any]:
    options = job.get("options", {})
    if ranks == 1:
        options = {name: value for name, value in options.items() if not name.startswith("fsdp")}
    else:
        options = options | ({"mesh": "dp=2,fsdp=2"} if ranks == 4 else {"strategy": "fsdp"})
    return {**job, "options": options}


@pytest.fixture(scope="module")
def refused(start_trainings: Any) -> Any:
    return start_trainings(
        {name: {**job, "options": {"strategy": "fsdp"}} for name, (job, _) in REFUSED.items()}, ranks=2
    )


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_sharded_is_refused(refused: Any, name: str) -> None:
    assert refused[name]["error"] in ("ConfigError", "TaskError")
    assert REFUSED[name][1] in refused[name]["message"]
    assert re.search("[Uu]se --strategy (zero1|ddp)", refused[name]["message"])


@pytest.mark.parametrize("name", EXACT)
def test_the_bits_are_those_of_one_process(worlds: dict[int, Any], name: str) -> None:
    alone = worlds[1][name]
    assert "error" not in alone
    for ranks in (2, 3) if name in ON_THREE else (2,):
        sharded = worlds[ranks][name]
        assert sharded.get("strategy") == "fsdp", sharded
        for what in ("model_sha256", "metrics", "steps", "samples", "best_step"):
            assert sharded[what] == alone[what], what


@pytest.mark.parametrize("name", [name for name in HYBRID if name in EXACT])
def test_replicas_of_a_sharded_model_have_the_bits_of_one_process(worlds: dict[int, Any], name: str) -> None:
    assert worlds[4][name].get("strategy") == "dp=2,fsdp=2", worlds[4][name]
    for what in ("model_sha256", "metrics", "steps", "samples"):
        assert worlds[4][name][what] == worlds[1][name][what], what


@pytest.mark.parametrize("name", OTHER)
def test_what_is_summed_in_another_order_is_close(worlds: dict[int, Any], name: str) -> None:
    several = [ranks for ranks in (2, 3, 4) if ranks != 4 or name in HYBRID]
    for ranks in (1, *several):
        assert "error" not in worlds[ranks][name], worlds[ranks][name]
    alone = weights(worlds[1].run(name))
    for ranks in several:
        for parameter, value in weights(worlds[ranks].run(name)).items():
            torch.testing.assert_close(value, alone[parameter], rtol=1e-4, atol=1e-5)


def test_the_audit_is_clean(worlds: dict[int, Any], run_processes: Any) -> None:
    worlds[3].results()
    done = run_processes.paceline("audit", worlds[3].run("everything"))
    assert done.returncode == 0, done.stdout


def test_a_checkpoint_is_that_of_one_process(worlds: dict[int, Any]) -> None:
    for ranks in (1, 2):
        worlds[ranks].results()
    alone, sharded = (newest(worlds[ranks].run("two-optimizers")) for ranks in (1, 2))
    assert alone["optimizers"].keys() == sharded["optimizers"].keys()
    for name, optimizer in alone["optimizers"].items():
        for parameter, values in optimizer["state"].items():
            for key, value in values.items():
                other = sharded["optimizers"][name]["state"][parameter][key]
                assert torch.equal(torch.as_tensor(other), torch.as_tensor(value)), (name, parameter, key)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_goes_from_strategy_to_strategy(start_trainings: Any, tmp_path: Path) -> None:
    def train(run: str, ranks: int, stop_at: int = 0, **options: Any) -> dict[str, Any]:
        options |= {"run_dir": str(tmp_path / run), "max_steps": 16, "seed": 3}
        job = {"task": "Everything", "options": options, "stop_at": stop_at}
        return start_trainings({"job": job}, ranks=ranks)["job"]

    whole = train("whole", 1)
    assert train("moved", 2, 20, strategy="fsdp")["error"] == "StopRequested"
    assert train("moved", 2, 20, strategy="ddp")["error"] == "StopRequested"
    assert train("moved", 3, strategy="fsdp", fsdp_wrap="8")["model_sha256"] == whole["model_sha256"]


def test_which_modules_are_blocks() -> None:
    model = nn.Sequential(
        nn.Linear(10, 10), nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 10)), nn.Linear(10, 2)
    )
    assert wrap_units(model, "whole") == []
    assert wrap_units(model, "100") == [model[0], model[1][0], model[1][2]]
    # 110 below, 220 and 210 together in the middle.
    assert wrap_units(model, "300") == [model[1]]
    assert wrap_units(model, "1M") == []
    assert wrap_units(model, "Linear") == [model[2], model[1][2], model[1][0], model[0]]
    with pytest.raises(ConfigError, match=r"has no module of class Conv2d\. It has: Linear, ReLU, Sequential"):
        wrap_units(model, "Conv2d")


def test_no_part_of_a_block_is_a_unit_by_default() -> None:
    large = [nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1000)) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(1000, 1000), nn.Sequential(*large), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    assert model_blocks(model) == [*large, model[2]]
    assert wrap_units(model, "auto") == [model[0], *large]
    assert wrap_units(model, "1M")[:3] == [model[0], large[0][0], large[0][1]]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of Dynamo
def test_a_block_of_a_model_is_compiled_with_its_own_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2)))
    compiled = compile_model(copy.deepcopy(plain))
    assert list(compiled.state_dict()) == list(plain.state_dict())
    again = copy.deepcopy(compiled)
    for parameter in compiled.parameters():
        nn.init.zeros_(parameter)
    points = torch.randn(2, 3)
    assert torch.equal(again(points), plain(points))
    assert not compiled(points).any()


def test_what_shares_a_parameter_is_gathered_together() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Sequential(nn.Linear(4, 10), nn.Linear(4, 10)), nn.Linear(4, 10))
    model[2].weight = model[0].weight
    assert exclude_tied(model, wrap_units(model, "40")) == [model[1][0], model[1][1]]
    model[1][1].weight = model[1][0].weight  # both are in one block
    assert exclude_tied(model, wrap_units(model, "Linear,Sequential")) == [model[1]]


def test_what_shares_a_module_is_gathered_around_it() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(nn.Sequential(shared, nn.Linear(4, 4)), nn.Sequential(shared, nn.Linear(4, 4)))
    assert exclude_tied(model, [shared]) == [shared]
    assert exclude_tied(model, [shared, *model]) == [shared, *model]
    assert exclude_tied(model, model) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--nproc", "1"), "--strategy fsdp shards a model over processes, but there is only one"),
        (("--nproc", "2", "--compile"), "--compile compiles a model's blocks, but --strategy fsdp finds none"),
        (("--nproc", "2", "--fsdp-mixed-precision"), "--fsdp-mixed-precision needs --precision bf16 or fp16"),
        (("--nproc", "2", "--reduction", "ddp"), "With --strategy fsdp use exact or allreduce"),
        (("--nproc", "2", "--fsdp-wrap", "Block"), "the model has no module of class Block. It has: "),
        (("--nproc", "2", "--recover", "inplace"), "--recover inplace does not work with --strategy fsdp"),
    ],
)
def test_bad_input(run_processes: Any, tasks_file: Path, options: tuple[str, ...], message: str) -> None:
    done = run_processes.paceline("train", f"{tasks_file}:Points", "--strategy", "fsdp", "--quiet", *options)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert done.stderr.count(message) == 1


def weights(run: Path) -> dict[str, torch.Tensor]:
    return {name: value for name, value in newest(run)["model"].items() if value.is_floating_point()}
