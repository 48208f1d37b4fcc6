"""A run at an address, by itself: what a reader sees at any moment, and what a store may return."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.runs.made import make_run

from paceline.core.errors import CheckpointError, ConfigError, PacelineError
from paceline.core.files import check_location
from paceline.runs.backup import open_run
from paceline.runs.checkpoint_manifest import CheckpointInfo, FileRecord, read_manifest
from paceline.runs.checkpoint_store import commit, newest_verified, scan, verify
from paceline.runs.directory import RunDirectory
from paceline_stores import backup as stores_backup
from paceline_stores import run_store
from paceline_stores.backup import Backup
from paceline_stores.objects import ObjectStore, StoreError
from paceline_stores.run_store import INDEX, WRITER, ObjectRunStore, RunIndex, restore_run

RUN = "0" * 16
KEEP = 2


class Stop(Exception):
    """The process ends here."""


class Watched(ObjectStore):
    """Calls a hook before and after each change."""

    hook: Callable[[], None] = staticmethod(lambda: None)

    def write(self, name: str, content: bytes, *, new: bool = False) -> bool:
        self.hook()
        written = super().write(name, content, new=new)
        self.hook()
        return written

    def upload(self, name: str, file: Path) -> None:
        self.hook()
        super().upload(name, file)
        self.hook()

    def remove(self, names: list[str]) -> None:
        for name in names:
            super().remove([name])
            self.hook()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setattr(run_store, "BEAT_S", 1000.0)  # the changes are those of the test alone
    directory = make_run(tmp_path / "runs" / "a", steps=3, run_id=RUN)
    directory.ledger.mkdir()
    return directory


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket/run1"


def train(run: RunDirectory, step: int, best: int | None = None) -> tuple[Path, CheckpointInfo]:
    """What a run writes until the checkpoint after a step; the ledger first."""
    with (run.ledger / "gen-00000.jsonl").open("a") as ledger:
        ledger.write(f'{{"v":{step}}}\n')
    info = CheckpointInfo(
        task="Task", run=RUN, step=step, state_version=step, epoch=0, generation=0, microbatches=4, pins={},
        best_version=best,
    )  # fmt: skip
    return commit(run.checkpoints, info, [("model.safetensors", [bytes([step]) * 1000]), ("state.json", [b"{}"])]), info


def open_store(address: str, run: RunDirectory, objects: type[ObjectStore] = ObjectStore) -> ObjectRunStore:
    store = ObjectRunStore(address, run, KEEP)
    store.objects = objects(address)
    store._claim._objects = store.objects
    return store


def last_step_of_ledger(run: RunDirectory) -> int:
    return int(json.loads((run.ledger / "gen-00000.jsonl").read_text().splitlines()[-1])["v"])


def test_a_reader_sees_a_whole_checkpoint_at_any_moment(run: RunDirectory, address: str, tmp_path: Path) -> None:
    store = open_store(address, run, Watched)
    seen: list[int] = []
    newest = 0

    def read() -> None:
        target = RunDirectory(tmp_path / f"reader{len(seen)}")
        try:
            ObjectRunStore(address, target, 1).fetch()
        except (ConfigError, CheckpointError):
            assert newest == 0, "there was a whole checkpoint before"
            return
        (step,) = {read_manifest(path).info.step for path in scan(target.checkpoints)[:1]}
        for path in scan(target.checkpoints):
            verify(path)
        best = read_manifest(scan(target.checkpoints)[0]).info.best_version
        assert best in (None, *(read_manifest(path).info.state_version for path in scan(target.checkpoints)))
        assert last_step_of_ledger(target) >= step
        seen.append(step)
        shutil.rmtree(target.path)

    Watched.hook = staticmethod(read)
    try:
        for step, best in ((1, None), (2, 2), (3, 2), (4, 2), (5, 2), (6, 6)):
            store.save(*train(run, step, best))
            newest = step
    finally:
        Watched.hook = staticmethod(lambda: None)
        store.close()
    assert seen == sorted(seen)
    assert {1, 2, 3, 4, 5, 6} <= set(seen)
    there = {name.split("/")[1] for name in store.objects.sizes() if name.startswith("checkpoints/")}
    assert len(there) == KEEP + 1, "5, 6, and 2, which is the best of 5"


def test_a_writer_may_end_at_any_moment(run: RunDirectory, address: str, tmp_path: Path) -> None:
    first = open_store(address, run)
    first.save(*train(run, 1))
    first.close()
    path, info = train(run, 2, best=1)
    moments = 0
    while True:
        left = moments

        def stop() -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise Stop

        store = open_store(address, run, Watched)
        Watched.hook = staticmethod(stop)
        try:
            store.save(path, info)
            break
        except Stop:
            moments += 1
        finally:
            Watched.hook = staticmethod(lambda: None)
            store._claim._ended.set()
        target = RunDirectory(tmp_path / f"reader{moments}")
        ObjectRunStore(address, target, 1).fetch()
        assert read_manifest(scan(target.checkpoints)[0]).info.step in (1, 2)
    assert moments > 8
    again = open_store(address, run)
    again.save(*train(run, 3, best=1))
    again.close()
    names = again.objects.sizes()
    for name in {name.rpartition("/")[0] for name in names if name.startswith("checkpoints/")}:
        assert f"{name}/manifest.json" in names, "nothing is left of uploads that ended"


def test_what_is_damaged_or_strange_is_not_used(run: RunDirectory, address: str, tmp_path: Path) -> None:
    store = open_store(address, run)
    for step in (1, 2):
        store.save(*train(run, step))
    store.close()
    bucket = tmp_path / "bucket" / "run1"
    damaged = max((bucket / "checkpoints").iterdir()) / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    with open_run(address) as directory:
        found = newest_verified(directory.checkpoints)
        assert found.manifest is not None
        assert found.manifest.info.step == 1
    damaged.write_bytes(b"longer" * 1000)
    run.checkpoints.rename(tmp_path / "lost")
    path, reasons = ObjectRunStore(address, run, 1).restore(RUN)
    assert path is not None
    assert path.name.startswith("step-00000001")
    assert "does not have its 1,000 bytes" in reasons[0]
    index = json.loads((bucket / INDEX).read_text())
    record = FileRecord(1, "0" * 64)
    for name in ("../../outside.toml", "code/evil.py", "/etc/passwd", "run.toml/../x.py"):
        (bucket / INDEX).write_bytes(RunIndex(index["run"], index["task"], {name: record}).to_bytes())
        with pytest.raises(PacelineError, match="which is not a file of a run"):
            restore_run(address, str(tmp_path / "new"))
    (bucket / INDEX).write_text(json.dumps({**index, "run": "other"}))
    with pytest.raises(PacelineError, match="does not match its own checksum"):
        restore_run(address, str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_two_directories_of_one_run_are_not_mixed(
    run: RunDirectory, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_store, "BEAT_S", 0.05)
    monkeypatch.setattr(run_store, "SILENT_S", 20.0)
    monkeypatch.setattr(run_store, "_LOOK_S", 0.1)
    store = open_store(address, run)
    store.claim(RUN)
    store.save(*train(run, 1))
    other = RunDirectory(Path(restore_run(address, str(tmp_path / "elsewhere"))))
    rival = open_store(address, other)
    with pytest.raises(ConfigError, match=rf"is written by process \d+ of .*, for {run.path}, seen"):
        rival.claim(RUN)
    # The same from another machine, where only its heartbeat tells whether it lives.
    monkeypatch.setattr(run_store.ClaimRecord, "is_alive", lambda self: None)
    with pytest.raises(ConfigError, match="is written by process"):
        rival.claim(RUN)
    monkeypatch.setattr(run_store, "SILENT_S", 0.3)
    store._claim._ended.set()  # its machine dies
    assert store._claim._thread is not None
    store._claim._thread.join()
    rival.claim(RUN)
    path, info = train(run, 2)
    with pytest.raises(CheckpointError, match=f"is written by process .* for {other.path}"):
        store.save(path, info)
    rival.save(*train(other, 3))
    rival.close()
    assert WRITER not in rival.objects.sizes()
    with pytest.raises(ConfigError, match=r"the run has continued elsewhere. Resume it by paceline resume file://"):
        open_store(address, run).claim(RUN)
    with pytest.raises(ConfigError, match="or lacks newer checkpoints"):
        restore_run(address, str(run.path))
    assert restore_run(address, str(other.path)) == str(other.path)
    with pytest.raises(ConfigError, match=f"holds another run, {RUN} of Task"):
        open_store(address, run).claim("1" * 16)
    with pytest.raises(ConfigError, match="holds other objects, such as 'run1/"):
        open_store(address.removesuffix("/run1"), run).claim(RUN)


def test_a_failed_copy_is_repeated_until_it_works(
    run: RunDirectory,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    wait_until: Callable[..., None],
) -> None:
    monkeypatch.setattr(stores_backup, "_LONGEST_WAIT_S", 0.01)
    store = open_store(address, run, Watched)
    left = 2

    def fail() -> None:
        nonlocal left
        if left:
            left -= 1
            raise StoreError("not now")

    def reports() -> list[tuple[Any, ...]]:
        events = [event for event in run.read_events() if event["event"].startswith("backup")]
        return [(event["event"], event["step"], event.get("error")) for event in events]

    store.claim(RUN)
    Watched.hook = staticmethod(fail)
    try:
        backup = Backup(address, run, KEEP, store)
        backup.take(*train(run, 1))
        wait_until(lambda: ("backup", 1, None) in reports(), "the first copy")
        left = 100
        backup.take(*train(run, 2))
        backup.close(60)
    finally:
        Watched.hook = staticmethod(lambda: None)
    assert reports() == [("backup failed", 1, "not now"), ("backup", 1, None), ("backup failed", 2, "not now")]
    assert f"{address} lacks the checkpoint of step 2: its copy failed." in caplog.text


@pytest.mark.parametrize(
    "address",
    [
        "s3://user:secret@bucket/run",
        "s3://bucket/run?key=secret",
        "simplecache::s3://bucket/run",
        "s3://bucket/../run",
        "s3://",
    ],
)
def test_an_address_holds_no_secret(address: str) -> None:
    if "::" in address:
        address = f"s3://bucket/x::{address}"
    with pytest.raises(ConfigError, match="an address is SCHEME://BUCKET/FOLDER") as raised:
        check_location(address, "--backup-to")
    assert "secret" not in str(raised.value)


def test_an_unknown_scheme_names_those_that_there_are(run: RunDirectory) -> None:
    with pytest.raises(ConfigError, match="s4://bucket/run cannot be used: Protocol not known: s4"):
        Backup("s4://bucket/run", run, 1).claim(RUN)
