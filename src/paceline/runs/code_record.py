"""The code with which a run trains: ``code.jsonl``, and uncommitted changes in ``code/``. No torch.

Each line of ``code.jsonl`` has the entries that changed since the line before, with the step and the time: ``commit``,
``patch`` (uncommitted changes of files that git tracks), ``modules`` (digests of imported files outside of
site-packages and Python's own library), ``packages`` (versions), ``data`` (the training data's fingerprint), and
``directory``, to which the paths of modules are relative.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.core.built_in import PACKAGES
from paceline.core.errors import RunDirectoryError, join_names
from paceline.core.files import append_lines, open_regular, read_json_lines, write_atomically
from paceline.runs.directory import RunDirectory

_log = logging.getLogger(__name__)

_MOST_BYTES = 2**20  # of uncommitted changes
_GIT_S = 10.0
_NAMED = 8
_DIGITS = 16
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
_ENTRIES = {"commit": str, "patch": str, "data": str, "directory": str, "modules": dict, "packages": dict}

# --- Reading ---


def read_code(directory: RunDirectory) -> dict[str, Any]:
    """Return the newest record of a run's code, by entry; empty if there is none."""
    code: dict[str, Any] = {}
    with suppress(OSError):
        for line in read_json_lines(directory.code, errors="replace"):
            code |= {name: value for name, value in line.items() if isinstance(value, _ENTRIES.get(name, ()))}
    return code


def changed_files(directory: RunDirectory) -> list[str]:
    """Return the recorded files that have another content now.

    As the task's own file, a relative one is looked for in the current directory first. A file that is missing was
    moved, or those that imported it have changed, too.
    """
    code = read_code(directory)
    recorded, folder = code.get("modules", {}), Path(code.get("directory", ""))
    now = {name: _digest(Path(name) if Path(name).is_file() else folder / name) for name in recorded}
    return [name for name, digest in recorded.items() if now[name] not in (digest, None)]


def require_same_code(directory: RunDirectory) -> None:
    """Check that a run's code is as it was, unless torchrun or Slurm has restarted this command.

    Raises:
        RunDirectoryError: names the files that changed.
    """
    if any(os.environ.get(name, "0") != "0" for name in _RESTARTS) or directory.has_result():
        return
    if changed := changed_files(directory):
        code = read_code(directory)
        commit = f"commit {code['commit'][:12]}, " if "commit" in code else ""
        raise RunDirectoryError(
            f"the code of {directory.path} has changed since it was trained, and its bits depend on it: "
            f"{join_names(changed, _NAMED)}. Restore the files ({commit}see {directory.code}), or continue with the "
            "new code: --accept-code-changes."
        )


# --- Recording ---


class CodeRecorder:
    """Records the code of this process, in a thread where git may take long; a failure stops nothing."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def warn_of_changes(self, directory: RunDirectory) -> None:
        """Warn, and record an event, if this process has other code than the run's newest record."""
        if changed := changed_files(directory):
            names = join_names(changed, _NAMED)
            _log.warning("the code has changed since the run's last start, and its bits depend on it: %s", names)
            directory.append_event("code changed", files=changed)

    def record(self, directory: RunDirectory, step: int, task_module: str, data: object) -> None:
        """Append what changed since the last record; rank 0 calls it at each start from disk.

        Args:
            task_module: the name of the task's module; git is asked about the folder of its file.
            data: the training data; that of the library ``datasets`` has a fingerprint.
        """
        modules = _local_modules()
        files = [*modules.values()]
        file = modules.get(task_module, files[0] if files else None)
        is_session = not hasattr(sys.modules.get("__main__"), "__file__")  # a notebook, or an interactive one
        root = Path.cwd() if file is None and is_session else file
        fingerprint = getattr(data, "_fingerprint", None)
        commit = None if root is None or not _has_repository(root) else _git(root, "rev-parse", "--verify", "HEAD")
        _append(
            directory,
            step,
            {
                "directory": str(Path.cwd()),
                "commit": None if commit is None else commit.decode(errors="replace").strip(),
                "modules": {_name(file): digest for file in files if (digest := _digest(file)) is not None},
                "packages": _packages(),
                "data": fingerprint if isinstance(fingerprint, str) else None,
            },
        )
        if root is not None and commit is not None:
            self._thread = threading.Thread(target=_record_patch, args=(directory, step, root), name="paceline-code")
            self._thread.start()

    def close(self) -> None:
        """Wait for git, which is ended after some seconds."""
        if self._thread is not None:
            self._thread.join()


