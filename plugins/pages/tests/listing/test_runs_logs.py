from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ConfigError, LaunchError, PeerLostError, RunDirectoryError
from paceline.launch.job_records import JobRecord, add_record
from paceline.launch.launcher import JobStatus
from paceline.runs.directory import RunDirectory
from paceline.runs.failures import record_failure
from paceline_pages.logs_command import logs, merge_rank_lines
from paceline_pages.runs_command import find_runs, runs

LOGS = """
import sys
from paceline_pages.logs_command import logs
sys.exit(logs(sys.argv[1], follow=sys.argv[2] == "follow", lines=int(sys.argv[3])))
"""


def make_run(root: Path, name: str, *events: dict[str, Any], created: float = 1000.0) -> RunDirectory:
    """A run with these events, one each ten seconds."""
    directory = RunDirectory(root / name)
    directory.create()
    directory.write_manifest({"config": {"task": "fashion-mnist", "best_metric": "accuracy:max"}})
    records = [
        {"time": created + 10.0 * i, **e}
        for i, e in enumerate(({"event": "created", "task": "fashion-mnist"}, *events))
    ]
    directory.events.write_text("".join(json.dumps(r) + "\n" for r in records))
    return directory


def started(generation: int = 0, step: int = 0) -> dict[str, Any]:
    return {
        "event": "started",
        "generation": generation,
        "world_size": 2,
        "step": step,
        "microbatches": 12,
        "total_steps": 900,
    }


# --- paceline runs


def test_each_way_to_end_has_its_state(tmp_path: Path) -> None:
    make_run(tmp_path, "a-finished", started(), {"event": "finished"}, {"event": "backup", "step": 0, "version": 0})
    stopped = {"event": "stopped", "signal": "SIGTERM", "step": 7}
    make_run(tmp_path, "b-stopped", started(), stopped, {"event": "backup failed", "step": 7, "error": "a"})
    make_run(
        tmp_path,
        "c-failed",
        started(),
        {"event": "failed", "rank": 1, "error": "boom\nmore", "step": 8},
        {"event": "machines"},
    )
    make_run(tmp_path, "d-crashed", {"event": "finished"}, started(), {"event": "checkpoint", "step": 9, "version": 9})
    make_run(tmp_path, "e-never-started")
    running = make_run(tmp_path, "f-running", started())
    with running.locked():
        found = {run.name: run for run in find_runs(tmp_path)}
    assert {name: run.state for name, run in found.items()} == {
        "a-finished": "finished",
        "b-stopped": "stopped",
        "c-failed": "failed",
        "d-crashed": "crashed",
        "e-never-started": "crashed",
        "f-running": "running",
    }
    assert [run.step for run in found.values()] == [0, 7, 8, 9, None, 0]
    assert found["c-failed"].problem == "rank 1: boom"
    assert (found["d-crashed"].world_size, found["d-crashed"].microbatches) == (2, 12)


@pytest.mark.integration
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_full_disk_for_the_output_gets_one_line(tmp_path: Path, more: tuple[str, ...]) -> None:
    make_run(tmp_path, "one", started())
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "paceline", "runs", tmp_path, *more],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    said = "paceline: No space left on device. Free some space, and repeat the command.\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_a_finished_run_shows_its_result(tmp_path: Path) -> None:
    directory = make_run(tmp_path, "run", started(), {"event": "finished"})
    metrics = {"val": {"loss": 0.3, "accuracy": 0.91}, "test": {"loss": 0.4, "accuracy": 0.905}}
    directory.write_result({"task": "fashion-mnist", "steps": 900, "metrics": metrics})
    (run,) = find_runs(tmp_path)
    # The metric is the one that --best-metric watches, not the first one.
    assert (run.metric, run.value, run.step, run.total_steps) == ("test.accuracy", 0.905, 900, 900)


