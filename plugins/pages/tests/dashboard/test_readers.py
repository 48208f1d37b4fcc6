"""What is read of run directories: curves, alerts, states and beats."""

from __future__ import annotations

import fcntl
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.core.test_file_lock import lock_as_another_node
from tests.runs.made import beat, make_run, record
from tests.runs.packages.conftest import manifest_of

from paceline.runs.checkpoint_manifest import write_file
from paceline.runs.directory import RunDirectory
from paceline.runs.package_registry import Registry, parse_reference
from paceline.runs.rank_progress import BEAT_S, Heartbeat
from paceline_pages.dashboard import RunCache, log_tail
from paceline_pages.run_index import MAX_POINTS, Curves, Index, alerts, read_beats
from paceline_pages.run_status import summarise
from paceline_pages.runs_command import runs


def append(path: Path, *lines: str) -> None:
    with path.open("a") as file:
        file.write("".join(lines))


def test_curves_follow_a_file_that_grows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    curves = Curves(path)
    curves.update()
    assert curves.as_json() == {}
    append(path, json.dumps(record(1, 0.0)) + "\n", json.dumps(record(2, 0.0))[:20])
    curves.update()
    assert curves.as_json()["loss"] == {"step": [1], "mean": [1.0]}
    append(path, json.dumps(record(2, 0.0))[20:] + "\n")
    append(path, json.dumps({"kind": "eval", "step": 2, "split": "val", "metrics": {"accuracy": 0.5}}) + "\n")
    curves.update()
    assert curves.as_json()["loss"]["step"] == [1, 2]
    assert curves.as_json()["val.accuracy"] == {"step": [2], "mean": [0.5]}
    assert [row["rank"] for row in curves.ranks] == [0, 1]


def test_a_file_that_a_resume_has_replaced_is_read_anew(tmp_path: Path) -> None:
    path, other = tmp_path / "metrics.jsonl", tmp_path / "other"
    append(path, *(json.dumps(record(step, 0.0)) + "\n" for step in range(1, 6)))
    curves = Curves(path)
    curves.update()
    append(other, *(json.dumps(record(step, 0.0)) + "\n" for step in range(1, 4)))
    other.replace(path)
    curves.update()
    assert curves.as_json()["loss"]["step"] == [1, 2, 3]


def test_many_records_are_few_points_that_hide_no_spike(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    steps, spike = 5 * MAX_POINTS + 3, 1234
    values = {step: 100.0 if step == spike else math.sin(step) for step in range(1, steps + 1)}
    append(
        path,
        *(json.dumps({"kind": "train", "step": s, "loss": v, "ranks": []}) + "\n" for s, v in values.items()),
    )
    curves = Curves(path)
    curves.update()
    loss = curves.as_json()["loss"]
    assert len(loss["step"]) <= MAX_POINTS
    assert loss["step"][-1] == steps
    assert max(loss["high"]) == 100.0
    (place,) = (i for i, high in enumerate(loss["high"]) if high == 100.0)
    assert loss["step"][place - 1] < spike <= loss["step"][place]
    first = range(1, loss["step"][0] + 1)
    assert loss["mean"][0] == pytest.approx(sum(values[step] for step in first) / len(first))


def test_a_few_last_records_are_no_drop_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    values = [*[1.0] * 2 * MAX_POINTS, 0.0]  # a short last batch, for one
    append(path, *(json.dumps({"kind": "train", "step": s, "loss": v}) + "\n" for s, v in enumerate(values, 1)))
    curves = Curves(path)
    curves.update()
    loss = curves.as_json()["loss"]
    group = 2 * MAX_POINTS // len(loss["step"])
    assert (loss["step"][-1], loss["low"][-1], loss["high"][-1]) == (len(values), 0.0, 1.0)
    assert loss["mean"][-1] == pytest.approx(group / (group + 1))
    append(path, *(json.dumps({"kind": "train", "step": len(values) + n, "loss": 1.0}) + "\n" for n in range(1, 8)))
    curves.update()
    assert curves.as_json()["loss"]["mean"][-2] == pytest.approx((group - 1) / group)


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "7",
        '{"kind": "train"}',
        '{"kind": "train", "step": 1, "loss": "high", "ranks": "none", "logged": {"a": [1]}}',
        '{"kind": "eval", "step": 1, "split": "val", "metrics": 3}',
        '{"kind": "train", "step": 1, "loss": true, "lr": NaN, "samples_per_s": Infinity}',
    ],
)
def test_foreign_lines_are_passed_over(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, line + "\n", json.dumps(record(2, 0.0)) + "\n")
    curves = Curves(path)
    curves.update()
    assert curves.as_json()["loss"]["step"] == [2]


