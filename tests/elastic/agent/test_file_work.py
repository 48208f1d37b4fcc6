"""An agent's work on files: in order, in a thread of its own, with what follows it in the loop."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from paceline.elastic.node import FileWork


class Loop:
    """A loop that waits to be woken."""

    def __init__(self) -> None:
        self._woken = threading.Semaphore(0)
        self.files = FileWork(self._woken.release)

    def turn(self) -> None:
        assert self._woken.acquire(timeout=60)
        self.files.deliver()


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.files.close()


def test_work_is_done_in_order_and_followed_up_in_the_loop(loop: Loop, tmp_path: Path) -> None:
    file, threads = tmp_path / "file", set[int]()
    followed: list[str] = []

    def follow(content: str) -> None:
        threads.add(threading.get_ident())
        followed.append(content)

    for text in ("a", "b", "c"):
        loop.files.do(partial(file.write_text, text))
        loop.files.do(file.read_text, follow)
    for _ in range(3):
        loop.turn()
    assert followed == ["a", "b", "c"]
    assert threads == {threading.get_ident()}


def test_the_loop_goes_on_while_a_disk_does_not_answer(loop: Loop) -> None:
    answers = threading.Event()
    followed: list[bool] = []
    loop.files.do(lambda: answers.wait(60), followed.append)
    loop.files.deliver()
    assert not followed
    answers.set()
    loop.turn()
    assert followed == [True]


def test_what_work_raises_is_raised_in_the_loop(loop: Loop, tmp_path: Path) -> None:
    loop.files.do((tmp_path / "absent").read_bytes, lambda _: None)
    with pytest.raises(FileNotFoundError):
        loop.turn()


def test_the_end_waits_for_all_work(tmp_path: Path) -> None:
    files = FileWork(lambda: None)
    for number in range(100):
        files.do((tmp_path / f"{number}").touch)
    files.close()
    assert len(list(tmp_path.iterdir())) == 100
