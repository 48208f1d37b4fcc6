"""Schedules, splits and blocks by themselves: no processes, no training."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from tests.training.model_tasks import Skips
from torch import nn
from torch.nn import functional

from paceline.core.errors import ConfigError, RunDirectoryError, TaskError
from paceline.core.task import Loss
from paceline.parallel.pipeline import schedules
from paceline.parallel.pipeline.channel import pack, unpack
from paceline.parallel.pipeline.pipeline import backward_of_inputs, backward_of_weights
from paceline.parallel.pipeline.schedules import (
    CHUNKS,
    Name,
    ScheduleAction,
    build_schedules,
    max_in_flight,
    timeline,
)
from paceline.parallel.pipeline.stage_split import (
    BlockCost,
    balanced_split,
    equal_split,
    manual_split,
    measure,
    require_blocks,
)
from paceline.parallel.pipeline.stages import absent_arguments, find_blocks
from paceline_pages.runs_pipeline import bubble_fraction, pipeline
from paceline_tasks.transformer import Transformer

GIB = 2**30
SLOTS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def bubble(name: Name, ranks: int, microbatches: int) -> float:
    """With forwards of one slot and backwards of two, for a rank's whole part of the model."""
    plan = build_schedules(name, ranks, microbatches)
    return bubble_fraction(timeline(plan, lambda action: SLOTS[action.kind] / CHUNKS[name]))


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (2, 8), (3, 12), (4, 4), (4, 16), (8, 32)])
def test_the_bubble_is_as_the_theory_says(ranks: int, microbatches: int) -> None:
    plain = (ranks - 1) / (microbatches + ranks - 1)
    for name in ("gpipe", "1f1b"):
        assert bubble(cast(Name, name), ranks, microbatches) == pytest.approx(plain)
    interleaved = (ranks - 1) / (2 * microbatches + ranks - 1)
    assert bubble("interleaved", ranks, microbatches) == pytest.approx(interleaved)
    assert bubble("zero-bubble", ranks, microbatches) < plain
    assert bubble("sequential", ranks, microbatches) == pytest.approx(1 - 1 / ranks)


@pytest.mark.parametrize("name", CHUNKS)
def test_every_schedule_runs_for_any_number_of_microbatches(name: Name) -> None:
    for ranks in (2, 3, 4, 5):
        for microbatches in (0, 1, 2, 3, 5, 7, 12):
            plan = build_schedules(name, ranks, microbatches)
            timeline(plan, lambda _: 1.0)  # comes to an end
            done = sorted(action for actions in plan for action in actions)
            halves = ("F", "I", "W") if name == "zero-bubble" else ("F", "B")
            stages = range(ranks * CHUNKS[name])
            numbers = range(microbatches)
            assert done == sorted(ScheduleAction(kind, s, k) for kind in halves for s in stages for k in numbers)
            for actions in plan:
                for kind in ("B", "I", "W"):
                    for stage in stages:
                        # Gradients are summed along the tree in this order.
                        ks = [a.microbatch for a in actions if (a.kind, a.stage) == (kind, stage)]
                        assert ks == sorted(ks)


def test_1f1b_keeps_fewer_microbatches_than_gpipe() -> None:
    assert max_in_flight(build_schedules("gpipe", 4, 12)) == dict.fromkeys(range(4), 12)
    assert max_in_flight(build_schedules("1f1b", 4, 12)) == {0: 4, 1: 3, 2: 2, 3: 1}
    assert max(max_in_flight(build_schedules("zero-bubble", 4, 12)).values()) == 4


def costs(*seconds: float, nbytes: int = 0) -> list[BlockCost]:
    return [BlockCost(s / 3, 2 * s / 3, nbytes, nbytes) for s in seconds]


