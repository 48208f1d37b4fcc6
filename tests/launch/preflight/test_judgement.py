"""What is found from facts that no machine here can have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.launch.preflight.checks import run_checks
from paceline.launch.preflight.facts import Gpu, GpuFacts, Interface, NodeFacts
from paceline.launch.preflight.probes import Connection, Flow, Storage
from paceline.launch.preflight.spec import Check, PreflightResults, PreflightSpec

GIB = 1 << 30
TORCH = {"version": "2.13.0+cu130", "cuda": "13.0", "cudnn": 91300, "nccl": "2.27.7", "gpus": 2}


def gpu(index: int, name: str = "NVIDIA H100", driver: str = "550.54.14") -> Gpu:
    return Gpu(
        index=index,
        name=name,
        driver=driver,
        memory_mib=81559,
        used_mib=0,
        temperature_c=40,
        uncorrected_errors=0,
        slowed_by=[],
    )


def machine(number: int, **changed: Any) -> dict[str, Any]:
    """The facts of a machine with which everything is well."""
    facts = NodeFacts(
        host=f"node{number}",
        python="3.12.4",
        libraries={"torch": "2.13.0", "paceline": "0.1.0", "requests": "2.32.0"},
        needed=["torch"],
        torch=TORCH,
        task=None,
        gpus=GpuFacts(gpus=[gpu(0), gpu(1)], error=None, cuda="13.0", links={"0-1": "NV18"}, xids=[]),
        interfaces=[Interface(name="eth0", address=f"10.0.0.{number + 1}", mbit_per_s=10000)],
        named=[f"10.0.0.{number + 1}"],
        open_files=1 << 20,
        most_open_files=1 << 20,
        locked_memory=None,
        rdma=["mlx5_0"],
        shm_free=64 * GIB,
        cores=64,
        usable_cores=64,
        core_quota=None,
    )
    where = {"address": f"10.0.0.{number + 1}", "interface": "eth0", "address_problem": None}
    return {**facts, **where, **changed}


def findings(*machines: dict[str, Any], **options: Any) -> PreflightResults:
    """What an examination of these machines gathers, where all is well between them."""
    count = len(machines)
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    examination = PreflightSpec(directory=Path("/shared/doctor"), run=Path("/shared/run"), **options)
    return PreflightResults(
        spec=examination,
        nodes=count,
        port=29500,
        facts=dict(enumerate(machines)),
        clock_s=dict.fromkeys(range(1, count), (0.0001, 0.0001)),
        rendezvous={pair: Connection(error=None, ms=0.1) for pair in pairs},
        data={pair: Connection(error=None, ms=0.1) for pair in pairs},
        flows={pair: Flow(error=None, bytes_per_s=1.2e9) for pair in pairs},
        storage={
            node: Storage(
                path="/shared",
                error=None,
                lacks=[],
                free=500 * GIB,
                checkpoints=[],
                seen=[other for other in range(count) if other != node],
                unlocked=[],
            )
            for node in range(count)
        },
        all_reduce={
            "right": True,
            "bytes": 4 << 20,
            "ms": 1.0,
            "bytes_per_s": 4e9,
            "backend": "nccl",
            "ranks": 4,
        },
    )


def problems(found: PreflightResults) -> list[Check]:
    return [check for check in run_checks(found) if check.status != "pass"]


def only(found: PreflightResults) -> Check:
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
            {"torch": {**TORCH, "nccl": "2.21.5"}},
            *("torch", "fail", "NCCL 2.21.5 (node1)"),
        ),
        ({"shm_free": 40 << 20}, "shared-memory", "warn", "40 MiB for 2 processes"),
        ({"shm_free": 20 << 20}, "shared-memory", "fail", "20 MiB"),
        ({"locked_memory": 8 << 20}, "locked-memory", "warn", "ulimit -l is 8 MiB, too low for mlx5_0"),
        ({"usable_cores": 4}, "cpus", "warn", "4 of 64 cores for 2 x 4 threads"),
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
    [check] = [check for check in run_checks(told) if check.id == "host-name"]
    assert (check.where, check.found.rpartition("; ")[2]) == ("node1", "the job uses the address of eth0")
    check = only(findings(machine(0), machine(1, **own), agents=True))
    assert check.status == "warn"


def test_a_host_name_where_preflight_chooses_the_interface() -> None:
    found = findings(machine(0), machine(1, named=["127.0.1.1"]), preflight=True)
    found.other_flows["ib0"] = {pair: Flow(error=None, bytes_per_s=1e10) for pair in found.flows}
    assert only(found).id == "interface"


def test_torch_that_cannot_be_imported() -> None:
    broken = {"error": "ImportError: libcudart.so.13: cannot open shared object file"}
    check = only(findings(machine(0), machine(1, torch=broken), gpus_per_node=2))
    assert (check.id, check.where) == ("torch", "node1")
    assert "libcudart" in check.found


def gpu_facts(*gpus: Gpu, **changed: Any) -> GpuFacts:
    facts = GpuFacts(gpus=list(gpus), error=None, cuda="13.0", links={}, xids=[])
    facts.update(changed)  # type: ignore[typeddict-item]
    return facts


def test_too_few_gpus_and_gpus_that_differ() -> None:
    one = {**TORCH, "gpus": 1}
    other = gpu_facts(gpu(0, name="NVIDIA A100", driver="535.1"))
    checks = problems(findings(machine(0), machine(1, gpus=other, torch=one), gpus_per_node=2))
    assert {(check.where, check.status) for check in checks} == {("node1", "fail"), ("all", "warn")}
    assert "1 GPU, 2 requested" in {check.found for check in checks}


def test_torch_without_cuda_and_more_processes_than_gpus() -> None:
    cpu = {"version": "2.13.0+cpu", "cuda": None, "cudnn": None, "nccl": None, "gpus": 0}
    check = only(findings(machine(0, torch=cpu)))
    assert "torch sees 0 (its build has no CUDA)" in check.found
    check = only(findings(machine(0), nproc=(4,)))
    assert check.found == "4 processes for 2 GPUs"


def test_gpus_that_are_hidden_on_purpose_are_not_missed() -> None:
    hidden = {**TORCH, "gpus": 1, "visible": 1}  # CUDA_VISIBLE_DEVICES=0
    assert not problems(findings(machine(0, torch=hidden)))
    check = only(findings(machine(0, torch={**hidden, "visible": 2})))
    assert "torch sees 1" in check.found


def test_a_machine_0_that_is_far_away() -> None:
    found = findings(*map(machine, range(4)))
    for (source, to), way in found.data.items():
        way["ms"] = 4.0 if 0 in (source, to) else 0.3
    check = only(found)
    assert (check.id, check.where) == ("rendezvous", "node0")
    assert "4.00 ms" in check.found


def test_a_slow_machine_among_fast_ones() -> None:
    found = findings(machine(0), machine(1), machine(2))
    for (source, _), flow in found.flows.items():
        flow["bytes_per_s"] = 2e8 if source == 2 else 1.2e9
    assert {(check.id, check.where, check.status) for check in problems(found)} == {
        ("bandwidth", "node2 -> node0", "warn"),
        ("bandwidth", "node2 -> node1", "warn"),
    }


def test_a_slower_interface() -> None:
    def three(number: int) -> list[Interface]:
        return [
            Interface(name="docker0", address="172.17.0.1", mbit_per_s=400000),
            Interface(name="eth0", address=f"10.0.0.{number + 1}", mbit_per_s=10000),
            Interface(name="ib0", address=f"10.1.0.{number + 1}", mbit_per_s=200000),
        ]

    check = only(findings(*(machine(number, interfaces=three(number)) for number in range(2))))
    assert check.id == "interface"
    assert check.found == "eth0 would be used, with 10000 Mbit/s; ib0 has 200000"
    assert "Give --interface ib0" in check.advice
    assert problems(findings(machine(0, interfaces=three(0)), machine(1))) == [], "only one machine has it"


def test_an_all_reduce_that_is_wrong() -> None:
    found = findings(machine(0), machine(1))
    assert found.all_reduce is not None
    found.all_reduce["right"] = False
    assert only(found).id == "all-reduce"


def test_room_for_checkpoints() -> None:
    task = {"model_bytes": 60 * GIB}
    check = only(findings(machine(0, task=task), machine(1, task=task)))
    assert (check.id, check.where, check.status) == ("disk-space", "all", "fail")
    assert "3 + 1 checkpoints of about 180 GiB" in check.found
    assert "720 GiB are needed" in check.advice


def test_room_for_checkpoints_beside_those_that_are_there() -> None:
    """A job that begins again on its machine needs no second room for what it has written."""
    own = machine(0, task={"model_bytes": 60 * GIB})

    def with_checkpoints(count: int, free: int, **options: Any) -> PreflightResults:
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
