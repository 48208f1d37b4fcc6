"""What starts once on each machine: which machines ``--preflight`` examines."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from tests.lab.listening_agent import listening_agent

from paceline.elastic.consensus.discovery import record_agents
from paceline.launch import node
from paceline.runs.directory import RunDirectory

BECAME = 17


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The commands that the node has become."""
    commands: list[tuple[str, ...]] = []

    def become(program: str, command: tuple[str, ...]) -> None:
        commands.append(command)
        raise SystemExit(BECAME)

    monkeypatch.setattr("os.execvp", become)
    return commands


def start(run: Path, *, index: int, nodes: str, most: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Do what a pod does, whose preflight writes how many machines are examined, whole in each rank, and fails."""
    monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
    monkeypatch.setenv("PACELINE_NODES", str(most))
    monkeypatch.setenv("PACELINE_HOSTS", ",".join(["127.0.0.1"] * most))
    preflight = shlex.join(["sh", "-c", 'echo "$0" > "$1.$$"; mv "$1.$$" "$1"; exit 3', "{nnodes}", f"{run}/preflight"])
    command = ("python", "-m", "paceline", "train", "net", "--run-dir", str(run))
    words = ["--rank-launcher", "agent", "--nodes", nodes, "--nproc", "2", "--preflight", preflight]
    try:
        return node.main([*words, "--", *command])
    except SystemExit as ended:
        return int(str(ended.code))


@pytest.mark.integration
@pytest.mark.parametrize(("nodes", "examined"), [("1:4", "1"), ("2:4", "2"), ("4", "4")])
def test_the_machines_that_a_job_begins_with_are_examined(
    tmp_path: Path, became: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, nodes: str, examined: str
) -> None:
    assert start(tmp_path, index=0, nodes=nodes, most=4, monkeypatch=monkeypatch) == 3
    assert (tmp_path / "preflight").read_text() == f"{examined}\n"
    assert became == []


def test_a_machine_that_comes_before_anybody_is_at_work_is_not(
    tmp_path: Path, became: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert start(tmp_path, index=2, nodes="2:4", most=4, monkeypatch=monkeypatch) == BECAME
    [command] = became
    assert command[command.index("--nodes") + 1] == "2:4"
    assert not (tmp_path / "preflight").exists()


def test_a_machine_that_replaces_another_one_joins_without_a_preflight(
    tmp_path: Path, became: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with listening_agent(tmp_path, "other") as agent:
        record_agents(RunDirectory(tmp_path), [("other", agent)], Path("job"))
        assert start(tmp_path, index=1, nodes="2", most=2, monkeypatch=monkeypatch) == BECAME
    assert became == [("python", "-m", "paceline", "join", str(tmp_path), "--nproc", "2")]
    assert not (tmp_path / "preflight").exists()