def test_the_slowest_stage_is_as_fast_as_can_be() -> None:
    assert balanced_split(costs(1, 1, 1, 1, 8), 2) == (4, 1)
    assert equal_split(5, 2) == (2, 3)
    assert balanced_split(costs(5, 1, 1, 1, 1, 1), 3) == (1, 2, 3)
    # Each of these takes 5 GiB with one micro-batch in flight, and 6 with two.
    blocks = costs(1, 1, 1, 4, nbytes=GIB)
    assert balanced_split(blocks, 2) == (3, 1)
    assert balanced_split(blocks, 2, limit_bytes=12 * GIB) == (2, 2)
    with pytest.raises(ConfigError, match=r"largest stage needs 12\.0 GiB of 11\.0 GiB\. Use more stages"):
        balanced_split(blocks, 2, in_flight=[2, 1], limit_bytes=11 * GIB)


def test_blocks_are_found_with_what_goes_between_them() -> None:
    found = find_blocks(Skips(), None)
    assert [block.name for block in found.blocks] == ["first", "blocks.0.0", "blocks.1.0", "scale", "last"]
    assert [found.crossing(cut) for cut in (0, 1, 5)] == [(), ("first",), ("last",)]
    assert "first" in found.crossing(3)  # the residual of the start
    masked = torch.ones(4, 1)
    with pytest.raises(TaskError, match="called both with and without mask"):
        found.bind(torch.ones(4, 12))
    assert absent_arguments(Skips(), lambda model: model(masked)) == {"mask"}
    bare = find_blocks(Skips(), None, frozenset({"mask"}))
    assert "mask" not in bare.bind(masked)
    ordinary = find_blocks(Transformer(layers=2, width=16, heads=2).build_model(), None)
    names = ["token_embedding", "position_embedding", "blocks.0", "blocks.1", "norm", "head"]
    assert [block.name for block in ordinary.blocks] == names


def test_measuring_changes_nothing() -> None:
    wide, narrow = nn.Linear(64, 2048), nn.Linear(2048, 64)
    model = nn.Sequential(nn.Linear(64, 64), wide, nn.BatchNorm1d(2048), narrow, nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.random.get_rng_state()
    data = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))

    def trial(module: nn.Module) -> Loss:
        return Loss(module(data).square().sum(), 64.0)

    found = find_blocks(model, None)
    measured = measure(found, model, torch.device("cpu"), trial)
    assert len(measured) == 4
    assert all(cost.forward_s > 0 and cost.backward_s > 0 for cost in measured)
    assert measured[1].parameter_bytes == 4 * (64 * 2048 + 2048)
    assert measured[0].activation_bytes >= 4 * 64 * 64
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), random)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if x.sum() > 0 else x


class TrainingOnly(Branching):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(self.layer(x), 0.1, training=self.training)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.middle = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))


def test_what_cannot_be_cut_says_why() -> None:
    for model, why in ((Branching(), "control flow"), (TrainingOnly(), "differs between training and evaluation")):
        with pytest.raises(
            TaskError, match=rf"{type(model).__name__} cannot be split into blocks.*{why}.*pipeline_blocks"
        ):
            find_blocks(model, None)
    shared = find_blocks(Twice(), None)
    with pytest.raises(
        ConfigError, match=r"has 1 block\(s\), too few for 2 stages.*first\.weight \(in first and last\)"
    ):
        require_blocks(shared, 2)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="Use 3 stages at most"):
        require_blocks(find_blocks(model, None), 4)
    with pytest.raises(ConfigError, match=r"Give 2 numbers that add up to 3, such as 1,2, or balanced"):
        manual_split(find_blocks(model, None), 2, (2, 2))
    assert manual_split(find_blocks(model, None), 2, (2, 1)) == (2, 1)
    with pytest.raises(TaskError, match="part 0 of pipeline_blocks is a int; it must be a module"):
        find_blocks(model, [3])
    with pytest.raises(TaskError, match="uses a parameter that is not one of the model's"):
        find_blocks(model, [nn.Linear(2, 2)])


class Pair(NamedTuple):
    left: torch.Tensor
    right: str


@dataclass
class Named(OrderedDict[str, Any]):
    """As Hugging Face's ModelOutput: its items are the fields that are not None."""

    logits: torch.Tensor | None = None
    hidden: tuple[torch.Tensor, ...] | None = None

    def __post_init__(self) -> None:
        self.update({name: value for name, value in vars(self).items() if value is not None})


