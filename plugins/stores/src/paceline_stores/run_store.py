"""A run in an object store: all that a machine needs to continue it from the address alone.

::

    writer.json                     which process copies the run here
    index.json                      the run's id, and its files: name, size and SHA-256 of each
    run/metrics.jsonl.0f3a...       a file of the index, named by its content, so never replaced
    checkpoints/step-00000469-v00000471/...   as in a run directory; the manifest is written last

The index of a checkpoint, or a later one, is written before the checkpoint's manifest. So a reader that lists manifests
first and then reads the index has a ledger that covers the checkpoint, at any moment.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from paceline.core.errors import CheckpointError, ConfigError, RunDirectoryError
from paceline.core.files import check_location, read_document, rename, write_atomically
from paceline.core.ownership import Owner, boot_id, own_prefix
from paceline.runs.checkpoint_manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    CheckpointInfo,
    FileRecord,
    Manifest,
    open_verified,
    parse_json,
    temporary_directory,
    write_file,
)
from paceline.runs.checkpoint_store import checkpoint_name, commit, find_version, parse_name, scan
from paceline.runs.directory import RunDirectory
from paceline_stores.objects import ObjectStore, StoreError

_log = logging.getLogger(__name__)

# --- Which run directory is copied to an address: two that both continue one run must not be mixed there ---


WRITER = "writer.json"
TOKEN = "backup.id"
"""The file of a run directory that tells it apart from a copy of the run on another machine."""

BEAT_S = 20.0
SILENT_S = 60.0
_LONG_AGO_S = 3600.0  # such a claim is not watched: clocks of machines are hardly an hour apart
_LOOK_S = 2.0
_READS = 10
_MOST_BYTES = 2**16


@dataclass(frozen=True)
class ClaimRecord:
    """A process that copies a run, as ``writer.json`` tells.

    Attributes:
        token: of its run directory.
        owner: the prefix of its process's names.
        beat: changes every :data:`BEAT_S` seconds.
        time: of the last change, in seconds since the epoch.
    """

    token: str
    host: str
    boot: str
    owner: str
    directory: str
    beat: str = ""
    time: float = 0.0

    def __str__(self) -> str:
        owner = Owner.parse(self.owner)
        process = "a process" if owner is None else f"process {owner.pid}"
        return f"{process} of {self.host}, for {self.directory}, seen {max(0.0, time.time() - self.time):.0f} s ago"

    @classmethod
    def parse(cls, content: bytes) -> ClaimRecord | None:
        """Return the writer; None if the content is damaged."""
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return msgspec.json.decode(content, type=cls)
        return None

    def is_alive(self) -> bool | None:
        """Return whether the process runs; None if that is not known here."""
        owner = Owner.parse(self.owner)
        if owner is None or self.boot != boot_id() or not self.boot or not owner.is_visible:
            return False if abs(time.time() - self.time) > _LONG_AGO_S else None
        return not owner.has_ended


class WriterClaim:
    """A claim to write to an address, held from :meth:`take` until :meth:`release`, and renewed by a thread.

    The claim is a run directory's: any process of the run may renew it.
    """

    def __init__(self, objects: ObjectStore, run: RunDirectory) -> None:
        self._objects = objects
        self._run = run
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._rival: ClaimRecord | None = None

    @property
    def is_held(self) -> bool:
        """Whether this process renews it."""
        return self._thread is not None

    def take(self) -> None:
        """Take the claim; wait for that of a process of another machine to become old.

        Raises:
            ConfigError: another process renews it; the message says which.
            StoreError: the store denies it.
        """
        mine = self._writer()
        other = self._read()
        if other is not None and other.token != mine.token:
            self._wait_for_end_of(other)
        if not self._objects.write(WRITER, msgspec.json.encode(mine), new=other is None):
            rival = self._read()
            if rival is not None and rival.token != mine.token:
                raise self._refusal(rival)
        self._rival = None
        self._ended.clear()
        self._thread = threading.Thread(target=self._renew, name="paceline-writer-claim", daemon=True)
        self._thread.start()

    def require(self) -> None:
        """Check that no other process has taken the claim.

        Raises:
            CheckpointError: another has, as after an interruption of the network.
        """
        other = self._read()
        if other is not None and other.token != self._writer().token:
            self._rival = other
        if self._rival is not None:
            raise CheckpointError(f"{self._objects.address} is written by {self._rival} by now.")

    def release(self) -> None:
        """Give it up."""
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None
            self.require()
            self._objects.remove([WRITER])

    def _renew(self) -> None:
        while not self._ended.wait(BEAT_S):
            with suppress(CheckpointError):
                self.require()
                self._objects.write(WRITER, msgspec.json.encode(self._writer()))

    def _wait_for_end_of(self, other: ClaimRecord) -> None:
        alive = other.is_alive()
        if alive is None:
            _log.info("waiting up to %.0f s whether %s is still written by %s", SILENT_S, self._objects.address, other)
            deadline = time.monotonic() + SILENT_S
            while alive is None and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
                now = self._read()
                alive = False if now is None else (True if now != other else None)
        if alive:
            raise self._refusal(other)

    def _refusal(self, other: ClaimRecord) -> ConfigError:
        return ConfigError(
            f"{self._objects.address} is written by {other}. Wait for that run to end, or give another --backup-to."
        )

    def _read(self) -> ClaimRecord | None:
        for _ in range(_READS):
            content = self._objects.read(WRITER, _MOST_BYTES)
            if content is None:
                return None
            if (record := ClaimRecord.parse(content)) is not None:
                return record
            time.sleep(0.1)  # a file:// store shows it while it is written
        return None

    def _writer(self) -> ClaimRecord:
        return ClaimRecord(
            token=self._token(),
            host=socket.gethostname(),
            boot=boot_id(),
            owner=own_prefix(),
            directory=str(self._run.path.absolute()),
            beat=secrets.token_hex(4),
            time=time.time(),
        )

    def _token(self) -> str:
        path = self._run.path / TOKEN
        try:
            return read_document(path).decode(errors="replace")
        except FileNotFoundError:
            write_atomically(path, secrets.token_hex(8).encode())
            return read_document(path).decode(errors="replace")


# --- The run ---


INDEX = "index.json"
CHECKPOINTS = "checkpoints/"
FILES = "run/"
FORMAT = 1

_CARRIED = re.compile(
    r"run\.toml|result\.json|(events|events-[\w.-]+|code|metrics)\.jsonl|ledger/gen-\d{5,}\.jsonl|code/[0-9a-f]+\.patch"
    r"|sample-(sizes|weights)\.npy|initial\.safetensors"
)
"""The files of a run directory that are copied, and no others are taken from a store."""

_MOST_INDEX_BYTES = 2**24
_TRIES = 5  # of a reader whose objects the writer has replaced meanwhile


@dataclass(frozen=True)
class RunIndex:
    """What ``index.json`` says: the run, and its files by name."""

    run: str
    task: str
    files: Mapping[str, FileRecord]

    def to_bytes(self) -> bytes:
        """Return its text, which holds its own checksum."""
        document: dict[str, Any] = {"format": FORMAT, **asdict(self)}
        document["index_sha256"] = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
        return json.dumps(document, sort_keys=True, indent=1).encode()

    @classmethod
    def parse(cls, content: bytes, location: str) -> RunIndex:
        """Parse it.

        Raises:
            CheckpointError: it is damaged, of another format, or names other files than those of a run.
        """
        document = parse_json(content, location)
        try:
            if document.get("format") != FORMAT:
                raise CheckpointError(
                    f"{location} has format {document.get('format')!r:.80}: a newer Paceline wrote it."
                )
            files = {name: FileRecord(**record) for name, record in document["files"].items()}
            index = cls(str(document["run"]), str(document["task"]), files)
        except (AttributeError, KeyError, TypeError) as error:
            raise CheckpointError(f"{location} is damaged: {error!r:.200}") from error
        if index.to_bytes() != content:
            raise CheckpointError(f"{location} does not match its own checksum.")
        if strange := [name for name in files if not _CARRIED.fullmatch(name)]:
            raise CheckpointError(f"{location} names {strange[0]!r:.80}, which is not a file of a run.")
        return index


def _object_of(name: str, record: FileRecord) -> str:
    return f"{FILES}{name}.{record.sha256[:16]}"


class ObjectRunStore:
    """One run at an address; see :class:`paceline_stores.backup.BackupStore` for its methods.

    Args:
        address: such as ``s3://bucket/run1``.
        keep: number of last checkpoints to keep, besides the best.
    """

    def __init__(self, address: str, run: RunDirectory, keep: int = 1) -> None:
        self.objects = ObjectStore(address)
        self._run = run
        self._keep = keep
        self._claim = WriterClaim(self.objects, run)
        self._infos: dict[str, CheckpointInfo] = {}
        self._digests: dict[tuple[str, int, int], str] = {}
        self._sent: set[str] = set()  # objects of a checkpoint whose manifest is not written yet

    # --- Writing ---

    def claim(self, run_id: str) -> None:
        try:
            self._require_no_other_run(run_id)
            if not self._claim.is_held:
                self._claim.take()
                self.objects.abort_uploads()
        except CheckpointError as error:
            raise ConfigError(f"--backup-to: {error}") from error

    def _require_no_other_run(self, run_id: str) -> None:
        sizes = self.objects.sizes()
        foreign = [name for name in sizes if name not in (INDEX, WRITER) and not name.startswith((FILES, CHECKPOINTS))]
        if foreign:
            raise CheckpointError(
                f"{self.objects.address} holds other objects, such as {foreign[0]!r:.80}. An address is of one run: "
                "add a folder to it."
            )
        index = self._read_index()
        if index is not None and index.run != run_id:
            raise CheckpointError(
                f"{self.objects.address} holds another run, {index.run} of {index.task}. Continue it by paceline "
                f"resume {self.objects.address}, or give another address."
            )
        own, here = scan(self._run.checkpoints), _complete(sizes)
        if own and here and parse_name(here[0])[1] > parse_name(own[0].name)[1]:
            raise CheckpointError(
                f"{self.objects.address} holds {here[0]} of this run, and {self._run.path} ends at {own[0].name}: the "
                f"run has continued elsewhere. Resume it by paceline resume {self.objects.address} --run-dir DIR."
            )

    def save(self, checkpoint: Path, info: CheckpointInfo) -> None:
        if self._claim.is_held:
            self._claim.require()
        else:
            self.claim(info.run)
        sizes = self.objects.sizes()
        complete = _complete(sizes)
        self._remove_partial(sizes, complete, checkpoint.name)
        wanted, best, there = [checkpoint], info.best_version, {parse_name(name)[1] for name in complete}
        if best is not None and best not in {info.state_version, *there}:
            wanted.insert(0, find_version(checkpoint.parent, best))
        manifests = {path.name: self._upload(path) for path in wanted if path.name not in complete}
        self._put_files(sizes, info.run, info.task)
        self._claim.require()
        for name, manifest in manifests.items():
            self.objects.write(f"{CHECKPOINTS}{name}/{MANIFEST}", manifest.to_bytes())
            self._infos[name] = manifest.info
        self._sent.clear()
        self._prune(checkpoint.name)

    def close(self) -> None:
        if self._claim.is_held:
            try:
                index = self._read_index()
                if index is not None:
                    self._claim.require()
                    self._put_files(self.objects.sizes(), index.run, index.task)
            finally:
                self._claim.release()

    def _remove_partial(self, sizes: Mapping[str, int], complete: list[str], now: str) -> None:
        """Delete what ended uploads have left."""
        kept = {*complete, now}
        self.objects.remove([name for name in sizes if (of := _checkpoint_of(name)) is not None and of not in kept])

    def _upload(self, checkpoint: Path) -> Manifest:
        """Write the files of a checkpoint, which may be deleted meanwhile, and return its manifest."""
        with open_verified(checkpoint) as (manifest, files):
            if checkpoint_name(manifest.info) != checkpoint.name:
                raise CheckpointError(f"checkpoint {checkpoint} has the manifest of {checkpoint_name(manifest.info)}.")
            for name, file in files:
                target = f"{CHECKPOINTS}{checkpoint.name}/{name}"
                if target not in self._sent:
                    self.objects.upload(target, Path(f"/proc/self/fd/{file.fileno()}"))
                    self._sent.add(target)
        sizes = self.objects.sizes()
        for name, record in manifest.files.items():
            target = f"{CHECKPOINTS}{checkpoint.name}/{name}"
            if sizes.get(target) != record.size:
                self._sent.discard(target)
                raise StoreError(f"{self.objects.address} has not kept {target} whole.")
        return manifest

    def _put_files(self, sizes: Mapping[str, int], run: str, task: str) -> None:
        """Write the run's files, then their index, and delete those that neither this nor the last index names."""
        before = self._read_index()
        folder = self._run.path
        paths = [path for pattern in ("*", "ledger/*", "code/*") for path in folder.glob(pattern)]
        records = {}
        for path in sorted(paths):
            name = str(path.relative_to(folder))
            if _CARRIED.fullmatch(name) and path.is_file():
                records[name] = self._put_file(path, name, sizes)
        index = RunIndex(run, task, records)
        if before == index:
            return
        self.objects.write(INDEX, index.to_bytes())
        named = {_object_of(*item) for each in (before, index) if each is not None for item in each.files.items()}
        self.objects.remove([name for name in sizes if name.startswith(FILES) and name not in named])

    def _put_file(self, path: Path, name: str, sizes: Mapping[str, int]) -> FileRecord:
        if path.suffix in (".npy", ".safetensors"):  # these never change, and may be large
            status = path.stat()
            key = (name, status.st_size, status.st_mtime_ns)
            if key not in self._digests:
                with path.open("rb") as file:
                    self._digests[key] = hashlib.file_digest(file, "sha256").hexdigest()
            record = FileRecord(status.st_size, self._digests[key])
            if sizes.get(_object_of(name, record)) != record.size:
                self.objects.upload(_object_of(name, record), path)
            return record
        content = path.read_bytes()  # at once: the run appends to it
        record = FileRecord(len(content), hashlib.sha256(content).hexdigest())
        if sizes.get(_object_of(name, record)) != record.size:
            self.objects.write(_object_of(name, record), content)
        return record

    def _prune(self, newest: str) -> None:
        """Delete all checkpoints but the newest, the last ``keep``, and the best of each; each manifest first."""
        sizes = self.objects.sizes()
        readable = {}
        for name in _complete(sizes):
            with suppress(CheckpointError):
                readable[name] = self._info_of(name)
        kept = {*list(readable)[: self._keep], newest}
        best = {readable[name].best_version for name in kept if name in readable}
        for name, info in readable.items():
            if name not in kept and info.state_version not in best:
                manifest = f"{CHECKPOINTS}{name}/{MANIFEST}"
                others = [each for each in sizes if _checkpoint_of(each) == name and each != manifest]
                self.objects.remove([manifest, *others])

    def _info_of(self, name: str) -> CheckpointInfo:
        if name not in self._infos:
            self._infos[name] = self._read_manifest(name).info
        return self._infos[name]

    # --- Reading ---

    def restore(self, run_id: str) -> tuple[Path | None, tuple[str, ...]]:
        index = self._read_index()
        if index is None or index.run != run_id:
            return None, ()
        return self._fetch_checkpoints(self._run.checkpoints, _complete(self.objects.sizes()), index, None)

    def fetch(self, which: str | None = None) -> None:
        """Make the run's directory, which must not exist: without logs, and without all checkpoints.

        Args:
            which: a number of steps, whose checkpoint is fetched besides the newest and the best.

        Raises:
            ConfigError: the store cannot be read, or holds no run here.
            CheckpointError: no checkpoint verifies.
        """
        for number in range(_TRIES):
            try:
                return self._fetch(which)
            except StoreError as error:
                # The writer may have deleted what was listed before: look again.
                if number == _TRIES - 1 or not isinstance(error.__cause__, FileNotFoundError):
                    raise ConfigError(str(error)) from error

    def _fetch(self, which: str | None) -> None:
        complete = _complete(self.objects.sizes())
        index = self._read_index()
        if index is None:
            raise ConfigError(f"{self.objects.address} holds no run: it has no {INDEX}. Check the address.")
        target = self._run
        try:
            target.path.parent.mkdir(parents=True, exist_ok=True)
            with temporary_directory(target.path.parent) as path:
                draft = RunDirectory(path)
                draft.create()
                for name, record in index.files.items():
                    (path / name).parent.mkdir(exist_ok=True)
                    written = write_file(path / name, self._pieces(_object_of(name, record), record))
                    assert written == record
                if draft.read_complete_manifest()["id"] != index.run:
                    raise RunDirectoryError(f"the run.toml in {self.objects.address} is not that of its {INDEX}.")
                newest, reasons = self._fetch_checkpoints(draft.checkpoints, complete, index, which)
                if newest is None:
                    detail = "".join(f"\n  {reason}" for reason in reasons)
                    raise CheckpointError(f"{self.objects.address} holds no checkpoint that verifies.{detail}")
                draft.append_event("fetched", address=self.objects.address, checkpoint=newest.name)
                rename(path, target.path)
        except OSError as error:
            raise target.unwritable(error) from error

    def is_copied_by(self, directory: RunDirectory) -> bool:
        """Return whether a directory is of the run that is here, and has its newest checkpoint or a later one.

        Raises:
            ConfigError: the store cannot be read.
        """
        try:
            here, index = _complete(self.objects.sizes()), self._read_index()
        except StoreError as error:
            raise ConfigError(str(error)) from error
        own = scan(directory.checkpoints)
        return (
            index is not None
            and directory.exists()
            and directory.read_complete_manifest()["id"] == index.run
            and (not here or (bool(own) and parse_name(own[0].name)[1] >= parse_name(here[0])[1]))
        )

    def _fetch_checkpoints(
        self, directory: Path, complete: list[str], index: RunIndex, which: str | None
    ) -> tuple[Path | None, tuple[str, ...]]:
        """Fetch the newest checkpoint that verifies, its best one, and that after ``which`` steps."""
        newest: Path | None = None
        best: int | None = None
        reasons = []
        for name in complete:
            step, version = parse_name(name)
            if newest is not None and version != best and str(step) != which:
                continue
            try:
                path, info = self._fetch_checkpoint(directory, name, index)
            except StoreError:
                raise
            except CheckpointError as error:
                reasons.append(str(error))
            else:
                if newest is None:
                    newest, best = path, info.best_version
        return newest, tuple(reasons)

    def _fetch_checkpoint(self, directory: Path, name: str, index: RunIndex) -> tuple[Path, CheckpointInfo]:
        manifest = self._read_manifest(name)
        if manifest.info.run != index.run:
            raise CheckpointError(f"{self.objects.address}/{CHECKPOINTS}{name} is of another run.")
        contents = (
            (file, self._pieces(f"{CHECKPOINTS}{name}/{file}", record)) for file, record in manifest.files.items()
        )
        return commit(directory, manifest.info, contents, format=manifest.format), manifest.info

    def _read_manifest(self, name: str) -> Manifest:
        location = f"{CHECKPOINTS}{name}/{MANIFEST}"
        content = self.objects.read(location, MAX_MANIFEST_BYTES)
        if content is None:
            raise StoreError(f"{self.objects.address}/{location} is gone.") from FileNotFoundError()
        manifest = Manifest.from_bytes(content)
        if checkpoint_name(manifest.info) != name:
            raise CheckpointError(f"{self.objects.address}/{location} is that of {checkpoint_name(manifest.info)}.")
        return manifest

    def _pieces(self, name: str, record: FileRecord) -> Iterator[bytes]:
        """Yield an object's content, and verify it.

        Raises:
            CheckpointError: it is not what the record says.
        """
        digest = hashlib.sha256()
        for piece in self.objects.pieces(name, record.size):
            digest.update(piece)
            yield piece
        if digest.hexdigest() != record.sha256:
            raise CheckpointError(
                f"{self.objects.address}/{name} is damaged: its SHA-256 is {digest.hexdigest()[:16]}..."
            )

    def _read_index(self) -> RunIndex | None:
        content = self.objects.read(INDEX, _MOST_INDEX_BYTES)
        return None if content is None else RunIndex.parse(content, f"{self.objects.address}/{INDEX}")


