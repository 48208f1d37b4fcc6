"""``--search``: what parses, what is refused, and what is drawn."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError, UserError
from paceline.core.task_loading import load_task_class
from paceline.tune.plan_search import check_fields
from paceline.tune.search import Search, parse_space

TASK = f"{Path(__file__).parent / 'tasks.py'}:Line"


def test_draws_depend_on_seed_and_number_alone() -> None:
    texts = ("lr=log:1e-3:1", "momentum=uniform:0.1:0.9")
    space = parse_space(texts, seed=3)
    drawn = [space.parameters(number) for number in range(200)]
    assert [parse_space(texts, seed=3).parameters(number) for number in (7, 3)] == [drawn[7], drawn[3]]
    assert parse_space(texts, seed=4).parameters(7) != drawn[7]
    lrs = [float(parameters["lr"]) for parameters in drawn]
    assert min(lrs) >= 1e-3
    assert max(lrs) <= 1
    # Uniform in the logarithm: about a third of the draws lie in each decade.
    decades = [math.floor(math.log10(lr)) for lr in lrs]
    assert all(40 <= decades.count(decade) <= 95 for decade in (-3, -2, -1))
    assert all(lr == float(f"{lr:.4g}") for lr in lrs)


def test_a_finite_space_has_each_combination_once() -> None:
    space = parse_space(("a=choice:x,y,z", "n=int:1:4"), seed=0)
    assert space.size == 12
    drawn = [tuple(space.parameters(number).values()) for number in range(12)]
    assert len(set(drawn)) == 12
    assert drawn != sorted(drawn)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lr", "NAME=log:LOW:HIGH"),
        ("lr=log", "two numbers"),
        ("lr=log:0:1", "start above 0"),
        ("lr=log:1:1e-3", "the lower one first"),
        ("lr=uniform:0.1:nan", "two numbers"),
        ("lr=uniform:0.1:x", "two numbers"),
        ("n=int:1.5:3", "two whole numbers"),
        ("n=choice:", "different values"),
        ("n=choice:1,1", "different values"),
        ("n=normal:0:1", "unknown kind 'normal'"),
        ("9=int:1:2", "NAME=log:LOW:HIGH"),
    ],
)
def test_what_does_not_parse_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_space((text,), seed=0)


def test_a_field_twice_and_nothing_at_all_are_refused() -> None:
    with pytest.raises(ConfigError, match="lr twice"):
        parse_space(("lr=log:1:2", "lr=log:1:2"), seed=0)
    with pytest.raises(ConfigError, match="a search needs at least one field"):
        parse_space((), seed=0)


@pytest.mark.parametrize(
    ("texts", "fixed", "says"),
    [
        (("rate=log:1e-3:1",), (), "no field 'rate'. Its fields: lr, width, kind"),
        (("width=uniform:1:8",), (), "width is int. Search it with int or choice"),
        (("width=choice:4,many",), (), "width must be int, but 'many'"),
        (("kind=int:1:3",), (), "Search it with choice"),
        (("kind=choice:tanh,gelu",), (), "'gelu' was given"),
        (("lr=log:1e-3:1",), ("lr=0.1",), "both set by --set and searched"),
    ],
)
def test_fields_decide_what_can_be_searched(texts: tuple[str, ...], fixed: tuple[str, ...], says: str) -> None:
    search = Search(options={"task": TASK, "set": fixed}, space=texts, trials=4, metric="loss:min")
    with pytest.raises(UserError, match=says):
        check_fields(load_task_class(TASK), search)


def test_fields_of_every_kind_can_be_searched() -> None:
    texts = ("lr=log:1e-3:1", "width=int:2:8", "kind=choice:tanh,relu", "with_val=choice:true,false")
    search = Search(options={"task": TASK}, space=texts, trials=4, metric="loss:min")
    task = check_fields(load_task_class(TASK), search)
    assert vars(task)["width"] == search.parsed_space.parameters(0)["width"]