def test_a_result_goes_to_other_ranks_as_what_it_is() -> None:
    one, two = torch.arange(3), torch.ones(2)
    result = {"a": [one, None, 2], 3: Pair(two, "text"), "b": Named(hidden=(one, two)), "c": (True, 1.5)}
    values = pack(result)
    assert len(values) == 1 + 8
    rest = iter([*values, "of the next result"])
    found = unpack(rest)
    assert list(rest) == ["of the next result"]
    assert list(found) == ["a", 3, "b", "c"]
    assert found["a"] == [one, None, 2]
    assert isinstance(found[3], Pair)
    assert (found[3].left is two, found[3].right) == (True, "text")
    assert isinstance(found["b"], Named)
    assert (found["b"].logits, list(found["b"])) == (None, ["hidden"])
    assert found["b"].hidden == (one, two)
    assert found["c"] == (True, 1.5)


def test_what_is_no_plain_result_is_refused() -> None:
    with pytest.raises(TaskError, match=r"the model returns a set, .* Have the model return those\."):
        pack({"a": {1, 2}})
    for name in ("builtins:eval", "os:system", "subprocess:Popen", "nowhere:Pair"):
        content = json.dumps([name, []]).encode()
        with pytest.raises(TaskError, match="not every rank of the pipeline has imported"):
            unpack(iter([torch.frombuffer(bytearray(content), dtype=torch.uint8)]))


def test_a_backward_in_two_halves_is_the_whole() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 3))
    weights = list(model.parameters())
    given = torch.randn(7, 4)
    whole, halves = given.clone().requires_grad_(), given.clone().requires_grad_()
    root = model(whole).square().sum()
    root.backward()
    expected = [weight.grad for weight in weights]
    model.zero_grad()
    root = model(halves).square().sum()
    groups = backward_of_inputs([root], [torch.ones_like(root)], [halves], weights, check=True)
    assert all(weight.grad is None for weight in weights)
    assert whole.grad is not None
    assert halves.grad is not None
    assert torch.equal(halves.grad, whole.grad)
    backward_of_weights(weights, groups)
    for weight, gradient in zip(weights, expected, strict=True):
        assert weight.grad is not None
        assert gradient is not None
        assert torch.equal(weight.grad, gradient)
    # One that no path joins to the input would be left out.
    lone = nn.Parameter(torch.ones(2))
    roots = [halves.sum() * 2, lone.sum()]
    with pytest.raises(TaskError, match="zero-bubble cannot split"):
        backward_of_inputs(roots, [torch.ones(())] * 2, [halves], [lone], check=True)


def test_a_step_is_counted_and_drawn(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(RunDirectoryError, match=r"there is no .*pipeline\.json: the run uses no pipeline"):
        pipeline(tmp_path)
    timed = timeline(build_schedules("1f1b", 2, 4), lambda action: SLOTS[action.kind] * 1e-3)
    rows = [[[*t.action, t.begin, t.end] for t in of_rank] for of_rank in timed]
    schedules.write(tmp_path / schedules.FILE, "1f1b", 8, rows)
    assert pipeline(tmp_path, json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["microbatches"] == 4
    assert told["idle"] == pytest.approx(0.2)
    assert told["counted"]["1f1b"] == pytest.approx(0.2)
    assert told["counted"]["interleaved"] == pytest.approx(1 / 9)
    assert told["counted"]["zero-bubble"] < told["counted"]["interleaved"]
    assert pipeline(tmp_path, svg=tmp_path / "step.svg") == 0
    assert "idle: 20.0% measured, 20.0% computed" in capsys.readouterr().out
    drawn = (tmp_path / "step.svg").read_text()
    assert drawn.count("<title>") == 16
    (tmp_path / schedules.FILE).write_text("{}")
    with pytest.raises(RunDirectoryError, match=r"pipeline\.json is damaged"):
        pipeline(tmp_path)
