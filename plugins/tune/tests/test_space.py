"""``--search`` and ``--constraint``: what parses, what is refused, and what is drawn."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError, UserError
from paceline.core.task import Task
from paceline.core.task_loading import load_task_class
from paceline_tune.plan_search import resolve_space
from paceline_tune.search import Search
from paceline_tune.space import parse_space

TASK = f"{Path(__file__).parent / 'tasks.py'}:Line"
EVEN = TASK.replace(":Line", ":Even")


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


def test_whole_numbers_can_be_uniform_in_the_logarithm() -> None:
    space = parse_space(("n=log-int:1:64",), seed=0)
    drawn = [int(space.parameters(number)["n"] or 0) for number in range(1000)]
    assert (min(drawn), max(drawn)) == (1, 64)
    # Of the scale's log(64.5 / 0.5), 1 has log(1.5 / 0.5) and the numbers above 32 log(64.5 / 32.5).
    assert 160 < drawn.count(1) < 290
    assert 95 < sum(number > 32 for number in drawn) < 190


def test_a_dimension_applies_to_some_values_of_another() -> None:
    texts = ("opt=choice:sgd,adam,lion", "momentum=choice:0.5,0.9 if opt=sgd", "n=int:1:2", "b=choice:x,y if n=2")
    space = parse_space(texts, seed=0)
    configurations = [space.parameters(number) for number in range(space.size or 0)]
    # sgd has two momenta, each of the others one configuration, and n=2 two of each: not 3 * 2 * 2 * 2.
    assert len({tuple(each.items()) for each in configurations}) == len(configurations) == (2 + 1 + 1) * (1 + 2)
    assert all(("momentum" in each) == (each["opt"] == "sgd") for each in configurations)
    assert all(("b" in each) == (each["n"] == 2) for each in configurations)
    drawn = parse_space((*texts, "lr=log:1e-3:1 if opt=adam,lion"), seed=0)
    several = [drawn.parameters(number) for number in range(50)]
    assert all(("lr" in each) == (each["opt"] != "sgd") for each in several)
    assert {each["opt"] for each in several} == {"sgd", "adam", "lion"}


def test_constraints_hold_for_every_configuration() -> None:
    finite = parse_space(("w=int:1:8", "d=int:1:8"), seed=0, constraints=("w * d <= 8 and not w == 2", "w != d - 1"))
    allowed = {(w, d) for w in range(1, 9) for d in range(1, 9) if w * d <= 8 and w != 2 and w != d - 1}
    assert finite.size == len(allowed)
    assert {tuple(finite.parameters(number).values()) for number in range(finite.size)} == allowed
    texts = ("k=choice:a,b", "lr=log:1e-3:1", "m=uniform:0:1 if k=a")
    drawn = parse_space(texts, seed=0, constraints=("lr <= 0.1 * m",))
    several = [drawn.parameters(number) for number in range(40)]
    assert all(each["k"] == "b" or each["lr"] <= 0.1 * each["m"] for each in several)  # type: ignore[operator]
    assert {each["k"] for each in several} == {"a", "b"}
    with pytest.raises(ConfigError, match="none satisfies --constraint 'x > 2'"):
        parse_space(("x=uniform:0:1",), seed=0, constraints=("x > 2",)).parameters(0)
    with pytest.raises(ConfigError, match="no configuration satisfies"):
        parse_space(("x=int:0:1",), seed=0, constraints=("x > 2",)).parameters(0)
    with pytest.raises(ConfigError, match="cannot be computed"):
        parse_space(("x=choice:a,b",), seed=0, constraints=("x > 2",)).parameters(0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("n <", "cannot be read"),
        ("1 < 2", "cannot be read"),
        ("n.real > 1", "cannot be read"),
        ("n ** n ** n > 1", "cannot be read"),
        ("[m for m in n]", "cannot be read"),
        ("__import__('os').system('true')", "cannot be read"),
        ("n" + " + n" * 1000 + " < 3", "cannot be read"),
        ("m < 3", "m is not searched. The search has: n"),
    ],
)
def test_a_constraint_is_a_comparison_of_what_is_searched(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        parse_space(("n=int:1:2",), seed=0, constraints=(text,))


def test_a_constraint_multiplies_no_text() -> None:
    space = parse_space(("k=choice:a,b", "n=int:1000000000:1000000001"), seed=0, constraints=("k * n == k",))
    with pytest.raises(ConfigError, match="text can only be compared"):
        space.parameters(0)


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
        ("n=log-int:0:8", "start above 0"),
        ("n=int:1:8 if kind=tanh", "given before it"),
    ],
)
def test_what_does_not_parse_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_space((text,), seed=0)


def test_a_field_twice_and_conditions_that_never_hold_are_refused() -> None:
    with pytest.raises(ConfigError, match="lr twice"):
        parse_space(("lr=log:1:2", "lr=log:1:2"), seed=0)
    with pytest.raises(ConfigError, match="kind is never gelu"):
        parse_space(("kind=choice:tanh,relu", "lr=log:1:2 if kind=relu,gelu"), seed=0)
    with pytest.raises(ConfigError, match="choice or int dimension given before it"):
        parse_space(("lr=log:1:2", "kind=choice:tanh,relu if lr=1"), seed=0)


@pytest.mark.parametrize(
    ("texts", "fixed", "says"),
    [
        (("rate=log:1e-3:1",), (), "no field 'rate'. Its fields: lr, width, kind"),
        (("width=uniform:1:8",), (), "width is int. Search it with int, log-int or choice"),
        ((), (), "a search needs at least one field"),
        (("lr=choice:1,1.0",), (), "two of the choices are the same Line.lr"),
        (("nproc=choice:1,2",), (), "--nproc cannot be searched"),
        (("val_fraction=uniform:0.1:0.5",), (), "--val-fraction cannot be searched"),
        (("max_steps=choice:8,16",), (), "both set by --max-steps and searched"),
        (("precision=choice:fp32,fp8",), (), "--precision must be"),
        (("clip_norm=choice:0,1",), (), "--clip-norm must be positive"),
        (("epochs=uniform:1:2",), (), "Search it with int, log-int or choice"),
        (("width=choice:4,many",), (), "width must be int, but 'many'"),
        (("kind=int:1:3",), (), "Search it with choice"),
        (("kind=choice:tanh,gelu",), (), "'gelu' was given"),
        (("lr=log:1e-3:1",), ("lr=0.1",), "both set by --set and searched"),
    ],
)
def test_fields_decide_what_can_be_searched(texts: tuple[str, ...], fixed: tuple[str, ...], says: str) -> None:
    search = Search(options={"task": TASK, "set": fixed, "max_steps": 4}, space=texts, trials=4, metric="loss:min")
    with pytest.raises(UserError, match=says):
        resolve_space(load_task_class(TASK), search)


def test_fields_of_every_kind_can_be_searched() -> None:
    texts = ("lr=log:1e-3:1", "width=int:2:8", "kind=choice:tanh,relu", "with_val=choice:true,false")
    texts += ("fail_above=choice:1,2e3", "--global-batch-size=choice:24,48", "precision=choice:fp32,bf16")
    texts += ("clip_norm=choice:none,1", "mark=choice:1,true")
    search = Search(options={"task": TASK, "set": ["waits_at=0"]}, space=texts, trials=4, metric="loss:min")
    search = resolve_space(load_task_class(TASK), search)
    drawn = [search.parameters(number) for number in range(40)]
    values = {name: {each[name] for each in drawn} for name in drawn[0]}
    assert {name: values[name] for name in texts_of_choices(texts)} == {
        "kind": {"tanh", "relu"},
        "with_val": {True, False},
        "fail_above": {1.0, 2e3},
        "global_batch_size": {24, 48},
        "precision": {"fp32", "bf16"},
        "clip_norm": {None, 1.0},
        "mark": {"1", "true"},
    }
    assert {type(value) for value in values["width"] | values["global_batch_size"]} == {int}
    options = search.run_options(0, drawn[0])
    assert {name: options[name] for name in search.searched_options} == {
        name: drawn[0][name] for name in ("global_batch_size", "precision", "clip_norm")
    }
    fields = [f"{name}={value}" for name, value in drawn[0].items() if name not in search.searched_options]
    assert options["set"] == ["waits_at=0", *fields]
    assert json.loads(json.dumps(asdict(search)))["choices"]["with_val"] == [True, False]


@dataclass
class Net:
    width: int = 4


@dataclass
class Nested(Task):
    net: Net = field(default_factory=Net)


def test_a_field_of_a_nested_dataclass_can_be_searched() -> None:
    search = Search(options={"task": TASK}, space=("net.width=int:2:8",), trials=4, metric="loss:min")
    search = resolve_space(Nested, search)
    parameters = search.parameters(0)
    assert search.run_options(0, parameters)["set"] == [f"net.width={parameters['net.width']}"]
    with pytest.raises(UserError, match=r"net\.width is int\. Search it with int"):
        resolve_space(Nested, replace(search, space=("net.width=uniform:1:2",)))
    with pytest.raises(UserError, match="Net has no field 'depth'"):
        resolve_space(Nested, replace(search, space=("net.depth=int:1:2",)))


def texts_of_choices(texts: tuple[str, ...]) -> list[str]:
    """The names of the dimensions that are choices."""
    return [text.partition("=")[0].removeprefix("--").replace("-", "_") for text in texts if "=choice:" in text]


def test_a_task_can_declare_its_space_and_refuse_some_of_it() -> None:
    """That a task refuses a configuration is that configuration's failure; of the space it says nothing."""
    search = Search(options={"task": EVEN}, space=(), trials=4, metric="loss:min", constraints=("width > 2",))
    search = resolve_space(load_task_class(EVEN), search)
    assert search.space == ("width=int:2:8", "lr=log:1e-3:1")
    assert all(int(search.parameters(number)["width"] or 0) > 2 for number in range(20))
    own = resolve_space(load_task_class(EVEN), replace(search, space=("width=choice:3,5",)))
    assert own.space == ("width=choice:3,5",)


def test_repeats_have_the_same_parameters_and_seeds_of_their_own() -> None:
    search = Search(options={"task": TASK, "seed": 5}, space=("width=int:2:4",), trials=8, metric="loss:min", repeats=3)
    assert search.planned == 3 * 3
    assert replace(search, budget="5trials").planned == 5
    runs = [search.run_options(n, search.parameters(n)) for n in range(9)]
    assert [run["seed"] for run in runs] == [5, 6, 7] * 3
    assert all(runs[n]["set"] == runs[n - n % 3]["set"] for n in range(9))
    assert len({run["set"][0] for run in runs}) == 3
