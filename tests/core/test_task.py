from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import tomli_w

from paceline.core.errors import TaskError
from paceline.core.files import parse_toml
from paceline.core.task import Task
from paceline.core.task_loading import (
    BUILT_IN_TASKS,
    TaskReference,
    build_task,
    field_type,
    is_same,
    load_task_class,
    parse_assignments,
    task_fields,
)

GOOD = """
from dataclasses import dataclass
import paceline

@dataclass
class Small(paceline.Task):
    lr: float = 0.1

@dataclass
class Large(Small):
    width: int = 64

class NoTask:
    pass
"""


@dataclass
class Kinds(Task):
    """A field of each kind that the command line knows."""

    number: float = 0.5
    count: int = 3
    name: str = "a"
    on: bool = False
    mode: Literal["fast", "slow", 3] = "fast"
    sizes: list[int] = field(default_factory=lambda: [1])
    pair: tuple[float, str] = (1.0, "b")
    limit: float | None = None
    note: str | None = None
    anything: Any = None


@dataclass
class NoDefault(Task):
    lr: float


@pytest.fixture
def task_file(tmp_path: Path) -> Iterator[Path]:
    modules, path = set(sys.modules), list(sys.path)
    yield tmp_path / "mine.py"
    sys.path[:] = path
    for name in sys.modules.keys() - modules:
        del sys.modules[name]


def test_a_class_in_a_file_is_found(task_file: Path) -> None:
    task_file.write_text(GOOD)
    task = TaskReference(f"{task_file}:Large", {"lr": "0.5", "width": "8"}).load()
    assert task_fields(task) == {"lr": 0.5, "width": 8}
    assert type(task) is load_task_class(f"{task_file}:Large"), "the file is imported once"


def test_recipes_and_modules_are_found() -> None:
    for name, where in BUILT_IN_TASKS.items():
        assert load_task_class(name) is load_task_class(where)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            "fashion-mist",
            ["'fashion-mist' is not a built-in task and names no class", "file.py:Name", "fashion-mnist"],
        ),
        ("{file}", ["names no class"]),
        ("{file}:Smal", ["has no 'Smal'", "It defines: Small, Large"]),
        ("{file}:NoTask", ["NoTask is not a task; it must be a dataclass that extends paceline.Task"]),
        ("{file}x.py:Small", ["there is no file", "x.py"]),
        ("no_such_package.tasks:Small", ["there is no module 'no_such_package'"]),
        ("__main__:Churn", ["defined in a notebook's cell", "--task churn.py:Churn"]),
    ],
)
def test_a_wrong_name_is_refused_with_what_there_is(task_file: Path, spec: str, words: list[str]) -> None:
    task_file.write_text(GOOD)
    with pytest.raises(TaskError) as caught:
        load_task_class(spec.format(file=task_file))
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import torch\nclass A(:\n", ["syntax error in", "mine.py, line 2", "class A(:"]),
        ("import sys\nsys.exit(0)\n", ["ends the program when it is imported (line 2)", "if __name__ == '__main__':"]),
        (
            "import argparse\nargparse.ArgumentParser().parse_args(['--lr=1'])\n",
            ["ends the program when it is imported (line 2)", "argparse does"],
        ),
        ("from .model import Net\n", ["mine.py has an import relative to its package", "python -m"]),
        ("import paceline\npaceline.fit(None)\n", ["the file calls fit() when it is imported", "__main__"]),
        ("import no_such_library\n", ["mine.py imports 'no_such_library', which is not installed"]),
        ("x = 1\n", ["has no 'Small'", "defines no task"]),
    ],
)
def test_a_broken_file_is_refused(task_file: Path, text: str, words: list[str]) -> None:
    task_file.write_text(text)
    with pytest.raises(TaskError) as caught:
        load_task_class(f"{task_file}:Small")
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def test_a_file_that_failed_is_read_again(task_file: Path) -> None:
    task_file.write_text("class A(:\n")
    with pytest.raises(TaskError):
        load_task_class(f"{task_file}:Small")
    task_file.write_text(GOOD)
    assert load_task_class(f"{task_file}:Small").__name__ == "Small"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("number", "1e-3", 0.001),
        ("number", 2, 2.0),
        ("count", "7", 7),
        ("count", 7.0, 7),
        ("name", "1", "1"),
        ("name", "none", "none"),
        ("on", "yes", True),
        ("on", "0", False),
        ("mode", "slow", "slow"),
        ("mode", "3", 3),
        ("sizes", "[4, 5]", [4, 5]),
        ("sizes", "4,5", [4, 5]),
        ("pair", "(2, 'c')", (2.0, "c")),
        ("limit", "none", None),
        ("limit", "0.5", 0.5),
        ("anything", "{'a': 1}", {"a": 1}),
    ],
)
def test_text_becomes_the_fields_type(name: str, text: Any, value: Any) -> None:
    built = getattr(build_task(Kinds, {name: text}), name)
    assert built == value
    assert type(built) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("number", "fast", "Kinds.number must be float, but 'fast' was given"),
        ("number", True, "Kinds.number must be float, but True was given"),
        ("count", "1.5", "Kinds.count must be int, but '1.5' was given"),
        ("count", "none", "Kinds.count must be int"),
        ("on", "maybe", "Kinds.on must be bool"),
        ("mode", "medium", "Kinds.mode must be"),
        ("sizes", "4", "Kinds.sizes must be list"),
        ("sizes", "[4", "Kinds.sizes must be list"),
        ("limit", "low", "Kinds.limit must be float or NoneType, but 'low' was given"),
        ("size", "3", "Kinds has no field 'size'. Its fields: number, count, name"),
    ],
)
def test_a_wrong_value_names_field_type_and_value(name: str, text: Any, wanted: str) -> None:
    with pytest.raises(TaskError) as caught:
        build_task(Kinds, {name: text})
    assert wanted in str(caught.value)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(TaskError, match=r"NoDefault cannot be built: .*'lr'.* Give the missing fields with --set"):
        build_task(NoDefault, {})


