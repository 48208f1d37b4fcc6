"""What runs the rows of ``make test-gpu`` and ``make bench-gpu``, tried on small rows of its own on the CPU."""

from __future__ import annotations

import inspect
import json
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.processes import Processes, runs

from benchmarks.gpu import checks, machine, pages, speed
from benchmarks.gpu.__main__ import unpack_site
from benchmarks.gpu.rows import Machine, Outcome, Row, as_json, as_markdown, from_json, line_of, run_rows
from benchmarks.gpu.turns import COUNTED, MEASURED, WARMUP, Contender, HostWaits, conduct

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
GPU = Machine(["Tesla 9"], True, {"torch": "2.13"})
REPORTS = """
from benchmarks.gpu.rows import report
report("42 GB/s", rate=42)
report(table=[["backend", "ms"], ["flash", "1.5"]])
"""
FAILS = "print('E   ValueError: no such kernel'); print('last'); raise SystemExit(3)"
CRASHES = "import os; os.kill(os.getpid(), 11)"
HANGS = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path({path!r}).write_text(str(child.pid))
time.sleep(600)
"""


def row(name: str, program: str, limit_s: float = 60, **options: Any) -> Row:
    return Row(name=name, title=f"{name}!", command=[sys.executable, "-c", program], limit_s=limit_s, **options)


def run(rows: list[Row], directory: Path, **options: Any) -> dict[str, Outcome]:
    options = {"jobs": 3, "seconds": 120, **options}
    shown: list[Outcome] = []
    variables = {"PYTHONPATH": str(ROOT)}
    outcomes = run_rows(rows, GPU, directory, variables=variables, on_outcome=shown.append, **options)
    assert sorted(each.name for each in shown) == sorted(each.name for each in rows)
    assert [each.name for each in outcomes] == [each.name for each in rows]
    return {each.name: each for each in outcomes}


def test_a_row_that_crashes_or_hangs_does_not_end_the_others(tmp_path: Path) -> None:
    child = tmp_path / "child"
    found = run(
        [
            row("hangs", HANGS.format(path=str(child)), limit_s=4),
            row("crashes", CRASHES),
            row("fails", FAILS),
            row("reports", REPORTS),
            row("two GPUs", REPORTS, gpus=2),
        ],
        tmp_path / "rows",
    )
    assert {name: outcome.status for name, outcome in found.items()} == {
        "hangs": "TIMED OUT",
        "crashes": "FAILED",
        "fails": "FAILED",
        "reports": "passed",
        "two GPUs": "not run here",
    }
    assert found["crashes"].notes == ["killed by SIGSEGV: it printed nothing"]
    assert found["fails"].notes == ["exit code 3: ValueError: no such kernel"]
    assert found["fails"].log[-1] == "last"
    assert found["reports"].notes == ["42 GB/s"]
    assert found["reports"].data == {"rate": 42}
    assert found["two GPUs"].notes == ["needs 2 GPUs, of which 1 is here"]
    assert not runs(int(child.read_text())), "a row's processes end with it"


def test_rows_share_the_gpu_unless_one_must_be_alone(tmp_path: Path) -> None:
    program = f"""
import pathlib, sys, time
here = pathlib.Path({str(tmp_path)!r})
name = sys.argv[1]
(here / name).touch()
end = time.monotonic() + 30
while name != "c" and len(list(here.glob("[ab]"))) < 2 and time.monotonic() < end:
    time.sleep(0.01)
