"""Every error that Paceline raises on purpose.

::

    PacelineError                 exit code 1
    ├── UserError                 exit code 2: the message says what to change
    │   ├── ConfigError           an invalid option or combination of options
    │   ├── TaskError             the task's name, file, fields or methods
    │   ├── DataError             a dataset, a sample or a download
    │   ├── PurityError           a task whose model would depend on the number of processes (--purity error)
    │   ├── ExportError           a model that cannot be exported, or whose export computes other outputs
    │   ├── PackageError          a package that fails verification or does not exist
    │   │   └── UntrustedError    ... whose program may run code and is not trusted yet
    │   └── RunDirectoryError     a run directory of another task, or an unusable one
    │       ├── RunInUseError     ... that another process is using
    │       └── RunDirectoryWriteError   ... whose disk is full, read-only or broken
    ├── CheckpointError           a checkpoint that fails verification or does not exist
    │   └── CheckpointWriteError  a failed write; earlier checkpoints are untouched
    ├── NonFiniteLossError        the loss or a gradient became NaN or infinite
    ├── SilentDataCorruptionError  this rank's gradient differs from the majority's (--sdc-check-every)
    ├── NondeterminismError       ranks disagree and there is no majority
    ├── PeerLostError             another rank is gone: a secondary failure, never the root cause
    ├── HangError                 a step exceeded its timeout; names the rank that blocks it
    ├── LaunchError               a worker failed; carries the first failure
    ├── ServingError              a server or one of its replicas failed
    └── StopRequested             a signal requested a stop; the state is saved (exit code 75 or 130)
"""

from __future__ import annotations

from collections.abc import Iterable

RESTART_EXIT_CODE = 75
"""The exit code of a process that saved its state after a stop request: restart it to continue."""


class PacelineError(Exception):
    """Base of every deliberate error; ``exit_code`` is what the command line exits with."""

    exit_code = 1


class UserError(PacelineError):
    """An error the user can fix; shown without a traceback."""

    exit_code = 2


class ConfigError(UserError):
    """An option has a value that cannot work."""


class TaskError(UserError):
    """A task cannot be found, imported, built or given these fields."""


class DataError(UserError):
    """A dataset is missing or damaged, or yields an invalid sample."""


class PurityError(UserError):
    """A task computes something else for another number of processes, or after a restart."""


class ExportError(UserError):
    """A model cannot be exported in a format, or its export computes other outputs."""


class PackageError(UserError):
    """A package is missing, damaged, or does not match its manifest."""


class UntrustedError(PackageError):
    """A package's program may run code, and the user has not trusted it."""


class RunDirectoryError(UserError):
    """A run directory belongs to another task, is in use, or cannot be written."""


class RunInUseError(RunDirectoryError):
    """Another process is using the run directory; nothing in it may be changed."""


class RunDirectoryWriteError(RunDirectoryError):
    """The disk is full, read-only or broken. Earlier files are untouched, and a retry may succeed."""


class CheckpointError(PacelineError):
    """A checkpoint fails verification or does not exist."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint could not be written. Earlier ones are untouched, and a retry may succeed."""


class NonFiniteLossError(PacelineError):
    """The loss of a step is NaN or infinite; nothing of that step was applied."""


class SilentDataCorruptionError(PacelineError):
    """This rank's gradient differs from the majority's; nothing of that step was applied."""


class NondeterminismError(PacelineError):
    """The same computation gave different gradients; nothing of that step was applied."""


class PeerLostError(PacelineError):
    """A peer of this rank closed its connection or died.

    Attributes:
        rank: the peer's rank, or ``None`` if it is unknown.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class HangError(PacelineError):
    """A step exceeded its timeout; the message names the rank that blocks it."""


class LaunchError(PacelineError):
    """At least one worker failed. The message names the first one, its error and its log."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class ServingError(PacelineError):
    """A model could not be loaded, or a server failed to answer."""


class StopRequested(PacelineError):
    """The run was asked to stop, saved its state and can be resumed.

    ``exit_code`` is 75 ("run me again") after SIGTERM and 130 after SIGINT.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def join_names(found: Iterable[str], most: int = 6) -> str:
    """Join names with commas for a message; of many, name the first and the number of the others."""
    kept = list(found)
    more = len(kept) - most
    return ", ".join(kept[:most]) + (f" and {more} more" if more > 0 else "")