def test_assignments() -> None:
    assert parse_assignments(["lr=0.1", "name = a=b", "lr=0.2"]) == {"lr": "0.2", "name": "a=b"}
    for wrong in ("lr", "=3"):
        with pytest.raises(TaskError, match="write it as field=value"):
            parse_assignments([wrong])


class Colour(enum.Enum):
    RED = 1
    BLUE = "none"


@dataclass
class Schedule:
    warmup: int | str = 3
    until: datetime.date | None = None


@dataclass
class Typed(Task):
    """A field of each kind that a run can record."""

    text: str | None = None
    number: float = 0.0
    either: int | float | str = 0
    by_layer: dict[int, float] = field(default_factory=dict)
    nested: Schedule = field(default_factory=Schedule)
    colours: tuple[Colour, ...] = ()
    folder: Path | str = ""
    at: datetime.datetime | None = None
    names: set[str] = field(default_factory=set)
    anything: Any = None


@pytest.mark.parametrize(
    "values",
    [
        {"text": "none"}, {"text": "None"}, {"text": None}, {"text": "5"}, {"text": " a "}, {"text": ""},
        {"number": math.nan}, {"number": math.inf}, {"number": -0.0}, {"number": 1}, {"number": 1e-320},
        {"either": 1}, {"either": 1.0}, {"either": "1"}, {"either": "1.0"}, {"either": "nan"}, {"either": math.nan},
        {"by_layer": {1: 0.5, 12: math.inf}}, {"by_layer": {}},
        {"nested": Schedule("4", datetime.date(2026, 2, 3))}, {"nested": Schedule(4)},
        {"colours": (Colour.RED, Colour.BLUE)}, {"folder": Path("a/b")}, {"folder": "a/b"},
        {"at": datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.UTC)},
        {"names": {"b", "a", "none"}},
        {"anything": "3"}, {"anything": "none"}, {"anything": (1, [None, {2: "x"}])}, {"anything": [True, 1, 1.0]},
    ],
    ids=str,
)  # fmt: skip
def test_what_a_run_records_is_what_was_given(values: dict[str, Any]) -> None:
    task = Typed(**values)
    recorded = parse_toml(tomli_w.dumps({"fields": task_fields(task)}).encode())["fields"]
    sent = json.loads(json.dumps(task_fields(task), allow_nan=False))
    for again in (build_task(Typed, recorded), build_task(Typed, sent)):
        for name in values:
            assert is_same(getattr(task, name), getattr(again, name)), (recorded, getattr(again, name))
        assert task_fields(again) == task_fields(task)


