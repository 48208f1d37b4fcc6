"""``paceline gc``: nothing goes that something needs, whatever happens meanwhile."""

from __future__ import annotations

import dataclasses
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
from tests.core.test_file_lock import lock_as_another_node
from tests.processes import Processes
from tests.runs.made import make_run
from tests.runs.packages.conftest import manifest_of

from paceline.core.errors import ConfigError, PackageError, RunDirectoryError
from paceline.runs.checkpoint_manifest import MANIFEST, write_file
from paceline.runs.directory import RunDirectory
from paceline.runs.package_registry import PackageReference, Registry
from paceline_maintenance.gc import gc, packages_in, remove, runs_in
from paceline_pages.run_status import find_runs

DAY_S = 86400.0


def add_run(
    name: str, days: float, accuracy: float | None = None, source: str = "", best: str = "accuracy:max"
) -> Path:
    """A run that was last active so long ago."""
    run = make_run(Path("runs") / name, run_id=name, accuracy=accuracy, config={"best_metric": best})
    if source:
        run.write_manifest({**run.read_manifest(), "parent": {"run": source}})
    age(run.path, days)
    return run.path


def age(run: Path, days: float) -> None:
    for name in os.listdir(run):
        os.utime(run / name, (time.time() - days * DAY_S,) * 2, follow_symlinks=False)


