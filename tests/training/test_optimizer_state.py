"""The state of optimizers by names: any order of parameters, any process, checkpoints of the format before."""

from __future__ import annotations

import copy
import json
import shutil
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.states import newest
from torch import nn
from torch.optim import SGD, AdamW

from paceline.core.errors import TaskError
from paceline.runs.checkpoint_manifest import read_manifest
from paceline.runs.checkpoint_store import scan
from paceline.runs.checkpointer import load
from paceline.training.optim import (
    describe_difference,
    group_names,
    named_state,
    numbered_state,
    require_shapes,
    sort_parameters,
)

pytestmark = pytest.mark.matrix

FORMAT_1 = Path(__file__).with_name("format1")
EXPECTED: dict[str, dict[str, Any]] = json.loads((FORMAT_1 / "expected.json").read_text())
STEPS, SAVED = 6, 3


# --- a run that was killed after three steps


def interrupted(run: Path, copy_as: Path) -> Path:
    """Copy a run as it was when its first checkpoint was committed."""
    shutil.copytree(run, copy_as, symlinks=True)
    (copy_as / "result.json").unlink()
    for checkpoint in scan(copy_as / "checkpoints"):
        if not checkpoint.name.startswith(f"step-{SAVED:08d}-"):
            shutil.rmtree(checkpoint)
    return copy_as


def job(fields: dict[str, Any], task: str = "Shuffled", **options: Any) -> dict[str, Any]:
    common = {"max_steps": STEPS, "checkpoint_every": [f"{SAVED}steps"], "eval_every": "never", "seed": 3}
    return {"task": task, "fields": fields, "options": {**common, **options}}


LOCAL = {"local_sgd_steps": 3, "outer_optimizer": "nesterov"}
REFERENCES = {
    "plain": job({"order": "model"}),
    "two": job({"order": "model", "optimizer": "two", "scheduled": True}),
    "groups": job({"order": "model", "optimizer": "groups"}, lr_scale=["2=3"]),
    "tied": job({"order": "model", "tied": True}),
    "skipping": job({"order": "model", "optimizer": "skipping"}),
    "rows": job({"order": "model", "optimizer": "adafactor"}),
}
SHUFFLED: dict[str, tuple[int, dict[str, Any]]] = {
    "plain-single": (1, job({})),
    "plain-set": (1, job({"order": "set"})),
    "plain-pp": (2, job({}, strategy="pp")),
    "plain-ps": (3, job({}, strategy="ps", ps_servers=2)),
    "two-zero1": (2, job({"optimizer": "two", "scheduled": True}, strategy="zero1")),
    "two-fsdp": (2, job({"optimizer": "two", "scheduled": True}, strategy="fsdp")),
    "groups-fsdp": (2, job({"optimizer": "groups"}, strategy="fsdp", lr_scale=["2=3"])),
    "groups-zero1": (2, job({"optimizer": "groups"}, strategy="zero1", lr_scale=["2=3"])),
    "tied-ddp": (2, job({"tied": True}, strategy="ddp")),
    "tied-zero1": (3, job({"tied": True}, strategy="zero1")),
    "skipping-single": (1, job({"optimizer": "skipping"})),
    "skipping-zero1": (3, job({"optimizer": "skipping"}, strategy="zero1")),
    "skipping-fsdp": (2, job({"optimizer": "skipping"}, strategy="fsdp")),
    "skipping-pp": (2, job({"optimizer": "skipping"}, strategy="pp")),
    "skipping-ps": (3, job({"optimizer": "skipping"}, strategy="ps", ps_servers=2)),
    "rows-zero1": (2, job({"optimizer": "adafactor"}, strategy="zero1")),
    "local-sgd": (2, job({}, **LOCAL)),
}
CONTINUED_AS = {
    "plain-single": "plain-ps",
    "plain-set": "plain-pp",
    "plain-pp": "plain-single",
    "plain-ps": "plain-set",
    "two-zero1": "two-fsdp",
    "two-fsdp": "two-zero1",
    "groups-fsdp": "groups-zero1",
    "groups-zero1": "groups-fsdp",
    "tied-ddp": "tied-zero1",
    "tied-zero1": "tied-ddp",
    "skipping-single": "skipping-zero1",
    "skipping-zero1": "skipping-fsdp",
    "skipping-fsdp": "skipping-pp",
    "skipping-pp": "skipping-ps",
    "skipping-ps": "skipping-single",
    "rows-zero1": "rows-zero1",
    "local-sgd": "local-sgd",
}


