"""A rank that does not go on is named, killed and replaced; ranks that wait for each other end the job."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.chaos

TASK = str(Path(__file__).with_name("faulty.py")) + ":Faulty"


class Run:
    """A run of the scripted task that has ended."""

    def __init__(self, processes: Any, path: Path, harms: Sequence[str], options: Sequence[str]) -> None:
        self.path = path
        plan = path.with_name("plan")
        plan.mkdir()
        for harm in harms:
            (plan / harm).touch()
        self.done: subprocess.CompletedProcess[str] = processes.paceline(
            *("train", TASK, "--run-dir", str(path), "--threads", "1", "--quiet", "--set", f"plan={plan}"),
            *("--eval-every", "7steps", "--best-metric", "accuracy:max", "--checkpoint-every", "5steps"),
            *("--hang-timeout", "3s", *options),
            env={"TORCH_CPP_LOG_LEVEL": "ERROR"},
        )
        assert list(plan.iterdir()) == [], "a harm was never done"

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.path / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def sentences(self) -> list[str]:
        """What was said of hangs on the terminal, without line numbers; it is what the events say."""
        lines = self.done.stderr.splitlines()
        told = [line.removeprefix("paceline: ") for line in lines if "All stacks: " in line]
        events = [f"{e['sentence']}. All stacks: {self.path / e['stacks']}" for e in self.events("hang")]
        assert told == events
        return [re.sub(r"\.py:\d+", ".py", event["sentence"]) for event in self.events("hang")]

    def model(self) -> str:
        assert self.done.returncode == 0, self.done.stderr
        sha256: str = json.loads((self.path / "result.json").read_text())["model_sha256"]
        return sha256


@pytest.fixture(scope="module")
def undisturbed(module_processes: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return Run(module_processes, tmp_path_factory.mktemp("undisturbed") / "run", (), ()).model()


# Who is silent for a moment is no fault: these ranks do not fall silent.
PATIENT = ("--heartbeat", "30")
INPLACE = ("--recover", "inplace", "--nproc")


def test_ranks_that_do_not_go_on_are_named_and_replaced(run_processes: Any, tmp_path: Path, undisturbed: str) -> None:
    # There are two ranks at least in the third hang, whenever the replacements join.
    harms = ["step-9-0-spin", "step-16-0-lock", "step-24-0-fifo"]
    run = Run(run_processes, tmp_path / "run", harms, (*INPLACE, "4", *PATIENT))
    assert run.model() == undisturbed
    for sentence, start in zip(
        run.sentences(),
        [
            "rank 0 has not entered all-reduce N of step 10: it is in `spin` (faulty.py); rank",
            "rank 0 has not entered all-reduce N of step 17: it is in `lock` (faulty.py); rank",
            "rank 0 has not entered all-reduce N of step 25: it is in `fifo` (faulty.py), inside `Path.open` "
            "(pathlib.py); rank",
        ],
        strict=True,
    ):
        assert re.sub(r"all-reduce \d+", "all-reduce N", sentence).startswith(start)
    for event in run.events("hang"):
        assert event["root_causes"] == [0]
        assert event["blocked"] == list(range(1, len(event["blocked"]) + 1))
        assert event["blocked"]
    assert all("has not entered all-reduce" in event["how"] for event in run.events("fault"))
    first = run.path / run.events("hang")[0]["stacks"]
    assert sorted(path.name for path in first.iterdir()) == [f"rank-{rank}.txt" for rank in range(4)]
    assert "in spin" in (first / "rank-0.txt").read_text()
    assert "in _wait_slowly" in (first / "rank-1.txt").read_text()


@pytest.mark.slow
def test_silent_ranks_are_described(run_processes: Any, tmp_path: Path, undisturbed: str) -> None:
    harms = ["step-9-0-grip", "step-16-0-stop"]
    run = Run(run_processes, tmp_path / "run", harms, (*INPLACE, "3"))
    assert run.model() == undisturbed
    assert [re.sub(r"\.py:\d+", ".py", event["how"]) for event in run.events("fault")] == [
        "did not answer within 3 s: it runs without answering, as C code does that holds the interpreter, "
        "in `grip` (faulty.py)",
        "did not answer within 2 s: it is stopped (SIGSTOP)",
    ]


@pytest.mark.parametrize(
    ("workers", "place"),
    [
        pytest.param("0", "it is in `sleep` (faulty.py)", marks=pytest.mark.slow),
        ("1", "it waits for its data worker N, which is in `sleep`"),
    ],
)
def test_a_dataset_that_blocks(run_processes: Any, tmp_path: Path, undisturbed: str, workers: str, place: str) -> None:
    options = ("--set", "sample_by_sample=true", "--num-workers", workers)
    run = Run(run_processes, tmp_path / "run", ["data-37-any-sleep"], (*INPLACE, "2", *options))
    assert run.model() == undisturbed
    (sentence,) = run.sentences()
    assert place in re.sub(r"worker \d+", "worker N", sentence)


@pytest.mark.slow
def test_without_recovery_the_job_ends_and_can_be_resumed(run_processes: Any, tmp_path: Path, undisturbed: str) -> None:
    run = Run(run_processes, tmp_path / "run", ["step-9-0-grip"], ("--recover", "none", "--nproc", "2"))
    assert run.done.returncode == 1
    (sentence,) = run.sentences()
    assert re.sub(r"all-reduce \d+", "all-reduce N", sentence) == (
        "rank 0 runs without answering, as C code does that holds the interpreter, in `grip` (faulty.py); "
        "rank 1 waits for it in all-reduce N of step 10"
    )
    run.done = run_processes.paceline("resume", run.path, "--quiet")
    assert run.model() == undisturbed


@pytest.mark.parametrize("recover", ["inplace", pytest.param("none", marks=pytest.mark.slow)])
def test_ranks_that_wait_for_each_other_end_the_job(run_processes: Any, tmp_path: Path, recover: str) -> None:
    options = ("--nproc", "2", "--recover", recover)
    run = Run(run_processes, tmp_path / "run", ["step-9-1-mismatch"], options)
    assert run.done.returncode == 1
    (sentence,) = run.sentences()
    assert re.fullmatch(
        r"the ranks wait for each other: rank 0 is in all-reduce \d+ of step 10; rank 1 is in "
        r"torch\.distributed\.all_reduce, called by `mismatch` \(faulty\.py\)\. All of them must run the same "
        "exchanges in the same order, independent of rank and data",
        sentence,
    )
    assert not (run.path / "result.json").exists()
