"""The quorum witness: breaks a tie between halves of a node set, once and for all, in a shared directory. No torch.

A witness is a folder with one file, renamed into place: a rename fails where another folder with a file has the name,
also on file systems without hard links, so there is one winner, and the file is complete before the folder has its
name. It is never removed or changed. The directory has a random name that its creator tells the other nodes, so that a
node can check that it sees the same directory, and files of an earlier job in the same place are ignored.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import RunDirectoryError
from paceline.core.files import fsync_directory, look_anew, parse_json, read_document
from paceline.elastic.consensus.messages import NodeSet

_FILE = "witness.json"
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
            witness._directory.mkdir(parents=True, exist_ok=True)
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
        look_anew(self.path.parent, self.path)
        try:
            probe = self._directory / f".probe-{secrets.token_hex(8)}"
            probe.touch(exist_ok=False)
            probe.unlink(missing_ok=True)
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
        place = self._directory / f"roster-{node_set.config_epoch:08d}"
        draft = self._directory / f".draft-{secrets.token_hex(8)}"
        content = {"generation": node_set.config_epoch, "nodes": node_set.nodes, "winners": sorted(winners)}
        refusal: OSError | None = None
        try:
            try:
                draft.mkdir(exist_ok=True)
                with (draft / _FILE).open("xb") as file:
                    file.write(json.dumps(content).encode() + b"\n")
                    file.flush()
                    os.fsync(file.fileno())
                fsync_directory(draft)
                draft.rename(place)
            except OSError as error:
                refusal = error  # NFS may report a failure for a rename that it has made, so only the content counts
            finally:
                shutil.rmtree(draft, ignore_errors=True)
            fsync_directory(self._directory)
            return self._read(place / _FILE, node_set)
        except OSError as error:
            raise self._unusable(refusal or error) from error

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