@pytest.fixture(scope="module")
def trained(start_trainings: Any) -> Callable[[str], tuple[dict[str, Any], Path]]:
    """The result and the run of a job above."""
    worlds = [
        start_trainings({n: j for n, (r, j) in SHUFFLED.items() if r == ranks} | more, ranks=ranks)
        for ranks, more in ((1, REFERENCES), (2, {"local": job({"order": "model"}, **LOCAL)}), (3, {}))
    ]

    def find(name: str) -> tuple[dict[str, Any], Path]:
        world = next(world for world in worlds if name in world.results())
        return world[name], world.run(name)

    return find


@pytest.fixture(scope="module")
def continued(start_trainings: Any, trained: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each job comes to that another world, with another order, continues after three steps."""
    folder = tmp_path_factory.mktemp("continued")
    jobs: dict[int, dict[str, Any]] = {1: {}, 2: {}, 3: {}}
    for name, other in CONTINUED_AS.items():
        ranks, wanted = SHUFFLED[other]
        path = str(interrupted(trained(name)[1], folder / name))
        jobs[ranks][name] = {**SHUFFLED[name][1], "options": {**wanted["options"], "run_dir": path}}
    worlds = [start_trainings(of_ranks, ranks=ranks) for ranks, of_ranks in jobs.items()]
    return {name: result for world in worlds for name, result in world.results().items()}


@pytest.mark.integration
@pytest.mark.parametrize("name", SHUFFLED)
def test_the_order_in_an_optimizer_changes_no_bits(trained: Any, name: str) -> None:
    assert trained(name)[0]["model_sha256"] == trained(name.partition("-")[0])[0]["model_sha256"], trained(name)[0]


@pytest.mark.integration
@pytest.mark.parametrize("name", CONTINUED_AS)
def test_another_order_continues_a_run(trained: Any, continued: dict[str, Any], name: str) -> None:
    result = continued[name]
    assert result.get("restarts") == 1, result
    assert result["model_sha256"] == trained(name.partition("-")[0])[0]["model_sha256"]


@pytest.mark.integration
@pytest.mark.parametrize("name", SHUFFLED)
def test_a_checkpoint_is_that_of_one_ordered_process(trained: Any, name: str) -> None:
    def first(run: Path) -> tuple[Any, str]:
        path = scan(run / "checkpoints")[-1]
        skeleton = json.loads((path / "state.json").read_text())["optimizers"]
        return load(path).state["optimizers"], json.dumps(skeleton)

    found, skeleton = first(trained(name)[1])
    expected, expected_skeleton = first(trained(name.partition("-")[0])[1])
    assert skeleton == expected_skeleton
    for optimizer, state in expected.items():
        for parameter, values in state["state"].items():
            for key, value in values.items():
                assert torch.equal(torch.as_tensor(found[optimizer]["state"][parameter][key]), torch.as_tensor(value))


@pytest.mark.integration
def test_a_parameter_without_a_state_has_none_in_the_checkpoint(trained: Any) -> None:
    state = load(scan(trained("skipping")[1] / "checkpoints")[-1]).state["optimizers"]["main"]
    names = ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"]
    assert state["param_groups"][0]["params"] == names
    assert [*state["state"]] == names[:-1]


@pytest.mark.integration
def test_the_names_of_a_tied_parameter_and_of_the_outer_optimizer(trained: Any) -> None:
    tied = newest(trained("tied")[1])["optimizers"]["main"]
    assert [*tied["state"]] == ["0.weight", "0.bias", "2.weight", "2.bias", "4.bias"]
    outer = newest(trained("local")[1])["outer"]
    assert [*outer["state"]][-2:] == ["4.weight", "4.bias"]


# --- commands: a fork, another hash seed, a lost rank, groups that differ


TRAIN = ("--max-steps", str(STEPS), "--checkpoint-every", f"{SAVED}steps", "--eval-every", "never", "--seed", "3")
QUIET = ("--threads", "1", "--device", "cpu", "--quiet", "--json")
ORDER = "tests.training.order_tasks"


@pytest.fixture
def paceline(run_processes: Any, tests_importable: dict[str, str]) -> Callable[..., dict[str, Any]]:
    def run(*words: str | Path, **variables: str) -> dict[str, Any]:
        done = run_processes.paceline(*words, env={**tests_importable, **variables})
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout.splitlines()[-1])) if "--json" in words else {}

    return run


def test_a_fork_has_other_options_and_the_same_moments(paceline: Any, tmp_path: Path) -> None:
    forked = {}
    for order in ("model", "shuffled"):
        paceline("train", f"{ORDER}:Shuffled", *TRAIN, *QUIET, "--set", f"order={order}", "--run-dir", order)
        fork = ("--step", str(SAVED), "--set", "factor=2", "--run-dir", f"{order}-fork")
        paceline("fork", order, *fork)
        forked[order] = paceline("resume", f"{order}-fork", "--quiet", "--json")
    assert forked["model"]["model_sha256"] == forked["shuffled"]["model_sha256"]


@pytest.mark.cold
def test_the_seed_of_the_hashes_does_not_matter(paceline: Any, tmp_path: Path) -> None:
    words = (f"{ORDER}:Shuffled", *TRAIN, *QUIET, "--set", "order=names")
    whole = paceline("train", *words, "--run-dir", "run", PYTHONHASHSEED="1")
    interrupted(tmp_path / "run", tmp_path / "again")
    assert paceline("resume", "again", *QUIET, PYTHONHASHSEED="2")["model_sha256"] == whole["model_sha256"]


def test_a_replacement_takes_the_state_over_in_another_order(paceline: Any, tmp_path: Path) -> None:
    words = ("train", f"{ORDER}:Shuffled", *TRAIN, *QUIET)
    undisturbed = paceline(*words, "--set", "order=model", "--run-dir", "undisturbed")
    killed = f"killed={tmp_path / 'killed'}"
    disturbed = paceline(*words, "--set", killed, "--nproc", "2", "--run-dir", "disturbed")
    assert (disturbed["recoveries"], disturbed["restarts"]) == (1, 0)
    assert disturbed["model_sha256"] == undisturbed["model_sha256"]


def test_groups_that_differ_between_ranks_are_refused(run_processes: Any, tests_importable: dict[str, str]) -> None:
    words = (
        "train",
        f"{ORDER}:GroupsOfRanks",
        *TRAIN,
        *QUIET,
        "--strategy",
        "fsdp",
        "--nproc",
        "2",
        "--run-dir",
        "run",
    )
    done = run_processes.paceline(*words, env=tests_importable)
    assert done.returncode == 2, done.stderr
    told = "rank 0 has '0.weight', and rank 1 has not, in group 0 of the optimizer 'main'. Make groups and optimizers"
    assert told in done.stderr


# --- checkpoints of format 1


@pytest.fixture
def old_run(run_processes: Any, tmp_path: Path) -> Callable[[str], Path]:
    """Copy a run that the format before has written."""

    def take(name: str) -> Path:
        return Path(shutil.copytree(FORMAT_1 / name, tmp_path / name))

    return take


@pytest.mark.parametrize("name", EXPECTED)
def test_a_run_of_format_1_continues_to_the_same_model(run_processes: Any, old_run: Any, name: str) -> None:
    run, expected = old_run(name), EXPECTED[name]
    command = [sys.executable, "-m", "paceline", "resume", run, "--quiet", "--json"]
    done = run_processes.run(command, cwd=FORMAT_1)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "started"] == [SAVED]
    weights = newest(run)["model"]
    for key, values in expected["weights"].items():
        torch.testing.assert_close(weights[key].flatten(), torch.tensor(values), rtol=0, atol=1e-5)
    newest_path, oldest_path = (scan(run / "checkpoints")[index] for index in (0, -1))
    written = 3 if name == "fsdp" else 2  # in shards
    assert (read_manifest(newest_path).format, read_manifest(oldest_path).format) == (written, 1)
    assert all(
        isinstance(parameter, str)
        for optimizer in load(newest_path).state["optimizers"].values()
        for group in optimizer["param_groups"]
        for parameter in group["params"]
    )
    if read_manifest(newest_path).info.pins == read_manifest(oldest_path).info.pins:
        assert result["model_sha256"] == expected["model_sha256"]


def test_a_run_of_format_1_is_verified_forked_and_exported(run_processes: Any, old_run: Any, tmp_path: Path) -> None:
    def paceline(*words: str | Path) -> Any:
        registry = {"PACELINE_REGISTRY": str(tmp_path / "registry")}
        return run_processes.run([sys.executable, "-m", "paceline", *words], cwd=FORMAT_1, env=registry)

    run = old_run("groups")
    assert paceline("checkpoint", "verify", run).returncode == 0
    forked = paceline("fork", run, "--set", "factor=2", "--run-dir", tmp_path / "fork")
    assert forked.returncode == 0, forked.stderr
    assert read_manifest(scan(tmp_path / "fork" / "checkpoints")[0]).format == 1
    done = paceline("resume", tmp_path / "fork", "--quiet", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["model_sha256"] != EXPECTED["groups"]["model_sha256"]
    run_toml = run / "run.toml"
    run_toml.write_text(run_toml.read_text().replace("Square", "Exportable"))
    exported = paceline("export", run, "--format", "safetensors")
    assert exported.returncode == 0, exported.stderr


def test_a_run_of_format_1_that_was_numbered_in_another_order_is_refused(run_processes: Any, old_run: Any) -> None:
    run = old_run("reversed")
    text = (run / "run.toml").read_text()
    assert tomllib.loads(text)["task"]["fields"]["order"] == "reversed"
    (run / "run.toml").write_text(text.replace('order = "reversed"', 'order = "model"').replace("groups", "adamw"))
    done = run_processes.run([sys.executable, "-m", "paceline", "resume", run, "--quiet"], cwd=FORMAT_1)
    assert done.returncode != 0
    assert "the checkpoint does not fit the task" in done.stderr


# --- the parts


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def stepped(order: tuple[int, ...]) -> tuple[nn.Module, AdamW]:
    module = model()
    parameters = [*module.parameters()]
    optimizer = AdamW([parameters[number] for number in order], lr=0.1)
    sort_parameters("main", optimizer, module)
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
    return module, optimizer


def test_a_state_goes_by_names_and_back() -> None:
    module, optimizer = stepped((2, 0, 3, 1))
    names = group_names(optimizer, module)
    assert names == [["0.weight", "0.bias", "1.weight", "1.bias"]]
    state = named_state(optimizer.state_dict(), names)
    assert [*state["state"]] == names[0]
    assert float(state["state"]["1.weight"]["exp_avg"].mean()) == pytest.approx(0.3)
    assert numbered_state("main", state, names) == optimizer.state_dict()
    del state["state"]["0.bias"]
    assert [*numbered_state("main", state, names)["state"]] == [0, 2, 3]


def test_a_list_that_an_optimizer_keeps_is_sorted_as_well() -> None:
    module = model()
    named = [*module.named_parameters()][::-1]
    optimizer = SGD([{"params": named[:2]}, {"params": named[2:], "lr": 0.5}], lr=0.1)
    kept = optimizer.param_groups[0]["params"]
    sort_parameters("main", optimizer, module)
    assert optimizer.param_groups[0]["params"] is kept
    assert [group["param_names"] for group in optimizer.param_groups] == group_names(optimizer, module)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]


def test_entries_of_no_parameter_and_states_of_other_forms_stay() -> None:
    module, optimizer = stepped((0, 1, 2, 3))
    names = group_names(optimizer, module)
    state = optimizer.state_dict()
    state["state"]["rounds"] = 3
    named = named_state(state, names)
    assert named["state"]["rounds"] == 3
    assert numbered_state("main", named, names)["state"]["rounds"] == 3
    own = {"inner": 1}
    assert named_state(own, names) == numbered_state("main", own, names) == own


def test_a_parameter_that_the_model_lacks_is_refused() -> None:
    module = model()
    optimizer = SGD([{"params": [*module.parameters()]}, {"params": [nn.Parameter(torch.ones(2, 5))]}], lr=0.1)
    with pytest.raises(
        TaskError, match=r"gives group 1 of the optimizer 'main' a parameter of shape \(2, 5\) that the"
    ):
        sort_parameters("main", optimizer, module)


def test_the_first_parameter_that_differs_is_named() -> None:
    module, optimizer = stepped((0, 1, 2, 3))
    names = group_names(optimizer, module)
    state = named_state(optimizer.state_dict(), names)
    for now, message in (
        ([names[0][:-1]], "the checkpoint has '1.bias', and the task has not, in group 0 of the optimizer 'main'"),
        ([[*names[0], "2.bias"]], "the task has '2.bias', and the checkpoint has not, in group 0"),
        ([names[0][:2], names[0][2:]], "the checkpoint has '1.weight', and the task has not, in group 0"),
        ([names[0], []], "the checkpoint has 1 groups, and the task has 2, of the optimizer 'main'"),
    ):
        with pytest.raises(ValueError, match=message):
            numbered_state("main", state, now)
    assert describe_difference(names, [names[0][::-1]], "here", "there") is None


def test_numbers_of_another_order_are_found_by_the_shapes() -> None:
    module, optimizer = stepped((0, 1, 2, 3))
    saved, weights = optimizer.state_dict(), module.state_dict()
    right = [["0.weight", "0.bias", "1.weight", "1.bias"]]
    require_shapes(named_state(saved, right), weights)
    with pytest.raises(ValueError, match=r"exp_avg of '1.weight' has the shape \(3, 2\), not \(1, 3\)"):
        require_shapes(named_state(saved, [["1.weight", "0.bias", "0.weight", "1.bias"]]), weights)
    with pytest.raises(ValueError, match="groups have 4 parameters, the task's have 2, 2"):
        named_state(saved, [right[0][:2], right[0][2:]])
    rows = copy.deepcopy(named_state(saved, right))
    for values in rows["state"].values():
        values["exp_avg"] = values["exp_avg"].sum()  # a shape of its own
    require_shapes(rows, weights)