def test_a_value_that_people_can_type_is_recorded_so() -> None:
    task = Typed(number=0.5, by_layer={1: 0.5}, colours=(Colour.RED,), folder="a", nested=Schedule(4))
    assert task_fields(task) == {
        "text": "none",
        "number": 0.5,
        "either": 0,
        "by_layer": {"1": 0.5},
        "colours": ["RED"],
        "at": "none",
        "names": [],
        "anything": "none",
        "nested": {"warmup": 4, "until": "none"},
        "folder": {"$type": "str", "value": "a"},
    }
    typed = build_task(Typed, {"nested": "{'warmup': 'long'}", "colours": "['BLUE']"})
    assert typed == Typed(nested=Schedule("long"), colours=(Colour.BLUE,))


@dataclass(frozen=True)
class Net:
    width: int = 16
    colour: Colour = Colour.RED
    schedule: Schedule = field(default_factory=Schedule)


@dataclass
class Nested(Task):
    net: Net = field(default_factory=lambda: Net(width=4))
    spare: Net | None = None


def test_a_field_of_a_nested_dataclass_is_set_by_its_path() -> None:
    given = {"net.colour": "BLUE", "net.schedule.until": "2026-02-03"}
    task = build_task(Nested, given)
    assert isinstance(task, Nested)
    assert task.net == Net(4, Colour.BLUE, Schedule(3, datetime.date(2026, 2, 3)))  # the task's default, else as given
    recorded = parse_toml(tomli_w.dumps({"fields": task_fields(task)}).encode())["fields"]
    assert recorded["net"] == {"width": 4, "colour": "BLUE", "schedule": {"warmup": 3, "until": "2026-02-03"}}
    more = parse_assignments(["net.width=8", "spare={'width': 2}", "spare.width=3"])
    again = build_task(Nested, {**recorded, **more})
    assert again == Nested(dataclasses.replace(task.net, width=8), Net(3))
    assert field_type(Nested, "spare.schedule.until") == datetime.date | None
    assert field_type(Nested, "net.depth") is None
    for wrong, message in (
        ({"net.depth": "3"}, r"Net has no field 'depth'. Its fields: width, colour, schedule"),
        ({"net.width": "wide"}, r"Net.width must be int, but 'wide' was given"),
        ({"spare.width": "3"}, r"Nested.spare has no field 'width': its value is None. Give Nested.spare itself"),
    ):
        with pytest.raises(TaskError, match=message):
            build_task(Nested, wrong)


def test_fields_must_be_recordable() -> None:
    assert task_fields(Kinds(sizes=[2]))["sizes"] == [2]
    with pytest.raises(TaskError, match=r"Kinds\.anything is a object; fields must be numbers, strings"):
        task_fields(Kinds(anything=object()))


def test_what_a_task_must_define_says_so() -> None:
    task = Kinds()
    for call, name in (
        (task.build_model, "build_model"),
        (lambda: task.build_dataset("train"), "build_dataset"),
        (lambda: task.build_optimizer(None), "build_optimizer"),  # type: ignore[arg-type]
        (lambda: task.loss(None, None), "loss"),  # type: ignore[arg-type]
    ):
        with pytest.raises(TaskError, match=f"Kinds must define {name}"):
            call()
    assert task.build_scheduler(None, 3) is None  # type: ignore[arg-type]
    assert not task.metrics(None, None)  # type: ignore[arg-type]
    assert not task.build_metrics()
