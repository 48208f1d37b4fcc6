"""Where a process is, asked from outside, whatever it does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.core.signals import (
    Frame,
    UserFrame,
    all_stacks,
    describe_unresponsive,
    frames_of,
    locate_user_frame,
    stacks_of,
    state_of,
)

OURS = str(Path(paceline.__file__).parent / "training" / "trainer.py")
TORCH = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
CODE = """
import re
import sys
import threading

{offer}

def grip():
    print("there", flush=True)
    re.match(r"(a+)+$", "a" * 60 + "b")

def spin():
    print("there", flush=True)
    while True:
        pass

def fifo():
    print("there", flush=True)
    open(sys.argv[2]).read()

globals()[sys.argv[1]]()
"""


def start(processes: Any, path: Path, way: str, *, offered: bool = True) -> subprocess.Popen[str]:
    offer = "from paceline.core.signals import install_dump_handler; install_dump_handler()" if offered else ""
    (path / "script.py").write_text(CODE.format(offer=offer))
    os.mkfifo(path / "fifo")
    started: subprocess.Popen[str] = processes.start([sys.executable, "script.py", way, "fifo"])
    assert started.stdout is not None
    assert started.stdout.readline() == "there\n"
    return started


@pytest.mark.parametrize(
    ("way", "states"),
    [
        ("grip", "RS"),
        ("spin", "RS"),
        ("fifo", "S"),
    ],
)
def test_silent_process_is_described(
    run_processes: Any, wait_until: Callable[..., None], tmp_path: Path, way: str, states: str
) -> None:
    process = start(run_processes, tmp_path, way)

    def described() -> str:
        return describe_unresponsive(process.pid, limit_s=10)

    wait_until(lambda: "(script.py:" in described(), "it is where it is to be")
    assert f"`{way}` (script.py:" in described()
    assert state_of(process.pid) in states
    assert "Current thread" in stacks_of(process.pid, limit_s=10)
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: state_of(process.pid) == "T", "it is stopped")
    assert described() == "is stopped (SIGSTOP)"
    process.kill()
    process.wait()
    assert (state_of(process.pid), described(), stacks_of(process.pid)) == ("", "", "")


def test_process_that_does_not_offer_its_stacks_survives_being_asked(
    run_processes: Any, wait_until: Callable[..., None], tmp_path: Path
) -> None:
    process = start(run_processes, tmp_path, "fifo", offered=False)
    wait_until(lambda: state_of(process.pid) == "S", "it waits for a writer")
    assert stacks_of(process.pid) == ""
    assert describe_unresponsive(process.pid).startswith("holds the interpreter in a call that blocks")
    assert process.poll() is None


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([], UserFrame()),
        (
            # The user's script, which called Paceline, is not where it is.
            [Frame("Trainer._step", OURS, 5), Frame("<module>", "/home/me/train.py", 9)],
            UserFrame("`Trainer._step` (trainer.py:5)"),
        ),
        (
            [
                Frame("read", "/venv/lib/python3.11/site-packages/PIL/Image.py", 1),
                Frame("Faces.__getitem__", "/home/me/faces.py", 88),
                Frame("Trainer._step", OURS, 5),
            ],
            UserFrame("`Faces.__getitem__` (faces.py:88)", "`read` (Image.py:1)", "", True),
        ),
        (
            [
                Frame("all_reduce", TORCH, 7),
                Frame("barrier", TORCH, 8),
                Frame("Faces.loss", "/home/me/faces.py", 9),
                Frame("Trainer._step", OURS, 5),
            ],
            UserFrame(
                "`Faces.loss` (faces.py:9)",
                "`all_reduce` (distributed_c10d.py:7)",
                "torch.distributed.barrier",
                True,
            ),
        ),
        (
            [Frame("all_gather", TORCH, 7), Frame("World.all_gather_object", OURS, 5)],
            UserFrame("`World.all_gather_object` (trainer.py:5)", "`all_gather` (distributed_c10d.py:7)"),
        ),
        (
            # What a split layer is made of waits by itself, wherever somebody looks at a tensor.
            [
                Frame("OpOverload.redispatch", TORCH.replace("distributed/distributed_c10d", "_ops"), 6),
                Frame("wait_tensor", TORCH.replace("distributed_c10d", "_functional_collectives"), 7),
                Frame("wait", TORCH.replace("distributed_c10d", "_functional_collectives"), 8),
                Frame("_arrived", OURS, 5),
            ],
            UserFrame(
                "`_arrived` (trainer.py:5)",
                "`OpOverload.redispatch` (_ops.py:6)",
                "torch.distributed.wait_tensor",
            ),
        ),
    ],
)
def test_whereabouts(frames: list[Frame], expected: UserFrame) -> None:
    assert locate_user_frame(frames) == expected


def test_own_threads() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def wait_here() -> None:
        entered.set()
        go_on.wait()

    thread = threading.Thread(target=wait_here, name="waiting-for-the-test")
    thread.start()
    try:
        entered.wait()
        assert thread.ident is not None
        place = locate_user_frame(frames_of(thread.ident))
        assert "wait_here` (test_signals.py:" in place.where
        assert all_stacks(first=thread.ident).startswith("Thread waiting-for-the-test:\n")
    finally:
        go_on.set()
        thread.join()


class Nested(torch.autograd.Function):
    """Its backward runs another backward, and so on; the engine continues a deep one in a thread of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int, hook: Callable[[], None]) -> torch.Tensor:
        ctx.depth, ctx.hook = depth, hook
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.depth == 0:
            ctx.hook()
        else:
            run_nested(ctx.depth - 1, ctx.hook)
        return gradient, None, None


def run_nested(depth: int, hook: Callable[[], None]) -> None:
    with torch.enable_grad():
        Nested.apply(torch.ones(1, requires_grad=True), depth, hook).sum().backward()


def find_a_hook_in_a_thread_of_autograd() -> None:
    """On a GPU each hook is called there; on a CPU, a backward within backwards within backwards is."""
    entered, released = threading.Event(), threading.Event()

    def wait_for_the_others() -> None:
        entered.set()
        released.wait()

    thread = threading.Thread(target=run_nested, args=(100, wait_for_the_others))
    thread.start()
    try:
        entered.wait()
        assert thread.ident is not None
        own = sys._current_frames()[thread.ident]
        while own.f_code.co_name != "_engine_run_backward":  # it is on its way there
            time.sleep(0.01)
            own = sys._current_frames()[thread.ident]
        place = locate_user_frame(frames_of(thread.ident))
        assert "wait_for_the_others` (test_signals.py:" in place.where
        assert place.is_users
    finally:
        released.set()
        thread.join()


@pytest.mark.integration
def test_a_hook_in_a_thread_of_autograd_is_where_the_caller_of_backward_is() -> None:
    # In a process of its own: once autograd has threads, no fork of the process can run backward.
    code = f"from {__name__} import find_a_hook_in_a_thread_of_autograd as find; find()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
