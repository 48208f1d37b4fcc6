"""Saving of checkpoints in the background, and loading."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

from torch import Tensor

from paceline.core.errors import CheckpointError, CheckpointWriteError
from paceline.runs.checkpoint_manifest import (
    Buffer,
    CheckpointInfo,
    Manifest,
    parse_json,
    read_verified,
    temporary_directory,
)
from paceline.runs.checkpoint_shards import FORMAT, TABLE, Writers, is_shard_file, stored_tensors
from paceline.runs.checkpoint_state import Snapshot, TensorShard, file_contents, flatten, read_tensors, unflatten
from paceline.runs.checkpoint_store import commit, prune, remove_stale

_log = logging.getLogger(__name__)

_STATE = "state.json"
_SUFFIX = ".safetensors"
_PART = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


class Checkpoint(NamedTuple):
    """A verified checkpoint in memory."""

    manifest: Manifest
    state: dict[str, Any]


_COPIED_BYTES = 128 * 2**20
"""Tensors of at most so many bytes are copied in any case, so that training does not wait for their writing."""


@dataclass(frozen=True)
class _Save:
    """A state to write, and its description.

    Attributes:
        snapshot: the files whose tensors are copied.
        live: the tensors of the other files, which are written as they are; emptied once they are written.
    """

    snapshot: Snapshot
    live: dict[str, dict[str, Tensor]]
    skeletons: dict[str, Any]
    info: CheckpointInfo
    before_commit: Callable[[], None] | None
    writers: Writers | None = None
    shards: dict[str, TensorShard] = field(default_factory=dict)
    draft: ExitStack = field(default_factory=ExitStack)

    @property
    def can_be_repeated(self) -> bool:
        """Whether it is a best model of which this process keeps all."""
        return self.info.best_version == self.info.state_version and self.writers is None and not self.live

    def contents(self) -> dict[str, Iterable[Buffer]]:
        """Return what each file will hold."""
        text = json.dumps(self.skeletons, indent=1, allow_nan=False).encode()
        files = {**self.snapshot.files, **self.live}
        return {**{file: file_contents(tensors) for file, tensors in files.items()}, _STATE: (text,)}


class Checkpointer:
    """Saves a run's state into new directories, in one background thread, one at a time.

    A best model whose save failed stays in memory, and is retried with each later save, until
    another one is better. :meth:`keep_in_memory` keeps one without writing it, in case the
    process that should write it dies.

    Attributes:
        stall_s: total time for which :meth:`save` and :meth:`wait` blocked their callers.

    Args:
        directory: the checkpoints' directory; created with the first.
        keep: number of last checkpoints to keep, besides the best.
        committed: the background thread calls it with each checkpoint that is on disk.

    An error of the background thread is raised once, by the next :meth:`save`, :meth:`wait`,
    :meth:`poll` or :meth:`close`. The snapshot's buffer, the size of what is copied, is kept between
    saves. Not thread-safe.
    """

    def __init__(
        self, directory: Path, keep: int, committed: Callable[[Path, CheckpointInfo], None] | None = None
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, but is {keep}")
        self.directory = directory
        self.keep = keep
        self.stall_s = 0.0
        self._committed = committed
        self._snapshot = Snapshot()
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="paceline-checkpoint")
        self._pending: Future[None] | None = None
        self._last: _Save | None = None
        self._deferred: _Save | None = None
        self._draft = ExitStack()
        self._tensors_read = Event()
        self._tensors_read.set()

    def open_draft(self) -> Path:
        """Create the directory of the next save, in which several processes write.

        Raises:
            CheckpointWriteError: the disk is full, read-only or broken.
        """
        self._draft.close()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            return self._draft.enter_context(temporary_directory(self.directory))
        except OSError as error:
            raise CheckpointWriteError(f"cannot save a checkpoint in {self.directory}: {error.strerror}.") from error

    def save(
        self,
        state: Mapping[str, Any],
        info: CheckpointInfo,
        *,
        before_commit: Callable[[], None] | None = None,
        writers: Writers | None = None,
        copies: bool = True,
    ) -> None:
        """Write ``state`` in the background; first wait for an earlier save to end.

        It is copied before, but for large shards on the CPU, which are written as they are, and must not change until
        :meth:`wait_for_tensors` returns.

        Args:
            state: part name (an identifier) -> nested state, as :func:`flatten` takes it. Each
                part's tensors go into a file of its own, ``model.safetensors`` and so on.
            before_commit: called by the writer's thread just before the manifest is written.
            writers: this process writes its shards, in the draft of number 0, which alone writes the rest.
            copies: False: the caller calls :meth:`wait` before the state changes, so large ones need no copy.

        Raises:
            CheckpointWriteError: an earlier save failed.
            CheckpointError: the state cannot be saved.
        """
        with self._measure_stall():
            self._await_pending()
            self._last = save = self._capture(state, info, before_commit, writers, copies=copies)
            if save.live:
                self._tensors_read.clear()
            self._pending = self._writer.submit(self._write, save)

    def wait_for_tensors(self) -> None:
        """Wait until no save reads the tensors that it was given; its errors come later."""
        with self._measure_stall():
            self._tensors_read.wait()

    def keep_in_memory(self, state: Mapping[str, Any], info: CheckpointInfo) -> None:
        """Copy the best model's ``state`` into memory, without writing it.

        Raises:
            CheckpointError: the state cannot be saved.
        """
        with self._measure_stall():
            self._await_pending()
            self._deferred = None
            self._deferred = self._capture(state, info, None)

    def has_in_memory(self, state_version: int) -> bool:
        """Return whether this state is in memory here: kept, deferred after a failed write, or being written."""
        writing = self._last if self._pending is not None else None
        return any(save is not None and save.info.state_version == state_version for save in (self._deferred, writing))

    def in_memory(self) -> Checkpoint | None:
        """Return a copy of the state kept in memory, with tensors of its own, or None."""
        save = self._deferred
        if save is None:
            return None
        state = {}
        for part, skeleton in save.skeletons.items():
            kept = save.snapshot.files.get(part + _SUFFIX, {})
            state[part] = unflatten({name: tensor.clone() for name, tensor in kept.items()}, skeleton)
        return Checkpoint(Manifest(save.info, {}), state)

    def flush_pending(self) -> None:
        """Write a deferred best model, if any; return when it is committed.

        Raises:
            CheckpointWriteError: the write failed.
        """
        with self._measure_stall():
            self._await_pending()
            if self._deferred is not None:
                self._pending = self._writer.submit(self._write, None)
                self._await_pending()

    def wait(self) -> None:
        """Wait until no save is running.

        Raises:
            CheckpointWriteError: the save failed.
        """
        with self._measure_stall():
            self._await_pending()

    def poll(self) -> None:
        """Raise the error of a failed save without waiting.

        Raises:
            CheckpointWriteError: the save failed.
        """
        if self._pending is not None and self._pending.done():
            self._await_pending()

    def close(self) -> None:
        """Wait, and end the background thread.

        Raises:
            CheckpointWriteError: the save failed.
        """
        self._writer.shutdown(wait=True)
        self._draft.close()
        self.wait()

    def _capture(
        self,
        state: Mapping[str, Any],
        info: CheckpointInfo,
        before_commit: Callable[[], None] | None,
        writers: Writers | None = None,
        *,
        copies: bool = True,
    ) -> _Save:
        skeletons: dict[str, Any] = {}
        shards: dict[str, TensorShard] = {}
        files: dict[str, dict[str, Tensor]] = {}
        for part, value in state.items():
            if not _PART.fullmatch(part):
                raise CheckpointError(f"a part of the state must be named by an identifier, not {part!r}")
            try:
                tensors, skeletons[part] = flatten(value)
            except CheckpointError as error:
                raise CheckpointError(f"{part}: {error}") from error
            own = {name: value for name, value in tensors.items() if isinstance(value, TensorShard)}
            shards |= {f"{part}/{name}": shard for name, shard in own.items() if shard.part.numel()}
            if plain := {name: tensor for name, tensor in tensors.items() if name not in own}:
                files[part + _SUFFIX] = plain
        if writers is not None:
            files = {**(files if writers.number == 0 else {}), writers.file: {n: s.part for n, s in shards.items()}}
        if self._deferred is not None and info.best_version != self._deferred.info.state_version:
            self._deferred = None  # there is a better one
        if self._deferred is not None and self._deferred.snapshot is self._snapshot:
            self._snapshot = Snapshot()
        of_shards = {name: tensors for name, tensors in files.items() if writers is not None and name == writers.file}
        live = of_shards if copies else files
        if not _is_large([tensor for tensors in live.values() for tensor in tensors.values()]):
            live = {}
        self._snapshot.capture({name: tensors for name, tensors in files.items() if name not in live})
        return _Save(self._snapshot, live, skeletons, info, before_commit, writers, shards, self._draft.pop_all())

    def _await_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    @contextmanager
    def _measure_stall(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.stall_s += time.perf_counter() - start

    def _write(self, save: _Save | None) -> None:
        """Write ``save``, then the deferred one; runs in the writer's thread."""
        try:
            remove_stale(self.directory)
            if save is not None:
                self._commit(save)
            if self._deferred is not None:
                self._commit(self._deferred)
        except CheckpointWriteError:
            if save is not None and save.can_be_repeated:
                self._deferred = save
            raise
        except BaseException:
            self._deferred = None
            raise
        finally:
            if save is not None:
                save.draft.close()
                save.live.clear()
                save.shards.clear()
            self._tensors_read.set()
        self._deferred = None

    def _note_end(self, contents: Iterable[Buffer]) -> Iterator[Buffer]:
        """Yield a file's contents; note that they are read, before the disk has all of them."""
        yield from contents
        self._tensors_read.set()

    def _commit(self, save: _Save) -> None:
        contents = save.contents()
        if (writers := save.writers) is None:
            path = commit(self.directory, save.info, contents.items(), save.before_commit)
        else:
            try:
                own = iter(contents.pop(writers.file))
                writers.write(bytes(next(own)), self._note_end(own), save.shards)
            except OSError as error:
                if writers.number:  # which tells number 0
                    raise CheckpointWriteError(f"cannot write {writers.file}: {error}.") from error
            if writers.number:
                return
            path = commit(
                self.directory,
                save.info,
                contents.items(),
                save.before_commit,
                format=FORMAT,
                draft=writers.draft,
                collect=writers.collect,
            )
        if self._committed is not None:
            self._committed(path, save.info)
        try:
            prune(self.directory, self.keep, path)
        except CheckpointError as error:
            _log.warning("%s", error)  # the save itself succeeded


