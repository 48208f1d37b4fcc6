"""``paceline gc``: what may go goes, and nothing else does, whatever happens meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Processes
from tests.core.test_file_lock import lock_as_another_node
from tests.insight.dashboard.made import make_run
from tests.serving.exporting.conftest import TASKS

from paceline.cli.gc import gc
from paceline.core.errors import ConfigError, PackageError, RunDirectoryError
from paceline.insight.gc import Artifact, Policy, checkpoints_to_remove, decide, remove, runs_in
from paceline.runs.directory import RunDirectory
from paceline.runs.package_manifest import MANIFEST
from paceline.runs.package_registry import PackageReference, Registry
from paceline.runs.status import find_runs

DAY_S = 86400.0


@pytest.fixture(scope="module")
def made(module_processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a child, and a package of the run, all some days old."""
    place = tmp_path_factory.mktemp("made")
    code = f"""
import sys
from paceline.cli import main
def paceline(*words):
    sys.argv = ["paceline", *words]
    assert main() == 0
paceline("train", "{TASKS}:Shapes", "--run-dir", "runs/parent", "--max-steps", "6", "--eval-every", "3steps",
         "--checkpoint-every", "1steps", "--keep-checkpoints", "9", "--threads", "1", "--quiet")
paceline("train", "{TASKS}:Shapes", "--run-dir", "runs/child", "--max-steps", "2", "--threads", "1",
         "--init-from", "runs/parent@last", "--quiet", "--set", "lr=0.2")
paceline("export", "runs/parent", "--format", "safetensors", "--checkpoint", "3", "--json")
"""
    env = {"PACELINE_REGISTRY": str(place / "registry"), "XDG_CONFIG_HOME": str(place / "config")}
    done = module_processes.run([sys.executable, "-c", code], env=env, cwd=place, timeout_s=300)
    assert done.returncode == 0, done.stderr
    return place


def age(run: Path, days: float) -> None:
    """Let a run's last sign of life be so long ago."""
    then = time.time() - days * DAY_S
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    text = "".join(json.dumps({**event, "time": then}) + "\n" for event in events)
    (run / "events.jsonl").write_text(text)
    for name in ("events.jsonl", "metrics.jsonl", "result.json", *os.listdir(run / "checkpoints")):
        path = run / name if (run / name).exists() else run / "checkpoints" / name
        os.utime(path, (then, then), follow_symlinks=False)


def copied(run: Path, name: str, days: float) -> Path:
    """Another run, with an id of its own."""
    copy = run.with_name(name)
    shutil.copytree(run, copy, symlinks=True)
    own = (copy / "run.toml").read_text()
    (copy / "run.toml").write_text(own.replace(f'"{identity(run)}"', f'"{name}"'))
    age(copy, days)
    return copy