def test_a_running_run_shows_its_last_evaluation_and_step(tmp_path: Path) -> None:
    directory = make_run(tmp_path, "run", started())
    records: list[dict[str, Any]] = [{"kind": "train", "step": s, "epoch": s // 300} for s in range(1, 3000)]
    records.insert(2990, {"kind": "eval", "step": 2990, "epoch": 9, "split": "val", "metrics": {"accuracy": 0.5}})
    directory.metrics.write_text("".join(json.dumps(r) + "\n" for r in records) + '{"torn')
    assert directory.metrics.stat().st_size > 64 * 1024
    (run,) = find_runs(tmp_path)
    assert (run.step, run.epoch, run.metric, run.value) == (2999, 10, "val.accuracy", 0.5)


def test_time_at_work_leaves_the_pauses_out(tmp_path: Path) -> None:
    stopped = {"event": "stopped", "signal": "SIGINT", "step": 5}
    make_run(
        tmp_path,
        "run",
        started(),
        stopped,
        {"event": "noted", "time": 1020.0},
        started(1, 5) | {"time": 5000.0},
        {"event": "finished", "time": 5007.0},
    )
    (run,) = find_runs(tmp_path)
    assert run.seconds == 10.0 + 7.0
    assert run.created == 1000.0


def test_damaged_directories_get_a_row(tmp_path: Path) -> None:
    make_run(tmp_path, "good", started(), {"event": "finished"})
    make_run(tmp_path, "no-manifest", started()).manifest.unlink()
    make_run(tmp_path, "bad-manifest", started()).manifest.write_text("[[[")
    make_run(tmp_path, "bad-result", started()).result.write_text('{"steps":')
    odd = make_run(tmp_path, "odd-value", started(), {"event": "finished"})
    odd.write_result({"steps": 9, "metrics": {"val": {"accuracy": "high"}}})
    make_run(tmp_path, "foreign-events").events.write_text('[1, 2]\n{"no": "event"}\nnot json\n')
    make_run(tmp_path, "binary").events.write_bytes(b"\xff\xfe\x00")
    make_run(tmp_path, "bad-config").manifest.write_text('config = "text"')
    (tmp_path / "notes").mkdir()
    (tmp_path / "file.txt").write_text("no run")
    found = {run.name: run for run in find_runs(tmp_path)}
    assert found.pop("good").state == "finished"
    assert {run.state for run in found.values()} == {"damaged"}
    assert sorted(found) == [
        "bad-config",
        "bad-manifest",
        "bad-result",
        "binary",
        "foreign-events",
        "no-manifest",
        "odd-value",
    ]
    assert runs(tmp_path) == 0  # the table can be printed
    assert "has no run.toml" in str(found["no-manifest"].problem)
    assert all(run.problem for run in found.values())


@pytest.mark.usefixtures("plain_user")
def test_a_run_of_somebody_else_hides_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    root = Path("elsewhere")
    make_run(root, "own", started(), {"event": "finished"})
    closed = make_run(root, "closed", started())
    closed.path.chmod(0)
    try:
        assert runs(root, json=True) == 0
        printed = capsys.readouterr()
        assert [run["name"] for run in json.loads(printed.out)] == ["own"]
        assert "1 of the folders cannot be read, first [Errno 13] Permission denied: 'elsewhere/closed" in printed.err
        with pytest.raises(RunDirectoryError, match=r"closed cannot be read: Permission denied"):
            runs(closed.path)
        with pytest.raises(RunDirectoryError, match=r"inside cannot be read: Permission denied\. Give the"):
            runs(closed.path / "inside")
    finally:
        closed.path.chmod(0o700)


def test_the_table_and_the_json_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, "younger", started(), {"event": "finished"}, created=2000.0)
    make_run(tmp_path, "older", started(), {"event": "stopped", "step": 7, "signal": "SIGTERM"}, created=1000.0)
    (tmp_path / "younger" / "run.toml").unlink()

    assert runs(tmp_path, json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(run["name"], run["state"]) for run in found] == [("younger", "damaged"), ("older", "stopped")]

    assert runs(tmp_path) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "er " in line]
    assert rows[0][:2] == ["younger", "damaged"]
    assert rows[1][:7] == ["older", "stopped", "fashion-mnist", "2", "x", "12", "7/900"]


def test_no_runs_is_no_error_but_a_wrong_folder_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert runs() == 0
    assert "No runs in runs/ yet. Start one: paceline train" in capsys.readouterr().out
    assert runs(json=True) == 0
    assert json.loads(capsys.readouterr().out) == []
    with pytest.raises(RunDirectoryError, match="no directory elsewhere"):
        runs(Path("elsewhere"))