def facts(**changed: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {"state": "running", "problem": None, "events": (), "beats": (), "nonfinite": ()}
    return {**usual, "disk": (2**40, 2**41), "now": 1000.0, **changed}


@pytest.mark.parametrize(
    ("changed", "kind", "text"),
    [
        ({"state": "crashed"}, "ended", "without a final event"),
        ({"state": "failed", "problem": "rank 1: boom"}, "ended", "rank 1: boom"),
        ({"nonfinite": [7, 9]}, "loss", "NaN or infinite at step 9"),
        ({"disk": (2**20, 2**40)}, "disk", "0.00 GiB free"),
        ({"events": [{"event": "fault", "time": 900.0}] * 2}, "fault", r"\(2 times\)"),
        ({"events": [{"event": "hang", "time": 900.0}]}, "fault", "training hung"),
        ({"events": [{"event": "checkpoint failed", "time": 1.0, "error": "full"}]}, "checkpoint", "full"),
        (
            {"events": [{"event": "corruption", "time": 1.0, "sentence": "rank 2 ..."}]},
            "corruption",
            "rank 2",
        ),
    ],
)
def test_what_a_person_should_look_at(changed: dict[str, Any], kind: str, text: str) -> None:
    import re

    (alert,) = alerts(**facts(**changed))
    assert alert.kind == kind
    assert re.search(text, alert.text)


def test_what_is_over_is_no_alert() -> None:
    events = [
        {"event": "fault", "time": 1.0},
        {"event": "checkpoint failed", "time": 2.0, "error": "full"},
        {"event": "checkpoint", "time": 3.0},
    ]
    assert alerts(**facts(events=events)) == []
    assert alerts(**facts(disk=(2**20, 2**21), state="finished")) == []


def test_a_silent_rank_and_a_run_that_stands_still_are_told(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", steps=1)
    beat(directory, 0)
    beat(directory, 1, ago_s=200)
    beats = read_beats(directory)
    found = alerts(**facts(beats=beats, now=time.time()))
    assert [alert.kind for alert in found] == ["silent"]
    assert "rank 1" in found[0].text
    assert [alert.kind for alert in alerts(**facts(beats=beats, now=time.time() + 300))] == [
        "silent",
        "progress",
    ]


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([{"event": "finished"}], "finished"),
        ([{"event": "failed", "rank": 1, "error": "boom"}], "failed"),
        ([{"event": "stopped", "cause": "SIGTERM", "step": 3}], "preempted"),
        ([{"event": "stopped", "cause": "walltime", "step": 3}], "preempted"),
        ([{"event": "stopped", "cause": "SIGINT", "step": 3}], "stopped"),
        ([{"event": "stopped", "cause": "the search", "step": 3}], "stopped"),
        ([], "crashed"),
    ],
)
def test_the_state_in_a_word(tmp_path: Path, events: list[dict[str, Any]], state: str) -> None:
    make_run(tmp_path / "run", events, steps=3)
    told = Index([tmp_path]).rows()
    assert [run["state"] for run in told["runs"]] == [state]