def identity(run: Path) -> str:
    return str(RunDirectory(run).read_complete_manifest()["id"])


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copies, which a test may remove: parent and child are 50 days old, ``first`` 40, ``second`` 20."""
    shutil.copytree(made, tmp_path / "here", symlinks=True)
    place = tmp_path / "here"
    for name, days in (("parent", 50.0), ("child", 50.0)):
        age(place / "runs" / name, days)
    copied(place / "runs/parent", "first", 40)
    copied(place / "runs/parent", "second", 20)
    for package in (place / "registry/packages").iterdir():
        os.utime(package, (time.time() - 50 * DAY_S,) * 2)
    monkeypatch.setenv("PACELINE_REGISTRY", str(place / "registry"))
    monkeypatch.chdir(place)
    return place


@pytest.fixture
def found(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """What ``paceline gc --json`` says."""

    def run(*, code: int = 0, **options: Any) -> dict[str, Any]:
        assert gc(**options, json=True) == code
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        return document

    return run


def names(entries: list[dict[str, Any]], kind: str = "run") -> set[str]:
    return {entry["name"] for entry in entries if entry["kind"] == kind}


def there(place: Path) -> set[str]:
    return {path.name for path in (place / "runs").iterdir()}


def test_nothing_goes_before_somebody_says_so(
    place: Path, found: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    (package,) = Registry.of_user().digests()
    Registry.of_user().remove_tag(PackageReference("shapes", "latest"))
    plan = found(older_than="30d")
    assert names(plan["goes"]) == {"parent", "child", "first"}
    assert names(plan["goes"], "package") == {f"shapes {package[:12]}"}
    assert all(entry["bytes"] > 1000 for entry in plan["goes"])
    assert there(place) == {"parent", "child", "first", "second"}
    assert gc(older_than="30d") == 0
    assert "4 to remove" in (text := capsys.readouterr().out)
    assert "keep: too young" in text
    assert gc(older_than="30d", yes=True) == 0
    assert "4 removed" in capsys.readouterr().out
    assert there(place) == {"second"}
    assert Registry.of_user().digests() == []


def test_what_something_that_stays_came_from_stays(place: Path, found: Callable[..., dict[str, Any]]) -> None:
    plan = found(older_than="30d", yes=True)
    # The package has a tag, and came from the parent; of that run's checkpoints, from the third.
    assert names(plan["goes"]) == {"child", "first"}
    reasons = {entry["name"]: entry["reason"] for entry in plan["stays"]}
    assert reasons.pop("parent").startswith("parent of shapes ")
    assert "shapes@latest" in reasons.values()
    left = {path.name[:13] for path in (place / "runs/parent/checkpoints").glob("step-*")}
    assert left == {f"step-{step:08d}" for step in range(1, 7)}, "its own --keep-checkpoints, where no number is said"
    plan = found(keep_last=1, yes=True)
    left = {path.name[:13] for path in (place / "runs/parent/checkpoints").glob("step-*")}
    assert {"step-00000003", "step-00000006"} <= left < {f"step-{step:08d}" for step in range(1, 7)}


def test_a_child_keeps_its_parent_also_when_only_packages_are_asked_about(
    place: Path, found: Callable[..., dict[str, Any]]
) -> None:
    Registry.of_user().remove_tag(PackageReference("shapes", "latest"))
    plan = found(older_than="30d", only=("packages",))
    assert names(plan["goes"], "package")
    assert not names(plan["goes"])
    age(place / "runs/child", 1)
    plan = found(older_than="30d", only=("runs",), yes=True)
    assert there(place) == {"parent", "child", "second"}
    assert Registry.of_user().digests()


def test_the_newest_and_the_best_stay(place: Path, found: Callable[..., dict[str, Any]]) -> None:
    result = json.loads((place / "runs/first/result.json").read_text())
    result["metrics"]["val"]["accuracy"] = 1.0
    (place / "runs/first/result.json").write_text(json.dumps(result))
    age(place / "runs/first", 40)
    plan = found(keep_last=1, keep_best=True, only=("runs",))
    reasons = {entry["name"]: entry["reason"] for entry in plan["stays"] if entry["kind"] == "run"}
    assert reasons["second"] == "the newest"
    assert reasons["first"] == "the best by val accuracy:max"


def test_a_run_at_work_stays_and_one_that_was_taken_up_meanwhile(
    place: Path, found: Callable[..., dict[str, Any]]
) -> None:
    with RunDirectory(place / "runs/first").locked():
        plan = found(older_than="30d", only=("runs",))
        assert {"first": "active"}.items() <= {e["name"]: e["reason"] for e in plan["stays"]}.items()
    claim = lock_as_another_node(RunDirectory(place / "runs/first").lock)
    plan = found(older_than="30d", only=("runs",))
    assert "first" in names(plan["stays"]), "another machine trains in it"
    claim.unlink()
    item = Artifact(
        kind="run",
        name="first",
        path=place / "runs/first",
        group="",
        identity="first",
        size_bytes=1,
        time=time.time() - 40 * DAY_S,
    )
    RunDirectory(item.path).append_event("started")
    said: list[str | None] = []
    remove([item], place / "runs", Registry.of_user(), lambda _, why: said.append(why))
    assert said == ["it was active meanwhile"]
    assert "first" in there(place)


def test_links_are_not_followed(place: Path, tmp_path: Path, found: Callable[..., dict[str, Any]]) -> None:
    outside = tmp_path / "outside"
    shutil.move(place / "runs/first", outside)
    (place / "runs/first").symlink_to(outside)
    data = tmp_path / "data"
    data.mkdir()
    (data / "kept").touch()
    shutil.rmtree(place / "runs/child/tensorboard", ignore_errors=True)
    (place / "runs/child/tensorboard").symlink_to(data)
    plan = found(older_than="30d", yes=True)
    assert "first" in names(plan["stays"])
    assert "child" in names(plan["goes"])
    assert (outside / "run.toml").exists()
    assert (data / "kept").exists()


KILLED = """
import os, shutil, signal, sys
from paceline.cli.gc import gc
from pathlib import Path
shutil.rmtree = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
gc(Path("runs"), older_than="30d", only=("runs",), yes=True)
"""


def test_killed_in_the_middle(place: Path, run_processes: Processes, found: Callable[..., dict[str, Any]]) -> None:
    done = run_processes.run([sys.executable, "-c", KILLED], cwd=place)
    assert done.returncode == -signal.SIGKILL
    halves = [path for path in (place / "runs").iterdir() if path.name.startswith(".gc-")]
    assert len(halves) == 1
    assert len(find_runs(place / "runs")) == 3, "nobody sees half of a run"
    found(older_than="30d", only=("runs",), yes=True)
    assert there(place) == {"parent", "second"}
    (place / "runs" / f".gc-{0:016x}").mkdir()
    found(older_than="30d", only=("runs",), yes=True)
    assert not list((place / "runs").glob(".gc-*")), "although nothing else went"


@pytest.mark.usefixtures("plain_user")
def test_a_run_of_somebody_else_hides_no_other() -> None:
    for name in ("own", "closed"):
        make_run(Path("runs") / name, [{"event": "finished"}])
    Path("runs/own/checkpoints").mkdir()
    shut = (Path("runs/closed"), Path("runs/own/checkpoints"))
    for path in shut:
        path.chmod(0)
    try:
        (own,) = runs_in(Path("runs"))
        assert (own.name, own.kept_because) == ("own", None)
        assert checkpoints_to_remove(own, Policy(keep_last=1), [own], lambda done, total: None) == ([], [])
    finally:
        for path in shut:
            path.chmod(0o700)


def test_what_cannot_work(place: Path) -> None:
    with pytest.raises(ConfigError, match="the policy is empty: --keep-last N"):
        gc()
    with pytest.raises(ConfigError, match="--keep-last must be at least 1, but is 0"):
        gc(keep_last=0)
    with pytest.raises(ConfigError, match="--older-than must be a duration"):
        gc(older_than="a month")
    with pytest.raises(RunDirectoryError, match="there is no directory nowhere"):
        gc(Path("nowhere"), keep_last=1)
    (place / "registry/tags/shapes/latest.json").write_text("{")
    with pytest.raises(PackageError, match=r"latest\.json cannot be read"):
        gc(keep_last=1)
    (place / "runs/first/run.toml").write_text("[")
    (place / "registry/tags/shapes/latest.json").unlink()
    assert gc(keep_last=1, yes=True) == 0
    assert "first" in there(place), "what cannot be read is not judged"
    [digest] = Registry.of_user().digests()
    package = Registry.of_user().path_of(digest)
    (package / MANIFEST).write_text("{")
    old = time.time() - 40 * DAY_S
    os.utime(package, (old, old))
    assert gc(older_than="30d", yes=True) == 0
    assert package.exists(), "nor such a package"


def item(name: str, days: float, **values: Any) -> Artifact:
    given = {"group": "task", "identity": name, "size_bytes": 1, "time": -days * DAY_S, **values}
    return Artifact(kind="run", name=name, path=Path(name), **given)


def kept(items: list[Artifact], **policy: Any) -> set[str]:
    return {v.item.name for v in decide(items, Policy(**policy), now=0.0) if v.reason is not None}


def test_the_policy() -> None:
    runs = [item("a", 1, score=0.1), item("b", 2, score=0.9), item("c", 3), item("d", 4, group="other")]
    assert kept(runs, keep_last=1) == {"a", "d"}
    assert kept(runs, keep_last=2) == {"a", "b", "d"}
    assert kept(runs, keep_last=1, keep_best=True) == {"a", "b", "d"}
    assert kept(runs, older_than_s=2.5 * DAY_S) == {"a", "b"}
    assert kept(runs, older_than_s=2.5 * DAY_S, keep_last=1) == {"a", "b", "d"}
    chain = [item("a", 1, parents=frozenset({"b"})), item("b", 2, parents=frozenset({"c"})), item("c", 3)]
    assert kept(chain, keep_last=1) == {"a", "b", "c"}


def test_the_best_by_each_criterion_stays() -> None:
    def scored(name: str, criterion: str, *scores: float) -> list[Artifact]:
        return [item(f"{name}{n}", 40 + n, score=s, criterion=criterion) for n, s in enumerate(scores)]

    runs = [
        *scored("loss", "val loss:min", -0.3, -0.05),
        *scored("accuracy", "val accuracy:max", 0.5, 0.4),
        *scored("tested", "test accuracy:max", 0.8, 0.9),
        *scored("unknown", "", None),
    ]
    assert kept(runs, older_than_s=30 * DAY_S, keep_best=True) == {"loss1", "accuracy0", "tested1"}
    assert kept(runs, older_than_s=30 * DAY_S) == set()


def test_runs_and_packages_that_watched_another_metric_are_not_held_against_each_other(
    place: Path, found: Callable[..., dict[str, Any]]
) -> None:
    Registry.of_user().remove_tag(PackageReference("shapes", "latest"))
    recorded = (place / "runs/first/run.toml").read_text()
    assert 'best_metric = "accuracy:max"' in recorded
    (place / "runs/first/run.toml").write_text(
        recorded.replace('best_metric = "accuracy:max"', 'best_metric = "loss:min"')
    )
    plan = found(older_than="10d", keep_best=True)
    reasons = {entry["name"]: entry["reason"] for entry in plan["stays"]}
    assert reasons["first"] == "the best by val loss:min"
    assert list(reasons.values()).count("the best by val accuracy:max") == 1
    assert "the best by test accuracy:max" in reasons.values(), "the package"