def add_package(number: int, days: float, run: str = "none", accuracy: float = 0.5) -> str:
    """A package of the model demo, exported so long ago from a run; return its digest."""
    registry = Registry.of_user()
    origin = dataclasses.replace(
        manifest_of().provenance,
        run=run,
        data={"compared_split": "test", "evaluation": {"best_metric": "accuracy:max"}},
    )
    with registry.draft() as draft:
        files = {name: write_file(draft / name, [bytes([number])]) for name in ("weights.safetensors", "program.pt2")}
        manifest = manifest_of(files=files, provenance=origin, metrics={"accuracy": accuracy})
        digest = registry.commit(draft, manifest)
    os.utime(registry.path_of(digest), (time.time() - days * DAY_S,) * 2)
    return digest


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where runs and registry are."""
    monkeypatch.setenv("PACELINE_REGISTRY", str(tmp_path / "registry"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def found(place: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """What ``paceline gc --json`` says."""

    def run(*, code: int = 0, **options: Any) -> dict[str, Any]:
        assert gc(**{"keep_last": 1, **options}, json=True) == code
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        return document

    return run


def reasons(plan: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["reason"] for entry in plan["stays"]}


def goes(plan: dict[str, Any]) -> set[str]:
    return {entry["name"] for entry in plan["goes"]}


def there() -> set[str]:
    return {path.name for path in Path("runs").iterdir()}


def test_nothing_goes_before_somebody_says_so(
    found: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    for name, days in (("new", 1), ("old", 2), ("older", 3)):
        add_run(name, days)
    first, second = add_package(1, 2), add_package(2, 1)
    plan = found()
    assert goes(plan) == {"old", "older", f"demo {first[:12]}"}
    assert all(entry["bytes"] > 100 for entry in plan["goes"])
    assert gc(keep_last=1) == 0
    assert "3 runs and packages" in (text := capsys.readouterr().out)
    assert "give --yes" in text
    assert "keep: one of the newest" in text
    assert there() == {"new", "old", "older"}
    assert gc(keep_last=2, yes=True) == 0
    assert there() == {"new", "old"}
    assert gc(keep_last=1, yes=True) == 0
    assert there() == {"new"}
    assert Registry.of_user().digests() == [second]


def test_the_best_stays_by_each_criterion(found: Callable[..., dict[str, Any]]) -> None:
    add_run("new", 1, accuracy=0.1)
    add_run("worse", 2, accuracy=0.5)
    add_run("best", 3, accuracy=0.9)
    other = add_run("other", 5, accuracy=0.2, best="error:min")
    RunDirectory(other).write_result({"metrics": {"val": {"error": 0.3}}})
    age(other, 5)
    good = add_package(1, 3, accuracy=0.9)
    add_package(2, 2, accuracy=0.2)
    newest = add_package(3, 1, accuracy=0.1)
    assert reasons(found()) == {
        "new": "one of the newest",
        "best": "the best by val accuracy:max",
        "other": "the best by val error:min",
        f"demo {newest[:12]}": "one of the newest",
        f"demo {good[:12]}": "the best by test accuracy:max",
    }


def test_what_a_tag_names_stays_and_what_a_rollback_would_restore(found: Callable[..., dict[str, Any]]) -> None:
    registry, reference = Registry.of_user(), PackageReference("demo", "prod")
    digests = [add_package(number, 9 - number) for number in range(5)]
    for digest in digests[:3]:
        registry.put_tag(reference, digest)
    plan = found()
    assert goes(plan) == {f"demo {digests[number][:12]}" for number in (0, 3)}
    assert reasons(plan)[f"demo {digests[2][:12]}"] == "demo@prod"
    assert reasons(plan)[f"demo {digests[1][:12]}"] == "previous package of demo@prod"
    # A package that gets its tag after it was chosen.
    chosen = next(item for item in packages_in(registry) if item.identity == digests[3])
    registry.put_tag(reference, digests[3])
    assert remove(chosen, registry) == "it is now demo@prod"
    assert registry.holds(digests[3])


def test_a_package_that_was_just_made_may_get_its_tag_yet(found: Callable[..., dict[str, Any]]) -> None:
    digest = add_package(1, 0.001)
    add_package(2, 0)
    assert reasons(found())[f"demo {digest[:12]}"] == "just created"


def test_sources_of_what_stays_stay(found: Callable[..., dict[str, Any]]) -> None:
    add_run("child", 1, source="middle")
    add_run("middle", 2, source="first")
    add_run("first", 3)
    add_run("exported", 4)
    add_run("alone", 5)
    digest = add_package(1, 1, run="exported")
    plan = found(yes=True)
    assert goes(plan) == {"alone"}
    assert {name: why for name, why in reasons(plan).items() if why.startswith("source")} == {
        "middle": "source of child",
        "first": "source of middle",
        "exported": f"source of demo {digest[:12]}",
    }
    assert there() == {"child", "middle", "first", "exported"}


def test_a_run_at_work_stays_also_on_another_node_or_when_it_begins_meanwhile(
    found: Callable[..., dict[str, Any]],
) -> None:
    add_run("new", 1)
    run = RunDirectory(add_run("old", 2))
    with run.locked():
        assert reasons(found())["old"] == "active"
    claim = lock_as_another_node(run.lock)
    assert reasons(found(yes=True))["old"] == "active"
    claim.unlink()
    [chosen] = [item for item in runs_in(Path("runs")) if item.name == "old"]
    claim = lock_as_another_node(run.lock)
    assert remove(chosen, Registry.of_user()) == "it is active"
    claim.unlink()
    run.append_event("started")
    assert remove(chosen, Registry.of_user()) == "it was active meanwhile"
    assert there() == {"new", "old"}


def test_links_are_not_followed(found: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    add_run("new", 1)
    shutil.move(add_run("linked", 2), tmp_path / "outside")
    Path("runs/linked").symlink_to(tmp_path / "outside")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/kept").touch()
    (add_run("old", 3) / "data").symlink_to(tmp_path / "data")
    plan = found(yes=True)
    assert reasons(plan)["linked"] == "a link"
    assert goes(plan) == {"old"}
    assert (tmp_path / "outside/run.toml").exists()
    assert (tmp_path / "data/kept").exists()


KILLED = """
import os, shutil, signal
from pathlib import Path
from paceline_maintenance.gc import gc
shutil.rmtree = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
gc(Path("runs"), keep_last=1, yes=True)
"""


def test_killed_in_the_middle(place: Path, run_processes: Processes, found: Callable[..., dict[str, Any]]) -> None:
    for name, days in (("new", 1), ("old", 2), ("older", 3)):
        add_run(name, days)
    done = run_processes.run([sys.executable, "-c", KILLED], cwd=place)
    assert done.returncode == -signal.SIGKILL
    assert len([name for name in there() if name.startswith(".")]) == 1
    assert len(find_runs(Path("runs"))) == 2, "a run is whole, or not there"
    found(yes=True)
    assert there() == {"new"}


@pytest.mark.usefixtures("plain_user")
def test_a_run_of_somebody_else_hides_no_other() -> None:
    for name in ("own", "closed"):
        make_run(Path("runs") / name, [{"event": "finished"}])
    Path("runs/closed").chmod(0)
    try:
        (own,) = runs_in(Path("runs"))
        assert (own.name, own.reason) == ("own", None)
    finally:
        Path("runs/closed").chmod(0o700)


def test_what_is_damaged_is_not_judged(place: Path) -> None:
    add_run("new", 1)
    (add_run("damaged", 2) / "run.toml").write_text("[")
    digest = add_package(1, 2)
    add_package(2, 1)
    (Registry.of_user().path_of(digest) / MANIFEST).write_text("{")
    os.utime(Registry.of_user().path_of(digest), (0, 0))
    assert gc(keep_last=1, yes=True) == 0
    assert there() == {"new", "damaged"}
    assert Registry.of_user().path_of(digest).exists()
    (place / "registry/tags/demo").mkdir(parents=True)
    (place / "registry/tags/demo/latest.json").write_text("{")
    with pytest.raises(PackageError, match=r"latest\.json cannot be read"):
        gc(keep_last=1)


def test_what_cannot_work(place: Path) -> None:
    with pytest.raises(ConfigError, match="--keep-last must be at least 1, but is 0"):
        gc(keep_last=0)
    with pytest.raises(RunDirectoryError, match="there is no directory nowhere"):
        gc(Path("nowhere"))
