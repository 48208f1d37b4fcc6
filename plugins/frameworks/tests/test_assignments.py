"""A task's fields as assignments: ``submit()`` gives them to the job, which builds an equal task."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from paceline.core.errors import TaskError
from paceline.core.task import Task
from paceline.core.task_loading import build_task, parse_assignments
from paceline_frameworks.submit import task_assignments


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


def test_a_tasks_fields_as_assignments_build_it_again() -> None:
    task = Kinds(number=0.1, name="b=c", mode=3, sizes=[4], pair=(2.0, " d "), note="none so", anything=[0])
    assert build_task(Kinds, parse_assignments(task_assignments(task))) == task
    assert task_assignments(Kinds(count=3)) == ("sizes=[1]",), "what is the default is left out"


@pytest.mark.parametrize(("name", "value"), [("name", " a"), ("name", "a\n"), ("note", "None"), ("anything", "3")])
def test_a_text_that_would_be_read_as_another_value_is_refused(name: str, value: str) -> None:
    with pytest.raises(TaskError, match=rf"Kinds\.{name} is {re.escape(repr(value))}, which --set would"):
        task_assignments(Kinds(**{name: value}))
