"""The tie-breaker: one half of a roster, for ever, by a directory that all nodes share. No torch.

A lease is a file that is linked into place: making a hard link fails where the name is taken, also on NFS,
so there is one winner, and the file is whole before it has its name. It is never removed or changed. The
directory bears a random name that only its founder knows and tells the others: so a node finds out whether it
sees the same directory, and the leases of an earlier job in the same place count for nothing.
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
from paceline.core.files import fsync_directory
from paceline.elastic.consensus.messages import NodeSet

_KEY = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class FileWitness:
    """A job's leases.

    Attributes:
        path: a directory that the nodes share, such as the run's.
        key: what the founder has drawn, to be told to the others.
    """

    path: Path
    key: str

    @classmethod
    def create(cls, path: Path) -> FileWitness:
        """Make a job's lease directory.

        Raises:
            RunDirectoryError: it cannot be written.
        """
        leases = cls(path, secrets.token_hex(16))
        try:
            leases._directory.mkdir(parents=True)
            fsync_directory(path)
        except OSError as error:
            raise leases._unusable(error) from error
        return leases

    def is_shared(self) -> bool:
        """Whether this node sees the founder's directory, and can write there.

        A file system may show it some seconds late: ask again before giving it up.
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

    def acquire(self, roster: NodeSet, winners: frozenset[str]) -> frozenset[str]:
        """Take a roster's lease for these of its nodes, unless others have; return who holds it.

        It may take as long as the file system does.

        Raises:
            RunDirectoryError: the directory cannot be written, or the lease read; nobody may go on by it.
        """
        lease = self._directory / f"roster-{roster.config_epoch:08d}.json"
        draft = self._directory / f".draft-{secrets.token_hex(8)}"
        content = {"generation": roster.config_epoch, "nodes": roster.nodes, "winners": sorted(winners)}
        try:
            try:
                with draft.open("xb") as file:
                    file.write(json.dumps(content).encode() + b"\n")
                    file.flush()
                    os.fsync(file.fileno())
                # NFS may report failure of a link that it has made; what counts is what the file says.
                with suppress(FileExistsError):
                    os.link(draft, lease)
            finally:
                draft.unlink(missing_ok=True)
            fsync_directory(self._directory)
            return self._read(lease, roster)
        except OSError as error:
            raise self._unusable(error) from error

    def _read(self, lease: Path, roster: NodeSet) -> frozenset[str]:
        try:
            content = json.loads(lease.read_bytes())
            winners = frozenset(content["winners"])
            intact = content["nodes"] == list(roster.nodes) and winners < set(roster.nodes)
        except (ValueError, KeyError, TypeError):
            intact = False
        if not intact:
            raise RunDirectoryError(
                f"{lease} is not the lease of the nodes {', '.join(roster.nodes)}. "
                "Nothing but Paceline may write there; start the run again, which uses another directory."
            )
        return winners

    @property
    def _directory(self) -> Path:
        return self.path / f"leases-{self.key}"

    def _unusable(self, error: OSError) -> RunDirectoryError:
        return RunDirectoryError(
            f"the lease directory {self._directory} cannot be used: {error.strerror}. "
            "It must be in a directory that all nodes can write."
        )
