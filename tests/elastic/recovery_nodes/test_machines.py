"""A run on several machines that die, are cut off, come and go: the model is the undisturbed run's."""

from __future__ import annotations

import signal

import pytest
from tests.elastic.recovery_nodes.runs import BOTH, EMBEDDED_FIRST, OPTIONS, PATIENT, Run

pytestmark = pytest.mark.timeout(240)


@BOTH
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_machine_is_killed(run: Run, undisturbed: str, victim: int) -> None:
    """The first one, which leads, or the other: all of it at once, its agent too."""
    processes = run.begin()
    survivor = processes[1 - victim]
    run.lab.nodes[victim].kill()
    run.hold(14)
    run.wait_for("joined", lambda event: True, survivor)
    run.go_on()
    assert survivor.wait(120) == 0, survivor.text
    result = run.result()
    assert result["model_sha256"] == undisturbed
    assert result["world_size"] == 2
    lost = [event for event in run.directory.read_events() if event["event"] in ("node lost", "takeover")]
    assert [event["event"] for event in lost] == (["takeover"] if victim == 0 else ["node lost"])


@EMBEDDED_FIRST
def test_of_two_sides_only_one_goes_on(run: Run, undisturbed: str) -> None:
    processes = run.begin()
    run.lab.nodes[1].cut()
    run.wait_for("paused", lambda event: True, *processes)
    run.hold(14)
    run.wait_for("joined", lambda event: True, *processes)
    run.go_on()
    run.wait_until(run.directory.result.exists, "the result")
    # The other side sees in the directory that all is done.
    codes = [process.wait(60) for process in processes]
    assert codes == [0, 0], [process.text for process in processes]
    assert sum("the run pauses" in process.text for process in processes) == 1
    result = run.result()
    assert (result["model_sha256"], result["world_size"]) == (undisturbed, 2)


@EMBEDDED_FIRST
@pytest.mark.parametrize("run", [3], indirect=True)
def test_machines_come_and_go(run: Run, undisturbed: str) -> None:
    """One begins; two join by the directory alone; one is seen off, and one is asked to leave by a signal."""
    first, second, third = run.lab.nodes
    run.hold(12)
    leading = run.train(first, "1:3", "1")
    run.wait_for("checkpoint", lambda event: event["step"] == 10, leading)
    joining = run.paceline(second, "join", "run")
    run.wait_for_joiners(1, leading, joining)
    run.step_until("group", lambda event: event["nodes"] == 2, leading, joining)
    last = run.paceline(third, "join", "run", "--nproc", "2")
    run.wait_for_joiners(2, leading, joining, last)
    run.step_until("group", lambda event: event["nodes"] == 3 and event["world_size"] == 4, leading, joining, last)
    scale = run.paceline(first, "scale", "run", "--nodes", "2")
    run.wait_for("scale", lambda event: event["nodes"] == 2, leading, joining, last)
    generation = run.generation()
    run.step_until("group", lambda event: event["generation"] > generation, leading, joining)
    assert scale.wait(90) == 0, scale.text
    assert last.wait(60) == 0, last.text
    joining.send_signal(signal.SIGTERM)
    run.wait_for("scale", lambda event: event["nodes"] == 1, leading)
    run.step_until("machines", lambda event: len(event["nodes"]) == 1, leading)
    assert joining.wait(60) == 75, joining.text
    run.go_on()
    assert leading.wait(90) == 0, leading.text
    assert run.result()["model_sha256"] == undisturbed


@BOTH
@pytest.mark.parametrize(("run", "nodes"), [(2, "1:2"), (3, "1:3"), (3, "2:3")], indirect=["run"])
def test_machines_beyond_the_least_number_that_are_there_from_the_start_take_part(
    run: Run, undisturbed: str, nodes: str
) -> None:
    """The first group has the least number; the others join it after a step, whichever of them is first."""
    processes = [run.train(node, nodes, "1", "--node-rank", str(rank)) for rank, node in enumerate(run.lab.nodes)]
    everyone = len(processes)
    run.hold(12)
    run.step_until("group", lambda event: event["nodes"] == everyone, *processes)
    run.go_on()
    assert [process.wait(90) for process in processes] == [0] * everyone, processes[0].text
    assert run.result()["model_sha256"] == undisturbed
    assert run.directory.read_events()[-1]["event"] == "finished"


