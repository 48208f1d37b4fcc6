"""Saving in the background, and loading."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from torch import Tensor

from paceline.checkpoint.manifest import CheckpointInfo, Manifest, parse_json, read_verified
from paceline.checkpoint.state import flatten, unflatten
from paceline.checkpoint.storage import commit, remove_stale, retain
from paceline.checkpoint.tensors import Snapshot, read_tensors
from paceline.errors import CheckpointError

_STATE = "state.json"
_SUFFIX = ".safetensors"
_PART = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


class Checkpoint(NamedTuple):
    """A checkpoint in memory, every byte of which was checked."""

    manifest: Manifest
    state: dict[str, Any]


class Checkpointer:
    """Saves a run's state into new directories, in one background thread, one at a time.

    Attributes:
        stall_s: seconds that callers were held by :meth:`save` and :meth:`wait` so far.
        saves: number of saves started so far.

    An error of the background thread is raised once, by the next :meth:`save`, :meth:`wait`,
    :meth:`poll` or :meth:`close`. The snapshot's buffer, the size of the state, is kept between
    saves. One thread at a time may call it.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        """Prepare to save into ``directory``, of whose checkpoints the last ``keep`` (at least 1) stay."""
        if keep < 1:
            raise ValueError(f"keep must be at least 1, but is {keep}")
        self.directory = directory
        self.keep = keep
        self.stall_s = 0.0
        self.saves = 0
        self._snapshot = Snapshot()
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="paceline-checkpoint")
        self._pending: Future[None] | None = None
        remove_stale(directory)

    def save(
        self,
        state: Mapping[str, Any],
        info: CheckpointInfo,
        *,
        before_commit: Callable[[], None] | None = None,
        synchronous: bool = False,
    ) -> None:
        """Copy ``state`` and write it in the background; first waits for an earlier save to end.

        Args:
            state: part name (an identifier) -> nested state, as :func:`flatten` takes it. Each
                part's tensors go into a file of its own, ``model.safetensors`` and so on.
            info: what the state is of.
            before_commit: called by the writer's thread just before the manifest is written.
            synchronous: return only when the checkpoint is committed.

        Raises:
            CheckpointError: the state cannot be saved, or an earlier save failed in the background.
        """
        with self._stalled():
            self._settle()
            skeletons: dict[str, Any] = {}
            files: dict[str, dict[str, Tensor]] = {}
            for part, value in state.items():
                if not _PART.fullmatch(part):
                    raise CheckpointError(f"a part of the state must be named by an identifier, not {part!r}")
                try:
                    tensors, skeletons[part] = flatten(value)
                except CheckpointError as error:
                    raise CheckpointError(f"{part}: {error}") from error
                if tensors:
                    files[part + _SUFFIX] = tensors
            self._snapshot.capture(files)
            self._pending = self._writer.submit(self._write, skeletons, info, before_commit)
            self.saves += 1
            if synchronous:
                self._settle()

    def wait(self) -> None:
        """Return when nothing is being written.

        Raises:
            CheckpointError: the save failed.
        """
        with self._stalled():
            self._settle()

    def poll(self) -> None:
        """Raise the error of a save that has failed by now; never waits.

        Raises:
            CheckpointError: the save failed.
        """
        if self._pending is not None and self._pending.done():
            self._settle()

    def close(self) -> None:
        """Wait, and end the background thread.

        Raises:
            CheckpointError: the save failed.
        """
        self._writer.shutdown(wait=True)
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            # The error under way is the one to show.
            self._writer.shutdown(wait=True)

    def _settle(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    @contextmanager
    def _stalled(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.stall_s += time.perf_counter() - start

    def _write(
        self, skeletons: dict[str, Any], info: CheckpointInfo, before_commit: Callable[[], None] | None
    ) -> None:
        text = json.dumps(skeletons, indent=1, allow_nan=False).encode()
        contents = [*self._snapshot.contents(), (_STATE, (text,))]
        newest = commit(self.directory, info, contents, before_commit)
        retain(self.directory, self.keep, newest)


def load(path: Path) -> Checkpoint:
    """Verify the checkpoint in ``path`` and rebuild its state, with plain tensors on the CPU.

    What is checked and what is used are the same bytes in memory; nothing in them can run code.

    Raises:
        CheckpointError: it does not verify, or its content is not a state.
    """
    manifest, contents = read_verified(path)
    try:
        skeletons = parse_json(contents.pop(_STATE, b""))
        if not isinstance(skeletons, dict):
            raise CheckpointError(f"{_STATE} is not a JSON object")
        state = {}
        for part, skeleton in skeletons.items():
            content = contents.pop(part + _SUFFIX, None)
            tensors = {} if content is None else read_tensors(content)
            state[part] = unflatten(tensors, skeleton)
        if contents:
            raise CheckpointError(f"{min(contents)} belongs to no part of the state")
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {path} holds no state that Paceline wrote: {error}") from error
    return Checkpoint(manifest, state)