def _is_large(tensors: Collection[Tensor]) -> bool:
    """Return whether a process should not hold these tensors twice: those of a GPU go through its memory anyway."""
    return all(tensor.is_cpu for tensor in tensors) and sum(tensor.nbytes for tensor in tensors) > _COPIED_BYTES


def load(path: Path, *, whole: bool = True) -> Checkpoint:
    """Verify the checkpoint in ``path`` and rebuild its state, with plain tensors on the CPU.

    The bytes used are the bytes verified, and nothing in them can run code.

    Args:
        whole: read the tensors of a sharded checkpoint, which else are :class:`StoredTensor`, verified when read.

    Raises:
        CheckpointError: it does not verify, or its content is not a state.
    """
    manifest, contents = read_verified(path, is_shard_file)
    try:
        skeletons = parse_json(contents.pop(_STATE, b""))
        if not isinstance(skeletons, dict):
            raise CheckpointError(f"{_STATE} is not a JSON object")
        stored = stored_tensors(path, contents.pop(TABLE, b"{}"))
        state = {}
        for part, skeleton in skeletons.items():
            content = contents.pop(part + _SUFFIX, None)
            tensors: dict[str, Any] = {} if content is None else read_tensors(content)
            sharded = stored.pop(part, {})
            tensors |= {name: tensor.read() for name, tensor in sharded.items()} if whole else sharded
            state[part] = unflatten(tensors, skeleton)
        if contents or stored:
            raise CheckpointError(f"{min([*contents, *stored])} belongs to no part of the state")
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {path} holds no state that Paceline wrote: {error}") from error
    return Checkpoint(manifest, state)