@pytest.mark.slow
def test_a_scheduler_that_repeats_itself_hurries_nobody(run: Run, undisturbed: str) -> None:
    processes = run.begin(nproc="1")
    for number in (signal.SIGUSR1, signal.SIGTERM):
        for process in processes:
            process.send_signal(number)
    run.wait_for_the_stop()
    run.go_on()
    assert [process.wait(90) for process in processes] == [75, 75], processes[-1].text
    (stopped,) = (event for event in run.directory.read_events() if event["event"] == "stopped")
    assert 10 < stopped["step"] <= 13  # the checkpoint after step 10 is what was waited for
    nodes = enumerate(run.lab.nodes)
    again = [run.train(node, "2", "1", "--node-rank", str(rank)) for rank, node in nodes]
    assert [process.wait(90) for process in again] == [0, 0], again[0].text
    assert run.result()["model_sha256"] == undisturbed


@pytest.mark.slow
def test_whoever_computes_something_else_is_sent_home(run: Run, undisturbed: str) -> None:
    first, second = run.lab.nodes
    run.hold(12)
    leading = run.train(first, "1:2", "1")
    run.wait_for("checkpoint", lambda event: event["step"] == 10, leading)
    source = (run.path / "small.py").read_text()
    (run.path / "small.py").write_text(source.replace("lr=0.05", "lr=0.06"))
    joining = run.paceline(second, "join", "run")
    assert joining.wait(90) == 2
    assert "task is" in joining.text
    (run.path / "small.py").write_text(source)
    run.go_on()
    assert leading.wait(90) == 0, leading.text
    assert run.result()["model_sha256"] == undisturbed


def test_whoever_does_not_hold_the_token_is_not_let_in(run: Run, undisturbed: str) -> None:
    first, second = run.lab.nodes
    run.hold(12)
    leading = run.train(first, "1:2", "1")
    run.wait_for("checkpoint", lambda event: event["step"] == 10, leading)
    forged = run.path / "forged"
    forged.touch(mode=0o600)
    forged.write_text("0" * 64 + "\n")
    joining = run.paceline(second, "join", "run", "--token-file", str(forged))
    run.wait_until(lambda: "a connection was refused" in leading.text, "the refusal")
    joining.send_signal(signal.SIGTERM)
    assert joining.wait(60) != 0
    run.go_on()
    assert leading.wait(90) == 0, leading.text
    assert run.result()["model_sha256"] == undisturbed


@pytest.mark.parametrize("more", [(), pytest.param(("--on", "torchrun"), marks=pytest.mark.slow)])
def test_each_machine_may_have_its_own_name_on_loopback(run: Run, undisturbed: str, more: tuple[str, ...]) -> None:
    """As Debian's /etc/hosts has it."""
    processes = []
    for node in run.lab.nodes:
        others = "".join(f"{other.address} {other.name}\n" for other in run.lab.nodes if other is not node)
        hosts = run.path / f"hosts-{node.name}"
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {node.name}\n{others}")
        assert node.run(["mount", "--bind", hosts, "/etc/hosts"]).returncode == 0
        meet = ("--rdzv-endpoint", f"{run.lab.nodes[0].name}:29500", "--nodes", "2", "--run-dir", "run")
        processes.append(run.paceline(node, "train", "small.py:Small", *OPTIONS, *(more or PATIENT), *meet))
    assert [process.wait(120) for process in processes] == [0, 0], processes[0].text
    assert run.result()["model_sha256"] == undisturbed