def restore_run(address: str, run_dir: str | None) -> str:
    """Return the directory in which the run at an address continues: it is made, unless it is there and up to date.

    Args:
        address: such as ``s3://bucket/folder/NAME``.
        run_dir: that directory; None: ``runs/NAME``.

    Raises:
        ConfigError: the store cannot be read, holds no run, or the directory is of another run or out of date.
        CheckpointError: no checkpoint verifies.
    """
    check_location(address, "resume")
    directory = RunDirectory(Path(run_dir or Path("runs") / address.rstrip("/").rpartition("/")[2]))
    store = ObjectRunStore(address, directory)
    if not directory.path.exists():
        try:
            store.fetch()
            return str(directory.path)
        except RunDirectoryError:
            if not directory.exists():  # else another rank, or another node, was faster
                raise
    if not store.is_copied_by(directory):
        raise ConfigError(
            f"{directory.path} is not the run of {address} as it is now: it is another run, or lacks newer "
            "checkpoints. Choose another directory with --run-dir DIR."
        )
    return str(directory.path)


def _checkpoint_of(name: str) -> str | None:
    """Return the checkpoint to which an object belongs."""
    return name.removeprefix(CHECKPOINTS).partition("/")[0] if name.startswith(CHECKPOINTS) else None


def _complete(sizes: Mapping[str, int]) -> list[str]:
    """Return the checkpoints that have a manifest, the newest first."""
    found: list[tuple[int, int, str]] = []
    for name in sizes:
        if name.endswith(f"/{MANIFEST}") and (checkpoint := _checkpoint_of(name)) is not None:
            with suppress(ValueError):
                step, version = parse_name(checkpoint)
                found.append((version, step, checkpoint))
    return [name for _, _, name in sorted(found, reverse=True)]
