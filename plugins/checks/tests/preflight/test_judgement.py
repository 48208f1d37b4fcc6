"""What is found from facts that no machine here can have."""

from __future__ import annotations

from typing import Any

import pytest

from paceline_checks.preflight.checks import Results, all_reduce_obstacle, common_interfaces, judge
from paceline_checks.preflight.spec import Check, PreflightSpec

GIB = 1 << 30
TORCH = {"version": "2.13.0+cu130", "cuda": "13.0", "gpus": 2}


def gpu(index: int, name: str = "NVIDIA H100", driver: str = "550.54.14") -> dict[str, Any]:
    health = {"used_mib": 0, "temperature_c": 40, "uncorrected_errors": 0, "slowed_by": []}
    return {"index": index, "name": name, "driver": driver, **health}


def machine(number: int, **changed: Any) -> dict[str, Any]:
    """The facts of a machine with which everything is well."""
    address = f"10.0.0.{number + 1}"
    return {
        "host": f"node{number}",
        "python": "3.12.4",
        "libraries": {"torch": "2.13.0", "paceline": "0.1.0", "requests": "2.32.0"},
        "needed": ["torch"],
        "torch": TORCH,
        "visible_gpus": 2,
        "task": None,
        "gpus": [gpu(0), gpu(1)],
        "gpu_error": None,
        "interfaces": [{"name": "eth0", "address": address}],
        "named": [address],
        "open_files": 1 << 20,
        "most_open_files": 1 << 20,
        "shm_free": 64 * GIB,
        "cores": 64,
        "cpus": [*range(64)],
        "core_quota": None,
        "address": address,
        "interface": "eth0",
        "address_problem": None,
        **changed,
    }


def findings(*machines: dict[str, Any], **options: Any) -> Results:
    """What an examination of these machines gathers, where all is well between them."""
    count = len(machines)
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    storage = {"path": "/shared", "error": None, "lacks": [], "free": 500 * GIB, "checkpoints": [], "unlocked": []}
    return Results(
        spec=PreflightSpec(run="/shared/run", **options),
        nodes=count,
        facts=dict(enumerate(machines)),
        clock_s={node: 0.0001 * node for node in range(count)},
        flows=dict.fromkeys(pairs, 1.2e9),
        storage={
            node: {**storage, "seen": [other for other in range(count) if other != node]} for node in range(count)
        },
        all_reduce={"bytes": 4 << 20, "ms": 1.0, "bytes_per_s": 4e9, "backend": "nccl", "ranks": 4},
    )


def problems(found: Results) -> list[Check]:
    return [check for check in judge(found).checks if check.status != "pass"]


def only(found: Results) -> Check:
    checks = problems(found)
    assert len(checks) == 1, checks
    return checks[0]


def test_all_is_well() -> None:
    assert problems(findings(machine(0), machine(1), nproc=(2,))) == []


def test_what_the_file_system_lacks() -> None:
    found = findings(machine(0), machine(1), nproc=(2,))
    found.storage[1].update(lacks=[["has no file locks", "Mount it so"]])
    assert [(c.where, c.status, c.found, c.advice) for c in problems(found)] == [
        ("node1", "warn", "/shared has no file locks", "Mount it so")
    ]
    found.storage[1].update(lacks=[], unlocked=[0])
    found.storage[0].update(unlocked=[1])
    assert (only(found).where, only(found).found) == ("all", "/shared holds locks within a node only")


@pytest.mark.parametrize(
    ("changed", "id", "status", "words"),
    [
        ({"python": "3.11.9"}, "python", "fail", "3.12.4 (node0), 3.11.9 (node1)"),
        ({"python": "3.12.5"}, "python", "warn", "3.12.5 (node1)"),
        ({"libraries": {"torch": "2.13.0", "paceline": "0.1.0"}}, "libraries", "warn", "requests: 2.32.0"),
        (
            {"libraries": {"torch": "2.12.0", "paceline": "0.1.0", "requests": "2.32.0"}},
            *("libraries", "fail", "torch: 2.13.0 (node0), 2.12.0 (node1)"),
        ),
        (
            {"torch": {**TORCH, "version": "2.13.0+cu126"}},
            *("torch", "fail", "2.13.0+cu126 (node1)"),
        ),
        ({"shm_free": 40 << 20}, "shared-memory", "warn", "40 MiB for 2 processes"),
        ({"shm_free": 20 << 20}, "shared-memory", "fail", "20 MiB"),
        ({"cpus": [0, 1, 2, 3, 0]}, "cpus", "warn", "4 of 64 cores for 2 x 4 threads"),
        ({"core_quota": 1.5}, "cpus", "warn", "1.5 of 64 cores"),
        ({"named": []}, "host-name", "warn", "does not resolve"),
        ({"open_files": 256}, "open-files", "fail", "ulimit -n is 256, but must be 528"),
    ],
)
def test_one_machine_differs(changed: dict[str, Any], id: str, status: str, words: str) -> None:
    check = only(findings(machine(0), machine(1, **changed), nproc=(2,), threads=4))
    assert (check.id, check.status) == (id, status)
    assert words in check.found
    assert check.advice