seen = sorted(path.name for path in here.glob("[abc]"))
(here / name).rename(here / ("left-" + name)) if name == "c" else time.sleep(0.5)
(here / name).rename(here / ("left-" + name)) if name != "c" else None
raise SystemExit(0 if seen == (["c"] if name == "c" else ["a", "b"]) else 1)
"""
    rows = [
        Row(name=name, title=name, command=[sys.executable, "-c", program, name], limit_s=60, alone=name == "c")
        for name in ("a", "b", "c")
    ]
    found = run(rows, tmp_path / "rows", jobs=2)
    assert {name: outcome.status for name, outcome in found.items()} == dict.fromkeys("abc", "passed")


def test_what_there_is_no_time_for_is_in_the_table(tmp_path: Path) -> None:
    sleeps = row("sleeps", "import time; time.sleep(600)")
    found = run([sleeps, row("late", REPORTS)], tmp_path, jobs=1, seconds=6)
    assert (found["sleeps"].status, found["late"].status) == ("TIMED OUT", "out of time")


def outcomes() -> list[Outcome]:
    table = [["backend", "ms"], ["flash", "1.5"]]
    return [
        Outcome("attention", "its backward", "passed", 3.2, ["one | result"], table),
        Outcome("nccl", "two ranks", "FAILED", 9.0, ["exit code 1: hung"], log=["Traceback"]),
    ]


def test_the_table_is_read_by_people_and_machines() -> None:
    first, second = outcomes()
    assert line_of(first).splitlines()[-1].split() == ["flash", "1.5"]
    assert line_of(second).splitlines()[-1].strip() == "| Traceback"
    markdown = as_markdown(GPU, outcomes(), "2026-11-26")
    assert markdown.splitlines()[0] == "2026-11-26: 1 passed, 1 FAILED."
    assert "| `attention` | its backward | 3 | passed; one \\| result |" in markdown
    assert "| flash | 1.5 |" in markdown
    command, gpus, back, date = from_json(as_json("make test-gpu", GPU, outcomes(), "2026-11-26"))
    assert (command, gpus, date) == ("make test-gpu", GPU, "2026-11-26")
    assert as_markdown(gpus, back, date) == markdown


def test_the_documents_follow_from_the_results() -> None:
    nothing = "# GPU results\n\nIntroduction.\n\nNothing has been run on a GPU yet.\n"
    assert "Nothing has been run on a GPU yet" in pages.readme_line(nothing)
    page = pages.add_section(nothing, "make test-gpu", GPU, outcomes()[:1], "2026-11-25")
    page = pages.add_section(page, "make bench-gpu", GPU, outcomes(), "2026-11-25")
    page = pages.add_section(page, "make test-gpu", GPU, outcomes(), "2026-11-26")
    assert page.count("## 1 x Tesla 9: `make test-gpu`") == page.count("## 1 x Tesla 9: `make bench-gpu`") == 1
    assert "Nothing" not in page
    assert page.startswith("# GPU results\n\nIntroduction.\n\n## ")
    line = " ".join(pages.readme_line(page).split())
    assert "1 x Tesla 9 (`make test-gpu`, 2026-11-26: 1 passed, 1 FAILED)" in line
    assert "Never run on: several GPUs, several nodes, MIG." in line
    with pytest.raises(ValueError, match="not a GPU"):
        pages.write("make test-gpu", Machine(["Tesla 9"], False, {}), outcomes(), "2026-11-26")


def test_the_readme_says_what_the_results_say() -> None:
    assert pages.readme_line(pages.PAGE.read_text()) in pages.README.read_text()


@pytest.mark.parametrize("command", ["test", "bench"])
def test_without_a_gpu_one_line_says_so(run_processes: Processes, tmp_path: Path, command: str) -> None:
    if machine.describe()["problem"] is None:
        pytest.skip("this machine has a GPU")
    argv = ["make", "--silent", f"{command}-gpu", f"PYTHON={sys.executable}", f"OUT={tmp_path}"]
    ended = run_processes.run(argv, env={"MAKEFLAGS": "", "ARGS": ""}, cwd=ROOT)
    assert ended.returncode == 2
    assert ended.stdout == ""
    [said, _of_make] = ended.stderr.splitlines()
    assert "sees no GPU" in said
    assert "Nothing was run" in said
    assert list(tmp_path.iterdir()) == []


def test_wheels_are_unpacked_and_packages_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "thing-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("thing/__init__.py", "")
    [site] = unpack_site(tmp_path / "wheels", tmp_path / "work")
    assert (Path(site) / "thing" / "__init__.py").exists()
    assert unpack_site(Path(site), tmp_path / "work") == [site]


def test_every_row_names_tests_that_there_are(run_processes: Processes) -> None:
    tests = [word for each in checks.rows() for word in each.command if word.startswith("tests/")]
    argv = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "gpu", *tests]
    ended = run_processes.run(argv, cwd=ROOT, env={"PYTEST_ADDOPTS": ""})
    # 5: without a GPU all of them are deselected; 4 would be a name that there is not.
    assert ended.returncode in (0, 5), ended.stdout + ended.stderr
    files = {test.partition("::")[0] for test in tests}
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("test_*.py")} <= files
    for found in (checks.rows(), speed.rows(1), speed.rows(8)):
        assert len({each.name for each in found}) == len(found)


CONTENDER = """
import json, pathlib, sys, time
directory, name, rounds = pathlib.Path(sys.argv[1]), sys.argv[2], 2
for turn in range(rounds + 2):
    while (directory / "go").read_text() != f"{name} {turn}":
        time.sleep(0.001)
    if name == "dies" and turn == 2:
        raise SystemExit("RuntimeError: out of memory")
    with (directory / "order").open("a") as order:
        order.write(f"{name}{turn} ")
    found = {"waits": {"a.py:1": 8}} if turn > rounds else {"seconds": 0.5 + turn}
    path = directory / f"{name}.{turn}.0"
    path.with_suffix(".new").write_text(json.dumps({**found, "peak_bytes": 100 + turn}))
    path.with_suffix(".new").replace(path)
