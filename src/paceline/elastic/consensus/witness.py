"""The quorum witness: breaks a tie between halves of a node set, once and for all, in a shared directory. No torch.

A witness file is hard-linked into place: creating a link fails if the name exists, also on NFS, so there is one winner,
and the file is complete before it has its name. It is never removed or changed. The directory has a random name that
its creator tells the other nodes, so that a node can check that it sees the same directory, and files of an earlier job
in the same place are ignored.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import RunDirectoryError
from paceline.core.files import fsync_directory, parse_json, read_document
from paceline.elastic.consensus.messages import NodeSet

_KEY = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class FileWitness:
    """A job's witness files.

    Attributes:
        path: a directory that the nodes share, such as the run's.
        key: the creator's random key, for the other nodes.
    """

    path: Path
    key: str

    @classmethod
    def create(cls, path: Path) -> FileWitness:
        """Create a job's witness directory.

        Raises:
            RunDirectoryError: it cannot be written.
        """
        witness = cls(path, secrets.token_hex(16))
        try:
            witness._directory.mkdir(parents=True)
            fsync_directory(path)
        except OSError as error:
            raise witness._unusable(error) from error
        return witness

    def is_shared(self) -> bool:
        """Return whether this node sees the creator's directory, and can write there.

        A file system may show it with some seconds of delay, so retry before giving up.
        """
        if not _KEY.fullmatch(self.key):
            return False
        try:
            probe = self._directory / f".probe-{secrets.token_hex(8)}"
            probe.touch(exist_ok=False)
            probe.unlink()
        except OSError:
            return False
        return True

    def acquire(self, node_set: NodeSet, winners: frozenset[str]) -> frozenset[str]:
        """Take a node set's witness for these of its nodes, unless others have; return its holders.

        It blocks as long as the file system does.

        Raises:
            RunDirectoryError: the directory cannot be written, or the witness file is invalid; no half may continue
                then.
        """
        witness_file = self._directory / f"roster-{node_set.config_epoch:08d}.json"
        draft = self._directory / f".draft-{secrets.token_hex(8)}"
        content = {"generation": node_set.config_epoch, "nodes": node_set.nodes, "winners": sorted(winners)}
        try:
            try:
                with draft.open("xb") as file:
                    file.write(json.dumps(content).encode() + b"\n")
                    file.flush()
                    os.fsync(file.fileno())
                # NFS may report a failure for a link that it has made, so only the file's content counts.
                with suppress(FileExistsError):
                    os.link(draft, witness_file)
            finally:
                draft.unlink(missing_ok=True)
            fsync_directory(self._directory)
            return self._read(witness_file, node_set)
        except OSError as error:
            raise self._unusable(error) from error

    def _read(self, witness_file: Path, node_set: NodeSet) -> frozenset[str]:
        try:
            content = parse_json(read_document(witness_file))
            winners = frozenset(content["winners"])
            is_intact = content["nodes"] == list(node_set.nodes) and winners < set(node_set.nodes)
        except (ValueError, KeyError, TypeError):
            is_intact = False
        if not is_intact:
            raise RunDirectoryError(
                f"{witness_file} is not the witness of the nodes {', '.join(node_set.nodes)}. "
                "Only Paceline may write there. Start the run again, which uses another directory."
            )
        return winners

    @property
    def _directory(self) -> Path:
        return self.path / f"leases-{self.key}"

    def _unusable(self, error: OSError) -> RunDirectoryError:
        return RunDirectoryError(
            f"the witness directory {self._directory} cannot be used: {error.strerror}. "
            "It must be in a directory that all nodes can write."
        )