def test_searches_are_listed_and_their_trials(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    search = tmp_path / "search"
    make_run(search / "trials", "00000", {"event": "finished"})
    settings = {"options": {"task": "[bold]task.py:Net"}, "metric": "accuracy:max", "trials": 4}
    (search / "tune.json").write_text(json.dumps(settings))
    result = {"done": True, "planned": 5, "best": {"accuracy": 0.75, "run": "trials/00000"}}
    (search / "result.json").write_text(json.dumps(result))
    assert runs(tmp_path) == 0
    out = capsys.readouterr().out
    (line,) = (line.split() for line in out.splitlines() if line.startswith(" search ") and "state" not in line)
    assert line == ["search", "finished", "[bold]task.py:Net", "5", "accuracy", "0.75"]
    assert f"paceline runs --compare {search}" in out
    assert "No runs" not in out
    assert runs(search) == 0
    assert "00000  finished" in capsys.readouterr().out
    assert runs(search, json=True) == 0
    assert [run["name"] for run in json.loads(capsys.readouterr().out)] == ["00000"]
    make_run(tmp_path, "alone", {"event": "finished"})
    assert runs(tmp_path, json=True) == 0
    assert [run["name"] for run in json.loads(capsys.readouterr().out)] == ["alone"]


def test_markup_in_names_is_shown_and_not_obeyed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, "[red]x", {"event": "failed", "error": "list[int] [bold]"})
    runs(tmp_path)
    out = capsys.readouterr().out
    assert "[red]x" in out
    assert "list[int] [bold]" in out