"""


def test_contenders_take_turns_and_one_that_dies_drops_out(tmp_path: Path) -> None:
    contenders = [
        Contender(name, name, [[sys.executable, "-c", CONTENDER, str(tmp_path), name]], 1)
        for name in ("one", "dies", "two")
    ]
    found = conduct(contenders, tmp_path, rounds=2, seconds=60)
    assert (tmp_path / "order").read_text().split() == [
        "one0",
        "dies0",
        "two0",
        "dies1",
        "two1",
        "one1",
        "two2",
        "one2",
        "one3",
        "two3",
    ]
    assert found["one"].seconds == found["two"].seconds == [1.5, 2.5]
    assert (found["one"].peak_bytes, found["one"].waits, found["one"].problem) == (103, {"a.py:1": 8}, None)
    assert (found["dies"].seconds, found["dies"].problem) == ([1.5], "RuntimeError: out of memory")


def test_host_waits_are_counted_by_their_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr("benchmarks.gpu.turns.IS_REAL", False)
    original, waits = torch.cuda.synchronize, HostWaits()
    waits.start()
    for _ in range(2):
        warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)
    warnings.warn("of something else", UserWarning, stacklevel=1)
    torch.cuda.synchronize()
    waits.stop()
    torch.cuda.synchronize()
    assert torch.cuda.synchronize is original
    by_hand = inspect.getsourcelines(test_host_waits_are_counted_by_their_lines)[1] + 6
    assert waits.by_place() == {f"benchmarks/test_gpu.py:{by_hand}": 2, "torch.cuda.synchronize": 1}


@pytest.mark.slow
def test_both_commands_run_on_a_pretended_gpu(run_processes: Processes, tmp_path: Path) -> None:
    for command, rows in (("test", ("agent", "NCCL, 1")), ("bench", ("snapshot", "ceilings"))):
        argv = [sys.executable, "-m", "benchmarks.gpu", command, "--stand-in", "--out", str(tmp_path), "--only", *rows]
        ended = run_processes.run(argv, cwd=ROOT, timeout_s=280)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "1 passed, 1 not run here" in ended.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{command}.{kind}" for command in ("bench", "test") for kind in ("json", "log", "md")
    ]


def test_the_figures_of_training_are_rates_and_ratios_of_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_GPU_ROW", str(tmp_path))
    loop = speed.Measured([2.0, 1.0], 2**30, {"a.py:1": 2 * COUNTED})
    ours = speed.Measured([1.0, 1.0], 2**31, {"b.py:2": COUNTED})
    measured = {"loop-1": loop, "deterministic-1": loop, "allreduce-1": ours, "exact-1": speed.Measured(problem="died")}
    titles = {name: name.upper() for name in measured}
    speed._report_training(measured, titles, 64, 1, [1], "NVIDIA H100 80GB HBM3", 1e12)
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    cells = {row[0]: row[1:] for row in outcome["table"][1:]}
    rate, spread, samples, mfu, ratio, waits, peak = cells["ALLREDUCE-1"]
    assert rate == f"{MEASURED:.2f}"
    assert (spread, samples, ratio) == ("8.00 to 8.00", "512", "1.50x (1.00 to 2.00)")
    assert (mfu, waits, peak) == (f"{8 * 64e12 / 989e12:.1%}", "1.0", "2.0")
    assert cells["EXACT-1"] == ["failed"] * 7
    assert "S = 1, exact of allreduce: unknown" in outcome["notes"]
    assert "host waits a step of ALLREDUCE-1: b.py:2 1" in outcome["notes"]
    assert WARMUP > 0
