from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import psutil
import pytest

from benchmarks import __main__ as command
from benchmarks import train as suites
from benchmarks.results import STEPS_PER_S, compare
from benchmarks.rounds import REPORT, BenchCommand, Sample, Variant, _half_speed, interleave
from benchmarks.tasks import Probe
from benchmarks.train import INSTALL, PEERS, Peer
from benchmarks.workloads import MLP
from paceline.core.errors import ConfigError, LaunchError

pytestmark = pytest.mark.integration


def ignore(line: str) -> None:
    """A progress that shows nothing."""


def python(code: str, *arguments: str) -> BenchCommand:
    return BenchCommand([sys.executable, "-c", code, *arguments])


def reporting(name: str, seconds: float) -> Variant:
    report = json.dumps({"steps": 10, "seconds": seconds, "loss": 0.5})
    code = "import sys; open(sys.argv[1], 'w').write(sys.argv[2])"
    return Variant(
        name=name,
        title=name.title(),
        commands=lambda directory: [python(code, str(directory / REPORT), report)],
    )


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "pid"
    os.mkfifo(path)
    return path


@pytest.fixture
def waiting_pids() -> Iterator[list[int]]:
    """Ids of processes that wait for ever; whatever the test did, they are ended."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)


WAIT = "import os, signal, sys; open(sys.argv[1], 'w').write(str(os.getpid())); signal.pause()"


def test_the_clock_runs_for_whole_steps_after_the_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 107.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    probe = Probe(warmup=2, steps=3, ticks_per_step=2)

    done = [probe.tick() for _ in range(11)]
    probe.write(tmp_path / REPORT, loss=0.25)

    assert done == [False] * 10 + [True]
    report = json.loads((tmp_path / REPORT).read_text())
    assert (report["steps"], report["seconds"], report["loss"]) == (3, 7.0, 0.25)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is read from /proc")
def test_memory_is_the_peak_beyond_the_imports(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from benchmarks.tasks import Probe\n"
        "imports = bytearray(b'x') * (64 << 20); del imports\n"
        "probe = Probe(warmup=0, steps=1); probe.note_imports()\n"
        "training = bytearray(b'x') * (32 << 20); del training\n"
        "probe.note_imports(); probe.tick(); probe.tick(); probe.write(Path(sys.argv[1]), 0.0)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / REPORT)], check=True, timeout=60)
    assert 31 < json.loads((tmp_path / REPORT).read_text())["memory_mib"] < 40


def test_contenders_take_turns_and_another_begins_each_round() -> None:
    order: list[tuple[int, str]] = []

    def on_sample(number: int, contender: Variant, sample: Sample) -> None:
        order.append((number, contender.name))

    samples = interleave([reporting("a", 2.0), reporting("b", 4.0)], 3, on_sample)

    assert order == [(1, "a"), (1, "b"), (2, "b"), (2, "a"), (3, "a"), (3, "b")]
    assert [sample["steps_per_s"] for sample in samples["a"]] == [5.0] * 3
    assert [sample["ms_per_step"] for sample in samples["b"]] == [400.0] * 3


def test_a_failing_process_is_shown_and_its_partners_are_ended(
    fifo: Path, waiting_pids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.rounds._GRACE_S", 0.2)
    fails = "import sys; open(sys.argv[1]).read(); sys.exit('the disk is full')"
    seen = fifo.with_name("seen")
    # The partner waits for ever, and has a child that does so too and ignores SIGTERM.
    partner = (
        "import os, signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "open(sys.argv[2], 'w').write(f'{os.getpid()} {child.pid}')\n"
        "open(sys.argv[1], 'w').close(); signal.pause()"
    )
    contender = Variant(
        name="x",
        title="Peer X",
        commands=lambda _: [python(partner, str(fifo), str(seen)), python(fails, str(fifo))],
    )
    with pytest.raises(LaunchError, match=r"Peer X failed with exit code 1.(?s:.*)the disk is full"):
        interleave([contender], 1, lambda *_: None)
    waiting_pids += [int(pid) for pid in seen.read_text().split()]
    assert len(waiting_pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in waiting_pids)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_benchmark_leaves_no_process(
    signum: signal.Signals, fifo: Path, waiting_pids: list[int]
) -> None:
    code = (
        "import sys; from benchmarks.rounds import *\n"
        "argv = [sys.executable, '-c', *sys.argv[1:]]\n"
        "interleave([Variant(name='x', title='X', commands=lambda _: [BenchCommand(argv)])], 1, print)"
    )
    with subprocess.Popen([sys.executable, "-c", code, WAIT, str(fifo)], stderr=subprocess.PIPE) as benchmark:
        try:
            waiting_pids.append(int(fifo.read_text()))
            benchmark.send_signal(signum)
            _, errors = benchmark.communicate(timeout=60)
        finally:
            benchmark.kill()
    assert b"KeyboardInterrupt" in errors
    assert not psutil.pid_exists(waiting_pids[0])


def test_ratios_are_taken_within_rounds() -> None:
    contenders = [reporting("a", 1.0), reporting("b", 1.0)]
    # The second round was slow for both; a ratio of the medians would say 1.5.
    samples = {
        "a": [{"steps_per_s": 100.0}, {"steps_per_s": 10.0}, {"steps_per_s": 80.0}],
        "b": [{"steps_per_s": 120.0}, {"steps_per_s": 20.0}, {"steps_per_s": 160.0}],
    }
    comparison = compare("Work", [STEPS_PER_S], contenders, samples)

    row = comparison.as_json()["rows"][1]
    assert row["steps_per_s"] == {"median": 120.0, "low": 20.0, "high": 160.0}
    assert row["ratio"] == {"median": 2.0, "low": 1.2, "high": 2.0}
    assert row["rounds"] == samples["b"]
    assert comparison.table().as_markdown().splitlines() == [
        "| Work | steps/s | min to max | ratio | min to max |",
        "| :-- | --: | --: | --: | --: |",
        "| A | 80.0 | 10.0 to 100.0 | 1.00x | 1.00 to 1.00 |",
        "| B | 120.0 | 20.0 to 160.0 | 2.00x | 1.20 to 2.00 |",
    ]


@pytest.mark.slow
def test_the_peers_do_the_same_work_and_a_missing_one_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PEERS, "absent", Peer(name="absent", title="Absent", package="not-installed"))
    peers: Any = ("absent", "ddp", "accelerate", "lightning")
    assert command.train(workload="mlp", peers=peers, rounds=1, steps=20, warmup=2, json=True) == 0
    output = capsys.readouterr()
    result = json.loads(output.out)

    assert result["missing"] == [{"name": "absent", "package": "not-installed", "install": INSTALL}]
    assert set(result["machine"]) >= {"cpu", "cores", "memory", "system", "torch", "date"}
    assert result["settings"]["steps"] == {"mlp": 20}
    [comparison] = result["comparisons"]
    assert comparison["baseline"] == "ddp"
    assert [row["name"] for row in comparison["rows"]] == ["ddp", "accelerate", "lightning"]
    # The same initial weights, batches, optimizer and schedule end in the same loss.
    losses = [row["rounds"][0]["loss"] for row in comparison["rows"]]
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-5)
    assert losses[0] < 2.0

    progress = output.err.splitlines()
    assert progress[0] == f"Absent is not installed and is left out: {INSTALL}"
    assert progress[1].startswith("round 1/1  784-32-10 MLP  hand-written DDP loop  ")
    assert len(progress) == 4


def test_paceline_is_measured_as_a_user_starts_it() -> None:
    result = suites.bench_train(
        workloads=[MLP],
        peers=["paceline-exact"],
        rounds=1,
        steps=20,
        warmup=2,
        microbatches=4,
        progress=ignore,
    )
    assert result.comparisons is not None
    [row] = result.comparisons[0].rows
    assert row.samples[0]["steps"] == 20
    assert row.samples[0]["loss"] < 2.0


@pytest.mark.slow
def test_what_recovery_costs_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.overhead(rounds=1, steps=4, json=True) == 0
    [comparison] = json.loads(capsys.readouterr().out)["comparisons"]
    assert (comparison["baseline"], comparison["ratio_of"]) == ("none", "ms_per_step")
    assert [row["name"] for row in comparison["rows"]] == ["none", "inplace"]


@pytest.mark.slow
def test_what_the_purity_guard_costs_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.guard(rounds=1, steps=40, json=True) == 0
    comparisons = json.loads(capsys.readouterr().out)["comparisons"]
    assert [[row["name"] for row in comparison["rows"]] for comparison in comparisons] == [["off", "warn"]] * 2
    for comparison in comparisons:
        off, warn = (row["rounds"][0]["ms_per_step"] for row in comparison["rows"])
        assert off > 0
        assert warn > 0
        assert off != warn


@pytest.mark.slow
def test_a_rank_at_half_speed_shares_with_another(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.shares(rounds=1, steps=4, warmup=2, json=True) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["settings"]["microbatches"] == 12
    [comparison] = result["comparisons"]
    assert (comparison["baseline"], comparison["ratio_of"]) == ("equal", "steps_per_s")
    assert [row["name"] for row in comparison["rows"]] == ["equal", "auto"]
    for row in comparison["rows"]:
        [sample] = row["rounds"]
        assert (sample["steps"], sample["slow_share"], sample["changes"]) == (4, 6, 0)


def test_a_process_at_half_speed_runs_on_when_it_is_over() -> None:
    code = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            with _half_speed(process):
                for number in range(20):
                    print(number, file=process.stdin, flush=True)
                    assert process.stdout.readline() == f"{number}\n"
            assert psutil.Process(process.pid).status() != psutil.STATUS_STOPPED
            process.stdin.close()
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()


def test_without_any_peer_the_command_to_install_them_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "lightning", Peer(name="lightning", title="Lightning", package="not-installed"))
    with pytest.raises(ConfigError, match=r"none of these peers is installed: lightning.*pip install .*accelerate"):
        command.train(workload="mlp", peers=("lightning",))


def test_the_table_names_machine_and_missing_peers(capsys: pytest.CaptureFixture[str]) -> None:
    contenders = [reporting("a", 1.0)]
    comparison = compare("Work", [STEPS_PER_S], contenders, {"a": [{"steps_per_s": 1234.5}]})
    result = suites._result("train", {"rounds": 1}, [comparison], [PEERS["accelerate"]])
    assert command.show(result) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "1,234.5" in output
    assert "cores" in output
    assert f"Accelerate is not installed and was left out: {INSTALL}" in output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "--rounds must be at least 1, but is 0"),
        ({"steps": 0}, "--steps must be at least 1, but is 0"),
        ({"warmup": -1}, "--warmup must not be negative, but is -1"),
        ({"microbatches": 3}, "micro-batches must be a multiple of the 2 ranks, up to 64, but is 3"),
        ({"microbatches": 66}, "up to 64, but is 66"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        command.train(**options)  # type: ignore[arg-type]


def test_every_peer_can_be_named() -> None:
    assert get_args(command.PeerName) == tuple(PEERS)


def test_no_name_means_two_options() -> None:
    suites = [name for name in command.app if not name.startswith("-")]
    assert {"train", "strategies", "serve", "tune", "recovery"} <= set(suites)
    for suite in suites:
        names = Counter(name for option in command.app[suite].assemble_argument_collection() for name in option.names)
        assert [name for name, count in names.items() if count > 1] == [], suite


@pytest.mark.parametrize(
    ("words", "code", "output"),
    [
        (("--help",), 0, "strategies"),
        (("train", "--help"), 0, "--peers"),
        (("train", "--rounds", "0"), 2, "benchmarks: --rounds must be at least 1"),
        (("nothing",), 2, "nothing"),
    ],
)
def test_suites_are_run_from_the_root_of_the_repository(words: tuple[str, ...], code: int, output: str) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *words], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code
    assert output in done.stdout + done.stderr


@pytest.mark.cold
def test_the_commands_import_no_torch() -> None:
    code = "import sys, benchmarks.__main__, benchmarks.train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