@pytest.mark.cold
@pytest.mark.integration
def test_neither_command_imports_torch() -> None:
    code = (
        "import sys, paceline_pages.runs_command, paceline_pages.logs_command;"
        "sys.exit('torch' in sys.modules or 'rich.table' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# --- paceline logs


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = make_run(tmp_path, "run", started(), {"event": "finished"})
    for rank in range(12):
        directory.log_of(rank).write_text("".join(f"line {i} of {rank}\n" for i in range(100)))
    return directory


def test_all_ranks_are_shown_with_their_prefix(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert logs(str(run.path), lines=2) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["rank 0 | line 98 of 0", "rank 0 | line 99 of 0", "rank 1 | line 98 of 1"]
    # Ranks are in the order of their numbers, not of their names.
    assert lines[-1] == "rank 11 | line 99 of 11"
    assert len(lines) == 24


def test_what_several_ranks_print_is_shown_once(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(12):
        own = f"loss {rank}" if rank in (3, 4) else "loss"
        run.log_of(rank).write_text(f"start\n{own}\nwait\nwait\nwait\n0%\r50%\r100%\n" + "odd\n" * (rank == 7))
    logs(str(run.path))
    assert capsys.readouterr().out.splitlines() == [
        "ranks 0-11 | start",
        "ranks 0-2,5-11 | loss",
        "rank 3 | loss 3",
        "rank 4 | loss 4",
        "ranks 0-11 | wait  (3 times)",
        "ranks 0-11 | 100%",
        "rank 7 | odd",
    ]


@given(st.dictionaries(st.integers(0, 4), st.lists(st.sampled_from("abc"), max_size=8), max_size=4))
def test_folding_keeps_every_line_of_every_rank_in_its_order(lines: dict[int, list[str]]) -> None:
    unfolded: dict[int, list[str]] = {rank: [] for rank in lines}
    for ranks, line, times in merge_rank_lines(lines):
        for rank in ranks:
            unfolded[rank] += [line] * times
    assert unfolded == lines


@given(st.dictionaries(st.integers(0, 9), st.lists(st.sampled_from("abcd"), max_size=8), max_size=6))
def test_folding_holds_back_what_others_print_later(lines: dict[int, list[str]]) -> None:
    """What comes next is what the fewest other ranks print later; then, what the lowest rank prints."""
    waiting = {rank: [(key, len(list(same))) for key, same in groupby(own)] for rank, own in lines.items()}
    for ranks, line, times in merge_rank_lines(lines):
        heads = {rank: own[0] for rank, own in sorted(waiting.items()) if own}
        others = {
            rank: sum(head in own and heads[other] != head for other, own in waiting.items())
            for rank, head in heads.items()
        }
        chosen = heads[min(heads, key=lambda rank: (others[rank], rank))]
        assert (line, times) == chosen
        assert ranks == tuple(rank for rank in heads if heads[rank] == chosen)
        for rank in ranks:
            del waiting[rank][0]
    assert not any(waiting.values())


def test_folding_what_many_ranks_print() -> None:
    ranks = 1024
    lines = {rank: [*(f"line {i} of {rank}" for i in range(50)), "end"] for rank in range(ranks)}
    *own, end = merge_rank_lines(lines)
    assert own == [((rank,), f"line {i} of {rank}", 1) for rank in range(ranks) for i in range(50)]
    assert end == (tuple(range(ranks)), "end", 1)


def test_only_lines_that_match(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert logs(str(run.path), grep=r"line 9[89] of 1\b") == 0
    assert capsys.readouterr().out == "rank 1 | line 98 of 1\nrank 1 | line 99 of 1\n"
    with pytest.raises(ConfigError, match=r"--grep '\(' is not a regular expression"):
        logs(str(run.path), grep="(")


def test_the_first_error_comes_first(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    run.append_event("failed", error="ValueError: five broke it")
    record_failure(run, 5, ValueError("five broke it"))
    record_failure(run, 2, PeerLostError("rank 5 went away"))
    logs(str(run.path), lines=1)
    out = capsys.readouterr().out
    assert out.startswith("first error: rank 5 failed first: ValueError: five broke it\n")
    assert "went away" not in out.partition("\n\n")[0]


@pytest.mark.parametrize("end", ["finished", "stopped"])
def test_a_run_that_ended_well_has_no_first_error(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], end: str
) -> None:
    """Rank 20 is of an earlier start, with more of them."""
    record_failure(run, 20, ValueError("twenty broke it"))
    run.append_event(end)
    logs(str(run.path), lines=1)
    assert "twenty broke it" not in capsys.readouterr().out


@pytest.mark.parametrize(("count", "first"), [(1, 99), (3, 97), (100, 0), (1000, 0)])
def test_one_rank_is_shown_as_it_is(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], count: int, first: int
) -> None:
    assert logs(str(run.path), rank=3, lines=count) == 0
    assert capsys.readouterr().out == "".join(f"line {i} of 3\n" for i in range(first, 100))


def test_lines_longer_than_a_block_and_unfinished_ones(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 200_000
    run.log_of(0).write_text(f"first\n{long}\n\nunfinished")
    logs(str(run.path), rank=0, lines=3)
    assert capsys.readouterr().out == f"{long}\n\nunfinished\n"
    logs(str(run.path), rank=0, lines=0)
    assert capsys.readouterr().out == ""


def test_an_empty_log_and_bytes_that_are_no_text(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    run.log_of(0).write_bytes(b"")
    run.log_of(1).write_bytes(b"\xff\xfe ok\n")
    assert logs(str(run.path), rank=0) == 0
    assert logs(str(run.path), rank=1) == 0
    assert capsys.readouterr().out == "\ufffd\ufffd ok\n"


def test_what_is_not_there_is_named(run: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"absent is not a run directory.*paceline runs"):
        logs(str(tmp_path / "absent"))
    with pytest.raises(RunDirectoryError, match=r"no log of rank 12\. Ranks with logs: 0, 1, 2, .*11\."):
        logs(str(run.path), rank=12)
    with pytest.raises(ConfigError, match="--lines must be 0 or more, but is -1"):
        logs(str(run.path), lines=-1)
    silent = make_run(tmp_path, "silent")
    with pytest.raises(RunDirectoryError, match="has no logs: it has not started yet"):
        logs(str(silent.path))


def test_following_a_run_that_has_ended_shows_it_and_ends(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert logs(str(run.path), rank=0, follow=True, lines=1) == 0
    assert capsys.readouterr().out == "line 99 of 0\n"


@contextmanager
def following(what: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", LOGS, what, "follow", "1"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


@pytest.mark.integration
@pytest.mark.timeout(60)
def test_following_shows_new_lines_new_ranks_and_replaced_files_until_the_run_ends(tmp_path: Path) -> None:
    directory = make_run(tmp_path, "run", started())
    directory.log_of(0).write_text("old\nlast\n")
    with following(str(directory.path)) as process:
        assert process.stdout is not None
        with directory.locked():
            assert process.stdout.readline() == "rank 0 | last\n"
            append(directory.log_of(0), "new, in two ")
            append(directory.log_of(0), "parts\n")
            assert process.stdout.readline() == "rank 0 | new, in two parts\n"
            append(directory.log_of(1), "a rank that starts later\n")
            assert process.stdout.readline() == "rank 1 | a rank that starts later\n"
            directory.log_of(1).unlink()
            append(directory.log_of(1), "replaced\n")
            assert process.stdout.readline() == "rank 1 | replaced\n"
            directory.log_of(0).write_text("cut\n")
            assert process.stdout.readline() == "rank 0 | cut\n"
            append(directory.log_of(0), "the end")
            directory.append_event("finished")
        assert process.stdout.read() == "rank 0 | the end\n"
        assert process.wait() == 0


def add_job(launcher: str, run: RunDirectory, reference: dict[str, Any]) -> None:
    """Record job 7, whose run this is."""
    record = JobRecord(
        id=f"{launcher}-7",
        launcher=launcher,
        name="sweep",
        command=("x",),
        directory=str(run.path.parent),
        run=str(run.path),
        reference=reference,
    )
    add_record(record)


@pytest.mark.integration
@pytest.mark.timeout(60)
def test_following_a_job_goes_on_where_its_run_has_stopped_but_the_job_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    directory = make_run(tmp_path, "run", started(), {"event": "stopped", "signal": "SIGUSR1", "step": 7})
    directory.log_of(0).write_text("saved\n")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as job:
        created = psutil.Process(job.pid).create_time()
        reference = {"id": "7", "pid": job.pid, "created": created, "directory": str(tmp_path)}
        add_job("mpi", directory, reference)
        with following("mpi-7") as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "rank 0 | saved\n"
            append(directory.log_of(0), "started again\n")
            assert process.stdout.readline() == "rank 0 | started again\n"
            job.communicate(b"\n")
            assert process.stdout.read() == ""
            assert process.wait() == 0


def test_following_a_job_bears_with_a_system_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    directory = make_run(tmp_path, "run", started(), {"event": "stopped", "signal": "SIGUSR1", "step": 7})
    directory.log_of(0).write_text("saved\n")
    add_job("slurm", directory, {"id": "7"})
    asked = []

    def status(record: JobRecord) -> JobStatus:
        asked.append(record.id)
        if len(asked) == 1:
            raise LaunchError("the cluster is not reachable.")
        return JobStatus(state="succeeded", exit_code=0)

    monkeypatch.setattr(JobRecord, "status", status)
    assert logs("slurm-7", follow=True) == 0
    assert len(asked) == 2
    printed = capsys.readouterr()
    assert printed.out == "rank 0 | saved\n"
    assert printed.err == "paceline: the cluster is not reachable. Retrying for 10 min.\n"


@pytest.mark.integration
@pytest.mark.timeout(60)
def test_ctrl_c_ends_following_without_a_traceback(tmp_path: Path) -> None:
    directory = make_run(tmp_path, "run", started())
    directory.log_of(0).write_text("hello\n")
    with directory.locked(), following(str(directory.path)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "rank 0 | hello\n"
        os.kill(process.pid, 2)
        assert process.wait() == 130
        assert process.stdout.read() == ""


@pytest.mark.integration
@pytest.mark.cold
def test_a_reader_that_has_seen_enough_is_no_error(run: RunDirectory) -> None:
    run.log_of(0).write_text("x" * 100 + "\n" * 50_000)
    command = [sys.executable, "-m", "paceline", "logs", str(run.path), "--lines", "10000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=30) == 0


def test_colours_only_on_a_terminal(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    logs(str(run.path), lines=1)
    assert not re.search("\x1b", capsys.readouterr().out)