def _append(directory: RunDirectory, step: int, entries: Mapping[str, Any]) -> None:
    before = read_code(directory)
    changed = {name: value for name, value in entries.items() if value is not None and before.get(name) != value}
    if changed:
        line = json.dumps({"time": round(time.time(), 3), "step": step, **changed})
        with suppress(OSError):
            append_lines(directory.code, f"{line}\n".encode())


def _local_modules() -> dict[str, Path]:
    """Return the files of imported modules, by name, without those of Python, installed packages and Paceline."""
    found: dict[str, Path] = {}
    installed = {"", *PACKAGES}
    own = tuple(f"{folder}{os.sep}" for folder in (sysconfig.get_path("stdlib"), Path(__file__).parents[1]))
    for name, module in sorted(sys.modules.items(), key=lambda item: item[0].count(".")):
        with suppress(AttributeError):  # a module may be any object; one that is loaded on use stays as it is
            file = object.__getattribute__(module, "__dict__").get("__file__")
            if not isinstance(file, str) or name.partition(".")[0] in installed:
                continue
            if file.startswith(own) or {"site-packages", "dist-packages"} & {*file.split(os.sep)}:
                installed.add(name)
            elif file.endswith(".py"):
                found[name] = Path(file).absolute()
    return found


def _packages() -> dict[str, str]:
    """Return the versions of installed packages: from the names of their folders, as their metadata takes 0.3 s."""
    versions: dict[str, str] = {}
    for folder in sys.path:
        with suppress(OSError):
            for entry in os.listdir(folder or "."):
                if entry.endswith(".dist-info"):
                    name, _, version = entry.removesuffix(".dist-info").partition("-")
                    versions.setdefault(name, version)
    return dict(sorted(versions.items()))


def _name(file: Path) -> str:
    return str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)


def _digest(path: Path) -> str | None:
    with suppress(OSError), open_regular(path) as file:
        return hashlib.sha256(file.read()).hexdigest()[:_DIGITS]
    return None


def _has_repository(path: Path) -> bool:
    """Return whether git would look for a repository and find one, without a process."""
    ceilings = os.environ.get("GIT_CEILING_DIRECTORIES", "").split(os.pathsep)
    for folder in (path, *path.parents):
        if str(folder) in ceilings:
            return False
        if (folder / ".git").exists():
            return True
    return False


def _record_patch(directory: RunDirectory, step: int, root: Path) -> None:
    """Keep the uncommitted changes of files that git tracks, but for ignored ones."""
    ignored = _git(root, "ls-files", "-ciz", "--exclude-standard", "--full-name", "--", ":/")
    if ignored is None:
        return
    left_out = [f":(top,exclude,literal){os.fsdecode(name)}" for name in ignored.split(b"\0") if name]
    options = ("--no-ext-diff", "--no-textconv", "--no-color")
    changes = None if len(left_out) > 1000 else _git(root, "diff", *options, "HEAD", "--", ":/", *left_out)
    if changes is None:
        patch = f"not kept: over {_MOST_BYTES >> 20} MiB, {_GIT_S:.0f} s, or 1,000 ignored files"
    elif changes:
        patch = f"code/{hashlib.sha256(changes).hexdigest()[:_DIGITS]}.patch"
        with suppress(OSError):
            (directory.path / "code").mkdir(exist_ok=True)
            write_atomically(directory.path / patch, changes, private=True)
    else:
        patch = "none"
    _append(directory, step, {"patch": patch})


def _git(root: Path, *arguments: str) -> bytes | None:
    """Return what git prints; None without git or a repository, or where it prints or takes too much."""
    command = ("git", "-c", "core.fsmonitor=false", "-C", str(root if root.is_dir() else root.parent), *arguments)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except OSError:
        return None
    limit = threading.Timer(_GIT_S, process.kill)
    limit.daemon = True
    limit.start()
    try:
        with process:
            assert process.stdout is not None
            printed = process.stdout.read(_MOST_BYTES + 1)
            process.kill() if len(printed) > _MOST_BYTES else process.wait()
    finally:
        limit.cancel()
    return printed if process.returncode == 0 else None