@pytest.mark.parametrize("addresses", [["127.0.1.1"], []])
def test_a_host_name_that_is_not_used(addresses: list[str]) -> None:
    """Who is told the interface does not look at it: the check's own advice helps."""
    own = {"named": addresses}
    check = only(findings(machine(0), machine(1, **own)))
    assert check.status == ("fail" if addresses else "warn")
    assert "--interface eth0, which keeps gloo from announcing" in check.advice
    told = findings(machine(0), machine(1, **own), interface="eth0")
    assert problems(told) == []
    [check] = [each for each in judge(told).checks if (each.id, each.where) == ("host-name", "node1")]
    assert (check.where, check.found.rpartition("; ")[2]) == ("node1", "the job uses the address of eth0")
    check = only(findings(machine(0), machine(1, **own), agents=True))
    assert check.status == "warn"


def test_a_host_name_where_preflight_chooses_the_interface() -> None:
    found = findings(machine(0), machine(1, named=["127.0.1.1"]), before_job=True)
    found.other_flows["ib0"] = dict.fromkeys(found.flows, 1e10)
    assert only(found).id == "interface"


def test_too_few_gpus_and_gpus_that_differ() -> None:
    one = {**TORCH, "gpus": 1}
    other = [gpu(0, name="NVIDIA A100", driver="535.1")]
    checks = problems(findings(machine(0), machine(1, gpus=other, torch=one), gpus_per_node=2))
    assert {(check.where, check.status) for check in checks} == {("node1", "fail"), ("all", "warn")}
    assert "1 GPU, 2 requested" in {check.found for check in checks}


def test_torch_without_cuda_and_more_processes_than_gpus() -> None:
    cpu = {"version": "2.13.0+cpu", "cuda": None, "gpus": 0}
    check = only(findings(machine(0, torch=cpu)))
    assert "torch sees 0 (its build has no CUDA)" in check.found
    check = only(findings(machine(0), nproc=(4,)))
    assert check.found == "4 processes for 2 GPUs"


def test_gpus_that_are_hidden_on_purpose_are_not_missed() -> None:
    hidden = {**TORCH, "gpus": 1}
    assert not problems(findings(machine(0, torch=hidden, visible_gpus=1)))  # CUDA_VISIBLE_DEVICES=0
    check = only(findings(machine(0, torch=hidden)))
    assert "torch sees 1" in check.found


def test_a_slow_machine_among_fast_ones() -> None:
    found = findings(machine(0), machine(1), machine(2))
    found.flows |= {pair: 2e8 for pair in found.flows if pair[0] == 2}
    assert {(check.id, check.where, check.status) for check in problems(found)} == {
        ("bandwidth", "node2 -> node0", "warn"),
        ("bandwidth", "node2 -> node1", "warn"),
    }


def test_interfaces_that_all_machines_have() -> None:
    def two(number: int) -> list[dict[str, str]]:
        bridge = {"name": "docker0", "address": "172.17.0.1"}
        return [bridge, {"name": "eth0", "address": f"10.0.0.{number}"}, {"name": f"ib{number}", "address": "10.1.0.1"}]

    assert common_interfaces({n: {"interfaces": two(n)} for n in range(2)}) == {"eth0": {0: "10.0.0.0", 1: "10.0.0.1"}}


def test_an_all_reduce_that_is_wrong_and_one_that_cannot_work() -> None:
    found = findings(machine(0), machine(1))
    found.all_reduce = {"error": "its sum is wrong"}
    assert (only(found).id, only(found).status) == ("all-reduce", "fail")
    assert all_reduce_obstacle(found) == ""
    found.facts[1]["torch"] = {**TORCH, "gpus": 0}
    assert all_reduce_obstacle(found) == "torch sees GPUs on some nodes only"


def test_room_for_checkpoints() -> None:
    task = {"model_bytes": 60 * GIB}
    check = only(findings(machine(0, task=task), machine(1, task=task)))
    assert (check.id, check.where, check.status) == ("disk-space", "all", "fail")
    assert "3 + 1 checkpoints of about 180 GiB" in check.found
    assert "720 GiB are needed" in check.advice


def test_room_for_checkpoints_beside_those_that_are_there() -> None:
    """A job that begins again on its machine needs no second room for what it has written."""
    own = machine(0, task={"model_bytes": 60 * GIB})

    def with_checkpoints(count: int, free: int, **options: Any) -> Results:
        found = findings(own, gpus_per_node=2, **options)
        found.storage[0].update(free=free * GIB, checkpoints=[10 * GIB] * count)
        return found

    assert problems(with_checkpoints(3, 15)) == []
    assert problems(with_checkpoints(2, 20)) == []
    assert problems(with_checkpoints(5, 15, keep=1)) == [], "the oldest is removed for the next one"
    check = only(with_checkpoints(2, 15))
    assert (check.id, check.status) == ("disk-space", "fail")
    assert check.found == "/shared has 15 GiB free; 3 + 1 checkpoints of 10 GiB, of which 2 exist"
    assert check.advice == "20 GiB are needed: free some space"
    assert only(with_checkpoints(3, 5)).advice.startswith("10 GiB are needed"), "the next one must fit"
    assert only(with_checkpoints(3, 15, checkpoint_bytes=20 * GIB)).advice.startswith("20 GiB are needed")
