"""Agents that die, stop, lose each other, turn machines away: one side goes on, and with the same bits."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.elastic.recovery_nodes.runs import EMBEDDED_FIRST, Run
from tests.lab.machines import Machines, Node, NodeProcess
from tests.processes import children
from tests.small_disk import small_disk

pytestmark = pytest.mark.timeout(240)


def finish(run: Run, undisturbed: str, *processes: NodeProcess) -> dict[str, object]:
    """These end well, and the model is the undisturbed run's."""
    run.go_on()
    for process in processes:
        assert process.wait(120) == 0, process.text
    result = run.result()
    assert result["model_sha256"] == undisturbed
    return result


def alive(node: Node) -> list[int]:
    """The processes that run on a node; a zombie, which nobody there reaps, does not."""
    pids = []
    for process in psutil.Process(node.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                pids.append(process.pid)
    return pids


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_worker_is_killed(run: Run, undisturbed: str, victim: int) -> None:
    processes = run.begin(nproc="2,1")
    run.kill_worker(run.lab.nodes[victim])
    run.wait_for("fault", lambda event: True, *processes)
    run.hold(14)
    run.wait_for("joined", lambda event: True, *processes)
    finish(run, undisturbed, *processes)
    (started,) = (event for event in run.directory.read_events() if event["event"] == "started")
    assert started["world_size"] == 3  # and nobody went back to a checkpoint


def holds_lock(run: Run, process: NodeProcess) -> bool:
    """Whether it has taken the run's lock, which what is left of a killed agent may still hold."""
    file = str(run.directory.lock.stat().st_ino)
    locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    holders = [words[4] for words in locks if words[1] == "FLOCK" and words[5].endswith(f":{file}")]
    return str(process.tree()[0].pid) in holders


@EMBEDDED_FIRST
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_agent_alone_is_killed(run: Run, undisturbed: str, victim: int) -> None:
    processes = run.begin(nproc="1")
    node, survivor = run.lab.nodes[victim], processes[1 - victim]
    processes[victim].send_signal(signal.SIGKILL)
    # Its workers end with it, though none of them was signalled.
    run.wait_until(lambda: not alive(node), "its workers' end")
    run.hold(14)
    run.wait_for("joined", lambda event: True, survivor)
    if victim == 0:
        # Its old command finds the run in use, once the survivor holds its lock, and leaves the file alone by which
        # nodes join.
        run.wait_until(lambda: holds_lock(run, survivor), "the run's lock")
        agents = run.directory.agents.read_bytes()
        second_start = run.train(node, "2", "1")
        assert second_start.wait(60) == 2, second_start.text
        assert "use" in second_start.text
        assert run.directory.agents.read_bytes() == agents
    assert finish(run, undisturbed, survivor)["world_size"] == 1


@EMBEDDED_FIRST
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_agent_that_was_stopped_finds_itself_left_out(run: Run, undisturbed: str, victim: int) -> None:
    """And joins again."""
    processes = run.begin(nproc="1")
    stopped, survivor = processes[victim], processes[1 - victim]
    stopped.send_signal(signal.SIGSTOP)
    run.wait_for("takeover" if victim == 0 else "node lost", lambda event: True, survivor)
    run.hold(14)
    run.wait_for("joined", lambda event: True, survivor)
    stopped.send_signal(signal.SIGCONT)
    rejoin(run, survivor, stopped)
    assert finish(run, undisturbed, survivor, stopped)["world_size"] == 2


def rejoin(run: Run, winner: NodeProcess, loser: NodeProcess, nproc: int = 1) -> None:
    """Wait until a side that was removed takes part again, with all its processes."""
    run.wait_until(lambda: "this node was removed from the run" in loser.text, "the removal")
    leader = next(node for node in run.lab.nodes if winner in node.processes)
    run.wait_for_joiners(nproc, winner, loser, leader=leader)
    generation = run.generation()
    run.step_until("group", lambda event: event["nodes"] == 2 and event["generation"] > generation, winner, loser)


@EMBEDDED_FIRST
def test_a_side_that_was_cut_off_finds_itself_left_out(run: Run, undisturbed: str) -> None:
    """And joins again once it is reached, with as many processes as before."""
    processes = run.begin(nproc="2,1")
    run.lab.nodes[1].cut()
    run.wait_for("paused", lambda event: True, *processes)
    run.hold(14)
    run.wait_for("joined", lambda event: True, *processes)
    run.lab.nodes[1].heal()
    winner, loser = sorted(processes, key=lambda process: "the run pauses" in process.text)
    rejoin(run, winner, loser, nproc=2 if loser is processes[0] else 1)
    assert finish(run, undisturbed, winner, loser)["world_size"] == 3


@EMBEDDED_FIRST
@pytest.mark.parametrize("run", [3], indirect=True)
def test_of_two_machines_that_cannot_reach_each_other_one_waits(run: Run, undisturbed: str) -> None:
    """Though both reach the leading one; it takes part again once the network has healed."""
    processes = run.begin(nproc="1", nodes="3")
    second, third = run.lab.nodes[1:]
    second.cut_from(third)
    run.hold(14)
    run.wait_for("group", lambda event: event["nodes"] == 2, *processes)
    run.wait_for("excluded", lambda event: True, *processes)
    second.heal_with(third)
    run.wait_for("included", lambda event: True, *processes)
    run.wait_for_joiners(1, *processes)
    run.step_until("group", lambda event: event["nodes"] == 3 and event["generation"] > 1, *processes)
    assert finish(run, undisturbed, *processes)["world_size"] == 3
    [waited] = [process for process in processes if "this node takes no part" in process.text]
    assert waited is not processes[0]
    assert not any(event["event"] in ("node lost", "hang") for event in run.directory.read_events())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("run", [3], indirect=True)
def test_random_pairs_are_cut_and_all_take_part_again(run: Run, undisturbed: str) -> None:
    """The leading node removes one that it does not reach; of two others, one waits."""
    processes = run.begin(nproc="1", nodes="3")
    rng = random.Random(1)
    generation = 0

    def new_group(event: dict[str, Any]) -> bool:
        return event["generation"] > generation and event["nodes"] == nodes

    for _ in range(4):
        pair = rng.sample(run.lab.nodes, 2)
        left_out, back = ("machines", "machines") if run.lab.nodes[0] in pair else ("excluded", "included")
        since, nodes = time.time(), 2
        pair[0].cut_from(pair[1])
        run.wait_for(left_out, lambda event, since=since: event["time"] > since, *processes)
        run.step_until("group", new_group, *processes)
        time.sleep(rng.uniform(0, 10))
        generation, since, nodes = run.generation(), time.time(), 3
        pair[0].heal_with(pair[1])
        run.wait_for(back, lambda event, since=since: event["time"] > since, *processes)
        run.step_until("group", new_group, *processes)
        generation = run.generation()
    assert finish(run, undisturbed, *processes)["world_size"] == 3


@EMBEDDED_FIRST
@pytest.mark.parametrize("run", [3], indirect=True)
def test_a_leading_machine_that_is_cut_from_both_others_is_left_out(run: Run, undisturbed: str) -> None:
    """Though it still reaches etcd."""
    processes = run.begin(nproc="1", nodes="3")
    first, *others = run.lab.nodes
    first.cut_from(*others)
    run.wait_for("takeover", lambda event: True, *processes)
    run.hold(14)
    run.wait_for("joined", lambda event: True, *processes)
    first.heal_with(*others)
    run.wait_until(lambda: "this node was removed from the run" in processes[0].text, "the removal")
    assert finish(run, undisturbed, *processes)["world_size"] in (2, 3)


@EMBEDDED_FIRST
@pytest.mark.parametrize("run", [3], indirect=True)
def test_two_leaders_are_killed_one_after_the_other(run: Run, undisturbed: str) -> None:
    """Three become two by a majority; two become one by the lease."""
    processes = run.begin(nproc="1", nodes="3")
    rosters = [event["nodes"] for event in run.directory.read_events() if event["event"] == "machines"]
    # Whoever came first leads next; a node's name begins with its machine's.
    order = [int(name.partition("-")[0].removeprefix("node")) for name in rosters[-1]]
    assert sorted(order) == [0, 1, 2]
    assert order[0] == 0
    second, last = processes[order[1]], processes[order[2]]
    run.lab.nodes[0].kill()
    run.wait_for("takeover", lambda event: event["node"] == rosters[-1][1], second, last)
    run.hold(14)
    run.wait_for("joined", lambda event: True, second, last)
    generation = run.generation()
    run.lab.nodes[order[1]].kill()
    run.wait_for("takeover", lambda event: event["node"] == rosters[-1][2], last)
    run.hold(16)
    run.wait_for("joined", lambda event: event["generation"] > generation, last)
    assert finish(run, undisturbed, last)["world_size"] == 1


@pytest.mark.parametrize("run", [3], indirect=True)
def test_who_takes_over_holds_the_run_once_the_old_leaders_processes_have_gone(run: Run, undisturbed: str) -> None:
    processes = run.begin(nproc="1", nodes="3")
    leading, *survivors = processes
    agent = leading.tree()[0]
    (fork_server,) = children(agent.pid)
    fork_server.suspend()  # it outlives its agent for as long as that
    agent.kill()
    run.wait_for("takeover", lambda event: True, *survivors)
    run.hold(14)
    run.wait_for("joined", lambda event: True, *survivors)
    fork_server.resume()
    run.wait_until(lambda: not alive(run.lab.nodes[0]), "its processes' end")
    run.wait_until(run.directory.is_running, "the run's lock")
    assert finish(run, undisturbed, *survivors)["world_size"] == 2
    assert not run.directory.is_running()


def test_a_full_disk_does_not_end_who_takes_over(
    machines: Machines, wait_until: Callable[..., None], tmp_path: Path, undisturbed: str
) -> None:
    with small_disk(tmp_path / "disk", "16m"):
        run = Run(machines(3)[0].lab, wait_until)
        run.directory.path.symlink_to(tmp_path / "disk")
        leading, *survivors = run.begin(nproc="1", nodes="3")
        note = run.directory.agent.read_bytes()
        ballast = tmp_path / "disk/ballast"
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
        leading.send_signal(signal.SIGKILL)
        run.wait_until(lambda: not alive(run.lab.nodes[0]), "its workers' end")
        run.hold(14)
        run.wait_until((run.path / "held-14").exists, "two steps more")
        assert [process.poll() for process in survivors] == [None, None]
        ballast.unlink()
        # Other commands reach it once there is room.
        run.wait_until(lambda: run.directory.agent.read_bytes() != note, "the new leader's socket")
        assert finish(run, undisturbed, *survivors)["world_size"] == 2


@EMBEDDED_FIRST
def test_machines_lose_each_other_while_a_group_forms(run: Run, undisturbed: str) -> None:
    processes = run.begin(nproc="1")
    run.kill_worker(run.lab.nodes[1])
    run.wait_for("fault", lambda event: True, *processes)
    run.hold(14)
    run.lab.nodes[1].cut()
    # Who does not go on sees in the directory that all is done.
    assert finish(run, undisturbed, *processes)["world_size"] == 1


@pytest.mark.parametrize("run", [3], indirect=True)
def test_a_machine_joins_while_another_dies(run: Run, undisturbed: str) -> None:
    """One alone would be too few."""
    first, second, third = run.lab.nodes
    run.hold(12)
    leading, dying = (run.train(node, "2:3", "1") for node in (first, second))
    run.wait_for("checkpoint", lambda event: event["step"] == 10, leading, dying)
    joining = run.paceline(third, "join", "run")
    run.wait_for_joiners(1, leading, dying, joining)
    second.kill()
    run.hold(14)
    run.wait_for("group", lambda event: event["nodes"] == 2 and event["generation"] > 0, leading, joining)
    assert finish(run, undisturbed, leading, joining)["world_size"] == 2


def test_a_spare_computes_for_a_machine_that_dies(run: Run, undisturbed: str) -> None:
    """Of two processes on the other machine one computed; then both do, until all is well again."""
    processes = run.begin("--hot-spares", "1", nproc="1")
    run.lab.nodes[0].kill()
    run.wait_for("takeover", lambda event: True, processes[1])
    run.hold(14)
    run.wait_for("joined", lambda event: True, processes[1])
    assert finish(run, undisturbed, processes[1])["world_size"] == 2
    groups = [event for event in run.directory.read_events() if event["event"] == "group"]
    assert (groups[-1]["world_size"], groups[-1]["computing"]) == (2, 2)


@pytest.mark.parametrize(
    ("how", "message"),
    [pytest.param("user", "no data here", marks=pytest.mark.slow), ("other", "no disk here")],
)
def test_a_machine_that_cannot_take_part_is_sent_home(run: Run, undisturbed: str, how: str, message: str) -> None:
    first, second = run.lab.nodes
    (run.path / f"refuse-{second.name}").write_text(how)
    run.hold(12)
    leading = run.train(first, "1:2", "1")
    run.wait_for("checkpoint", lambda event: event["step"] == 10, leading)
    joining = run.paceline(second, "join", "run")
    assert joining.wait(90) == 2, joining.text
    assert "this node cannot take part in the run" in joining.text
    assert message in joining.text
    assert finish(run, undisturbed, leading)["world_size"] == 1


@pytest.mark.slow
def test_a_run_that_restarts_outlives_a_machine(run: Run) -> None:
    processes = run.begin("--recover", "restart", "--reduction", "ddp")
    run.lab.nodes[1].kill()
    run.hold(14)
    run.wait_for("joined", lambda event: True, processes[0])
    run.go_on()
    assert processes[0].wait(120) == 0, processes[0].text
    assert run.result()["world_size"] == 2


@pytest.mark.parametrize("run", [3], indirect=True)
def test_a_leader_that_dies_before_the_first_group_leaves_too_few(run: Run) -> None:
    """Of three nodes two are there: the one that is left trains no run of one node."""
    first, second, _ = run.lab.nodes
    leading, other = (run.train(node, "3", "1", "--init-timeout", "30s") for node in (first, second))
    run.wait_for("machines", lambda event: len(event["nodes"]) == 2, leading, other)
    leading.send_signal(signal.SIGKILL)
    assert other.wait(120) == 2, other.text
    assert "the run begins with 3 nodes (--nodes). After 30 s" in other.text
    assert not run.directory.exists()


def test_a_network_that_comes_up_late_is_waited_for(run: Run, undisturbed: str) -> None:
    first, second = run.lab.nodes
    second.run(["ip", "link", "set", "eth0", "down"])
    processes = [run.train(node, "2", "1", "--node-rank", str(rank)) for rank, node in enumerate((first, second))]
    run.wait_until(lambda: "this node waits for its network: there is no route" in processes[1].text, "the message")
    second.run(["ip", "link", "set", "eth0", "up"])
    assert [process.wait(120) for process in processes] == [0, 0], [process.text for process in processes]
    result = run.result()
    assert (result["model_sha256"], result["world_size"]) == (undisturbed, 2)
