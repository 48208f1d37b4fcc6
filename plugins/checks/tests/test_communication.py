"""paceline bench comm: formulas, what is checked, every operation with every engine that needs no GPU."""

from __future__ import annotations

import json
import signal
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from tests.processes import Processes
from torch._C._distributed_c10d import HashStore

from paceline.core.environment import Environment
from paceline.core.errors import ConfigError
from paceline.torch_internals import gloo_group
from paceline_checks.bench_report import size_text
from paceline_checks.collectives import (
    COLLECTIVES,
    CommunicationPlan,
    CommunicationReport,
    Op,
    default_interface,
    find_link,
    interface_speed_gbps,
    parse_sizes,
)
from paceline_checks.run_collectives import GroupEngine, measure, run_plan

ALL_OPS = tuple(COLLECTIVES)
SMALL = ("--op", *ALL_OPS, "--sizes", "100B:1000B", "--iterations", "2", "--warmup", "1")


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("8B:64B", (8, 16, 32, 64)),
        ("1MiB", (2**20,)),
        ("1KB:3000", (1000, 2000)),
        ("1K:2KiB", (1024, 2048)),
    ],
)
def test_sizes_double(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "8:", "2MiB:1MiB", "0B", "8 bits", "-8"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--sizes"):
        parse_sizes(text)


@pytest.mark.parametrize(
    ("op", "factor", "elements", "source", "target"),
    [
        ("all_reduce", 1.5, 25, 25, 25),
        ("all_gather", 0.75, 24, 6, 24),
        ("reduce_scatter", 0.75, 24, 24, 6),
        ("all_to_all", 0.75, 24, 24, 24),
        ("broadcast", 1.0, 25, 25, 25),
        ("p2p", 1.0, 25, 25, 25),
    ],
)
def test_sizes_and_factors_are_those_of_nccl_tests(
    op: Op, factor: float, elements: int, source: int, target: int
) -> None:
    collective = COLLECTIVES[op]
    assert collective.bus_factor(4) == factor
    assert collective.elements(103, 4) == elements
    assert collective.elements(1, 4) == (4 if collective.divided else 1)
    assert (collective.source_elements(elements, 4), collective.target_elements(elements, 4)) == (
        source,
        target,
    )


@pytest.mark.parametrize("op", ALL_OPS)
def test_what_must_be_received(op: Op) -> None:
    """Worked out the plain way for three ranks."""
    collective, ranks = COLLECTIVES[op], 3
    elements = collective.elements(6 * 4, ranks)
    base = torch.arange(collective.source_elements(elements, ranks), dtype=torch.float32)
    given = [collective.given(base, rank) for rank in range(ranks)]
    parts = [[part.tolist() for part in each.chunk(ranks)] for each in given]
    for rank in range(ranks):
        match op:
            case "all_reduce":
                wanted = torch.stack(given).sum(0).tolist()
            case "reduce_scatter":
                wanted = torch.stack(given).sum(0).chunk(ranks)[rank].tolist()
            case "broadcast":
                wanted = given[0].tolist()
            case "p2p":
                wanted = given[(rank - 1) % ranks].tolist()
            case "all_gather":
                wanted = torch.cat(given).tolist()
            case "all_to_all":
                wanted = [value for each in parts for value in each[rank]]
        assert collective.expected(base, rank, ranks).tolist() == wanted


class Broken(GroupEngine):
    """Loses the last element of every second result."""

    calls = 0

    def run(self, op: Op, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        super().run(op, sources, targets)
        self.calls += 1
        if self.calls % 2:
            targets[0][-1] += 1


@pytest.mark.parametrize("op", ALL_OPS)
def test_each_wrong_element_is_counted(op: Op) -> None:
    group = gloo_group(HashStore(), 0, 1, timedelta(minutes=1), hostname="127.0.0.1", interface=None)
    right, broken = (kind(group, 0, 1, torch.device("cpu"), "gloo") for kind in (GroupEngine, Broken))
    [result] = measure(right, [op], [1024], iterations=6, warmup=0)
    assert (result.wrong, result.checked, result.size) == (0, 6 * 256, 1024)
    [result] = measure(broken, [op], [1024], iterations=6, warmup=0)
    assert result.wrong == 3
    right.close()


def test_threads_drive_ranks_of_one_process() -> None:
    plan = CommunicationPlan(
        backend="gloo",
        mode="threads-per-device",
        ops=ALL_OPS,
        sizes=(64, 4096),
        nproc=3,
        iterations=2,
        warmup=1,
    )
    carrier, ranks, results = run_plan(plan, Environment())
    assert (carrier, ranks, len(results)) == ("gloo", 3, 12)
    link = find_link(80.0, one_machine=True, interface=None)
    report = CommunicationReport(carrier, plan.mode, ranks, 1, link, results)
    assert report.wrong == 0
    assert "All " in report.notes()[-1]
    first = report.as_json()["results"][0]
    assert first["share_of_link"] == pytest.approx(first["busbw_gbps"] / 10)
    assert first["algbw_gbps"] == pytest.approx(first["size"] / first["time_us"] / 1e3)
    assert first["busbw_gbps"] == pytest.approx(first["algbw_gbps"] * 4 / 3)


def test_processes_of_the_command_and_of_threads_in_them(run_processes: Processes, tmp_path: Path) -> None:
    done = run_processes.paceline("bench", "comm", *SMALL, "--nproc", "3", "--json", "--plot", "comm.svg")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["ranks"], report["carrier"], report["mode"]) == (3, "gloo", "process-per-device")
    assert {result["op"] for result in report["results"]} == set(ALL_OPS)
    assert sum(result["wrong"] for result in report["results"]) == 0
    texts = [text for text in ElementTree.parse(tmp_path / "comm.svg").getroot().itertext() if text.strip()]
    assert {"Bus bandwidth: gloo, 3 ranks, process-per-device", "size", "GB/s", *ALL_OPS} <= set(texts)
    # A thread for each rank in several processes: what "multiple devices per thread" does over MPI.
    launched = ("launch", "--on", "spawn", "--nproc", "2", "--", "-m", "paceline", "bench", "comm")
    done = run_processes.paceline(
        *launched, "--mode", "threads-per-device", "--nproc", "2", "--sizes", "1KiB", "--markdown"
    )
    assert done.returncode == 0, done.stderr
    assert "**all_reduce**: gloo, 4 ranks, threads-per-device" in done.stdout
    assert "| size | time (us) | algbw (GB/s) | busbw (GB/s) | wrong |" in done.stdout


INTERRUPTED = """
import sys
from paceline_checks import run_collectives
from paceline.cli import main

measure = run_collectives.measure

def told(*arguments, **options):
    print("measuring", flush=True)
    yield from measure(*arguments, **options)

run_collectives.measure = told
sys.exit(main())
"""


def test_ctrl_c_ends_threads(run_processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    words = ("bench", "comm", "--mode", "threads-per-device", "--sizes", "1KiB", "--iterations", "10000000")
    popen = run_processes.start([sys.executable, "interrupted.py", *words])
    assert popen.stdout is not None
    assert [popen.stdout.readline() for _ in range(2)] == ["measuring\n"] * 2
    popen.send_signal(signal.SIGINT)
    done = run_processes.finish(popen, timeout_s=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.slow
@pytest.mark.mpi
def test_mpi_carries_all_operations(run_processes: Processes) -> None:
    done = run_processes.paceline("bench", "comm", *SMALL, "--backend", "mpi", "--nproc", "2", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["ranks"], len(report["results"])) == (2, 6 * 4)
    assert "MPI" in report["carrier"]
    assert sum(result["wrong"] for result in report["results"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--backend", "nccl"), "needs 2 GPUs on this machine, one for each rank, but torch sees 0"),
        (("--backend", "nccl", "--mode", "one-process"), "--mode one-process needs 2 GPUs"),
        (("--mode", "one-process"), "which --backend gloo cannot"),
        (("--backend", "mpi", "--mode", "threads-per-device"), "an MPI rank is a process"),
        (("--nproc", "0"), "--nproc must be at least 1"),
        (("--link-gbps", "0"), "--link-gbps must be above 0"),
        (("--plot", "comm.png"), "must end in .svg"),
        (("--sizes", "8C"), "--sizes must be such as 8B:256MiB"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from paceline.cli import main

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "argv", ["paceline", "bench", "comm", *words])
    assert main() == 2
    assert message in capsys.readouterr().err


def test_the_link_is_what_the_user_or_the_kernel_says(tmp_path: Path) -> None:
    assert find_link(100.0, one_machine=False, interface=None).share(6.25) == 0.5
    assert find_link(None, one_machine=True, interface=None).share(1.0) is None
    (tmp_path / "ib0").mkdir()
    (tmp_path / "ib0" / "speed").write_text("25000\n")
    assert interface_speed_gbps("ib0", tmp_path) == 25.0
    (tmp_path / "ib0" / "speed").write_text("-1\n")
    assert interface_speed_gbps("ib0", tmp_path) is None
    assert interface_speed_gbps("eth9", tmp_path) is None
    routes = tmp_path / "route"
    routes.write_text(
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n"
        "eth1\t0000A8C0\t0\t1\t0\t0\t0\t00FFFFFF\neth0\t00000000\t0\t3\t0\t0\t0\t00000000\n"
    )
    assert default_interface(routes) == "eth0"
    assert default_interface(tmp_path / "none") is None


def test_sizes_are_written_for_people() -> None:
    assert [size_text(size) for size in (8, 1024, 1536, 3 * 2**20, 2**30)] == [
        *("8 B", "1 KiB", "1.5 KiB", "3 MiB", "1 GiB")
    ]