def test_a_run_on_another_machine_is_active_while_it_beats(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", steps=3)
    for rank in (0, 1):
        beat(directory, rank, step=9)
    lock_as_another_node(directory.lock)
    (run,) = Index([tmp_path]).rows()["runs"]
    assert (run["state"], run["step"], run["steps_per_s"]) == ("running", 9, 2.5)
    with (directory.events).open("a") as file:
        file.write(json.dumps({"event": "paused", "time": time.time(), "node": "b", "why": "alone"}) + "\n")
    assert [r["state"] for r in Index([tmp_path]).rows()["runs"]] == ["waiting"]


def test_a_clock_that_was_set_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was written before it is in the future now."""
    directory = make_run(tmp_path / "run", steps=3, age_s=-3600.0)
    beat(directory, 0, step=9, ago_s=-3600.0)
    (run,) = Index([tmp_path]).rows()["runs"]
    assert (run["state"], run["seconds"]) == ("crashed", 0.0), "a beat an hour ahead is no sign of life"
    with directory.events.open("a") as file:
        started = {"event": "started", "generation": 1, "world_size": 1, "microbatches": 4, "step": 3}
        file.write(json.dumps({"time": time.time(), **started, "total_steps": 100}) + "\n")
        file.write(json.dumps({"time": time.time() - 50.0, "event": "finished"}) + "\n")
    assert summarise(directory).seconds == 0.0, "no time is negative"
    assert runs(root=tmp_path) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "task.py:Task" in line)
    assert row.split()[-2:] == ["0s", "0s"], "age and time"


def test_only_what_changed_is_told_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline_pages.run_index.REFRESH_S", 0.0)
    for name in ("a", "b", "c"):
        make_run(tmp_path / name, [{"event": "finished"}], steps=2)
    index = Index([tmp_path, tmp_path / "a"])
    told = index.rows()
    tag = told["tag"]
    assert sorted(run["name"] for run in told["runs"]) == ["a", "b", "c"]
    assert not told["part"]
    assert index.rows(tag)["runs"] == []
    make_run(tmp_path / "b", [{"event": "failed", "error": "boom"}], steps=2)
    told = index.rows(tag)
    later = told["tag"]
    assert [(run["name"], run["state"]) for run in told["runs"]] == [("b", "failed")]
    (gone,) = (run["id"] for run in index.rows()["runs"] if run["name"] == "c")
    (tmp_path / "c").rename(tmp_path / "c-elsewhere")
    assert index.rows(later)["removed"] == [gone]
    assert index.directory(gone) is None
    assert index.rows("00000000-7")["part"] is False


def test_what_is_being_removed_is_no_run(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    make_run(tmp_path / ".gc-0123456789abcdef")
    assert [row["name"] for row in Index([tmp_path]).rows()["runs"]] == ["run"]


def test_finished_runs_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline_pages.run_index.REFRESH_S", 0.0)
    make_run(tmp_path / "run", [{"event": "finished"}], steps=2)
    index = Index([tmp_path])
    index.rows()
    monkeypatch.setattr("paceline_pages.run_index.summarise", lambda directory: pytest.fail("it was read again"))
    index.rows()


def test_a_run_shows_its_whole_configuration(tmp_path: Path) -> None:
    fields, options = {"lr": 0.2, "epochs": 3}, {"epochs": 4, "keep_checkpoints": 9, "run_dir": "run"}
    directory = make_run(tmp_path / "run", steps=1, fields=fields, config=options)
    (row,) = Index([tmp_path]).rows()["runs"]
    config = RunCache().detail("0", directory, row)["config"]
    assert config == {"task": "task.py:Task", "lr": 0.2, "task.epochs": 3, "epochs": 4, "keep_checkpoints": 9}


def test_a_run_leads_to_its_report_packages_and_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_REGISTRY", str(tmp_path / "registry"))
    registry = Registry.of_user()
    with registry.draft() as draft:
        names = ("weights.safetensors", "program.pt2", "README.md")
        files = {name: write_file(draft / name, [name.encode()]) for name in names}
        digest = registry.commit(draft, manifest_of(files=files))
    registry.put_tag(parse_reference("demo@latest"), digest)
    (tmp_path / "registry" / "packages" / ("0" * 64)).mkdir()  # a damaged one
    ours = make_run(tmp_path / "ours", steps=1, run_id="0123456789abcdef")
    other = make_run(tmp_path / "other", steps=1)
    (ours.path / "report.html").write_text("a report")
    (ours.path / "trackers").mkdir()
    for name, url in (("mlflow", "http://tracker/#/runs/1"), ("bad", "javascript:alert(1)"), ("wandb", None)):
        (ours.path / "trackers" / f"{name}.json").write_text(json.dumps({"run": "1", "url": url, "sent": {}}))
    (ours.path / "trackers" / "torn.json").write_text("{")
    cache = RunCache()
    detail = cache.detail("0", ours, {})
    assert (detail["report"], detail["packages"]) == (True, ["demo@latest"])
    urls = {tracker["name"]: tracker["url"] for tracker in detail["trackers"]}
    assert urls == {"bad": None, "mlflow": "http://tracker/#/runs/1", "wandb": None}
    detail = cache.detail("1", other, {})
    assert (detail["report"], detail["packages"], detail["trackers"]) == (False, [], [])


def test_a_search_is_listed_and_its_trials_belong_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline_pages.run_index.REFRESH_S", 0.0)
    search = tmp_path / "search"
    for number in range(3):
        make_run(search / "trials" / f"{number:05d}", [{"event": "finished"}], steps=1)
    make_run(tmp_path / "alone", [{"event": "finished"}], steps=1)
    settings = {"metric": "loss:min", "trials": 5, "options": {"task": "task.py:Task"}}
    (search / "tune.json").write_text(json.dumps(settings))
    index = Index([tmp_path])
    answer = index.rows()
    (row,) = answer["searches"]
    assert {(run["name"], run["search"]) for run in answer["runs"]} == {
        ("alone", None),
        *((f"{number:05d}", row["id"]) for number in range(3)),
    }
    assert (row["name"], row["state"], row["planned"], row["value"]) == ("search", "stopped", 5, None)
    with (search / "tune.lock").open("a+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert index.rows()["searches"][0]["state"] == "running"
    best = {"trial": 1, "loss": 0.25, "run": "trials/00001"}
    (search / "result.json").write_text(json.dumps({"done": True, "planned": 3, "best": best}))
    (row,) = index.rows()["searches"]
    (trial,) = (run for run in index.rows()["runs"] if run["name"] == "00001")
    assert (row["state"], row["planned"], row["value"], row["best"]) == ("finished", 3, 0.25, trial["id"])
    for name, metric in ((search / "trials" / "00001", "val.loss"), (tmp_path / "alone", "test.loss")):
        with (name / "metrics.jsonl").open("a") as file:
            for split in ("val", "test"):
                evaluated = {"kind": "eval", "step": 1, "epoch": 0, "split": split, "metrics": {"loss": 0.5}}
                file.write(json.dumps(evaluated) + "\n")
        assert summarise(RunDirectory(name)).metric == metric, "trials are compared by what their search ranks by"
    # Damaged files, and a search that goes, hide nothing else.
    (search / "tune.json").write_text("[")
    (search / "result.json").write_text('{"best": {"loss": "low"}}')
    assert index.rows()["searches"][0]["value"] is None
    (search / "tune.json").unlink()
    assert index.rows()["searches"] == []
    assert Index([search]).rows()["searches"] == []


def test_a_damaged_run_is_shown_as_far_as_it_can_be_read(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", steps=3)
    directory.manifest.write_text("= = =")
    append(directory.events, '{"event": "group"}\n')
    (row,) = Index([tmp_path]).rows()["runs"]
    assert (row["state"], row["alerts"][0]["kind"]) == ("damaged", "ended")
    detail = RunCache().detail("0", directory, row)
    assert detail["config"] is None
    assert [problem.partition(":")[0] for problem in detail["problems"]] == ["config"]


@pytest.mark.usefixtures("plain_user")
def test_what_may_not_be_read_hides_no_other_run() -> None:
    root = Path("runs")
    make_run(root / "good", [{"event": "finished"}], steps=3)
    closed, half_open = make_run(root / "closed"), make_run(root / "half-open", steps=3)
    half_open.events.chmod(0)
    closed.path.chmod(0)
    try:
        index = Index([root, root / "closed", root / "closed" / "inside"])
        rows = {row["name"]: row for row in index.rows()["runs"]}
    finally:
        closed.path.chmod(0o700)
    assert {name: row["state"] for name, row in rows.items()} == {"good": "finished", "half-open": "damaged"}
    assert "Permission denied" in rows["half-open"]["alerts"][0]["text"]


@pytest.mark.parametrize(
    ("file", "line", "state"),
    [
        ("events.jsonl", b"\xff\xfe\n", "running"),
        ("events.jsonl", b'{"event": "group", "time": null}\n', "running"),
        ("events.jsonl", b'{"event": "group", "time": "noon"}\n', "running"),
        ("metrics.jsonl", b"\xff\xfe\n", "running"),
        ("metrics.jsonl", b'7\n[]\n{"kind": "train", "epoch": 0, "loss": null}\n', "running"),
        ("metrics.jsonl", b'{"kind": "train", "epoch": 0, "step": "last"}\n', "damaged"),
    ],
)
def test_a_damaged_file_hides_no_other_run(tmp_path: Path, file: str, line: bytes, state: str) -> None:
    make_run(tmp_path / "good", [{"event": "finished"}], steps=3)
    bad = make_run(tmp_path / "bad", steps=0)
    beat(bad, 0)
    with (bad.path / file).open("ab") as appended:
        appended.write(line)
    with bad.locked():
        rows = {row["name"]: row for row in Index([tmp_path]).rows()["runs"]}
    assert {name: row["state"] for name, row in rows.items()} == {"good": "finished", "bad": state}
    assert bool(rows["bad"]["alerts"]) == (state == "damaged")


def test_the_end_of_a_log(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run")
    directory.log_of(0).write_text("first\n" + "x" * 100_000 + "\nlast\n")
    (tmp_path / "secret").write_text("secret")
    directory.log_of(1).symlink_to(tmp_path / "secret")
    assert log_tail(directory, 0) == "last\n"
    assert log_tail(directory, 1) is None
    assert log_tail(directory, 2) is None


@pytest.mark.integration
def test_a_rank_beats_until_it_leaves(
    tmp_path: Path, wait_until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.runs.rank_progress._LEAVE_S", 60.0)
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    heart = Heartbeat(directory, rank=0, world_size=1, step=4)
    wait_until(lambda: read_beats(directory), "the first beat")
    (first,) = read_beats(directory)
    assert (first.step, first.steps_per_s, first.left) == (4, None, False)
    heart.step = 10
    seen = [first]

    def moved() -> bool:
        (beat,) = read_beats(directory)
        if beat.time != seen[-1].time:
            seen.append(beat)
        return beat.step == 10

    wait_until(moved, "the next beat", timeout_s=20 * BEAT_S)
    before, second = seen[-2:]
    assert second.steps_per_s is not None
    assert 0 < second.steps_per_s <= 6 / (second.time - before.time) * 1.01
    heart.close()
    assert read_beats(directory)[0].left
    assert [path.name for path in directory.heartbeats.iterdir()] == ["rank-0.json"]


def test_ranks_that_are_no_more_are_left_out(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run")
    beat(directory, 2, world_size=3, ago_s=60)
    for rank in (0, 1):
        beat(directory, rank, world_size=2)
    (directory.heartbeats / "rank-9.json").write_text('{"rank": "x"}')
    assert [b.rank for b in read_beats(directory)] == [0, 1]
