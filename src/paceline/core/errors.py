"""Every error that Paceline raises on purpose.

::

    PacelineError                 exit code 1
    ├── UserError                 exit code 2: the message says what to change
    │   ├── ConfigError           an option, or a combination of options
    │   ├── TaskError             the task's name, file, fields or methods
    │   ├── DataError             a dataset, a sample or a download
    │   ├── ExportError           a model that cannot be exported, or comes out as something else
    │   ├── PackageError          a package that does not verify, or none where one was named
    │   │   └── UntrustedError    ... whose program may run code, and that nobody trusted yet
    │   └── RunDirectoryError     a run directory that is foreign or unusable
    │       ├── RunInUseError     ... that another process works in
    │       └── RunDirectoryWriteError   ... whose disk is full, read-only or broken
    ├── CheckpointError           a checkpoint that does not verify, or none that does
    │   └── CheckpointWriteError         one that the disk did not take; earlier ones are untouched
    ├── NonFiniteLossError        the loss or a gradient became NaN or infinite
    ├── SilentDataCorruptionError           this rank computes something else than the others (--sdc-check-every)
    ├── NondeterminismError   ranks compute different things, and nobody can say who is right
    ├── PeerLostError             another rank went away: a victim's error, never the cause
    ├── HangError                 a step took longer than it may; names who held it up
    ├── LaunchError               a worker failed; carries the first failure
    ├── ServingError              a server or one of its replicas could not do what was asked
    └── StopRequested             a signal asked for a stop; the state is saved (exit code 75 or 130)
"""

from __future__ import annotations


class PacelineError(Exception):
    """Base of every deliberate error; ``exit_code`` is what the command line exits with."""

    exit_code = 1


class UserError(PacelineError):
    """Something the user can put right; shown without a traceback."""

    exit_code = 2


class ConfigError(UserError):
    """An option has a value that cannot work."""


class TaskError(UserError):
    """A task cannot be found, imported, built or given these fields."""


class DataError(UserError):
    """A dataset is missing, damaged, or yields what it should not."""


class ExportError(UserError):
    """A model cannot be exported in a format, or what came out computes something else."""


class PackageError(UserError):
    """A package is damaged, is not what its manifest says, or is not there."""


class UntrustedError(PackageError):
    """A package's program may run code, and the user has not said that it may."""


class RunDirectoryError(UserError):
    """A run directory is another task's, in use, or cannot be written."""


class RunInUseError(RunDirectoryError):
    """Another process works in the run directory; nothing in it may be touched."""


class RunDirectoryWriteError(RunDirectoryError):
    """The disk is full, read-only or broken; what was written before is untouched, and another try may do."""


class CheckpointError(PacelineError):
    """A checkpoint does not verify, or none that was asked for exists."""


class CheckpointWriteError(CheckpointError):
    """The disk did not take a checkpoint; earlier ones are untouched, and another try may do."""


class NonFiniteLossError(PacelineError):
    """The loss of a step is NaN or infinite; nothing of that step was applied."""


class SilentDataCorruptionError(PacelineError):
    """This rank computed another gradient than the majority; nothing of that step was applied."""


class NondeterminismError(PacelineError):
    """A gradient came out differently each time; nothing of that step was applied."""


class PeerLostError(PacelineError):
    """A peer of this rank closed its connection or died.

    Attributes:
        rank: the peer's rank where it is known, else ``None``.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class HangError(PacelineError):
    """A step took longer than it may; the message names who held it up."""


class LaunchError(PacelineError):
    """At least one worker failed. The message names the first one, its error and its log."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class ServingError(PacelineError):
    """A model could not be loaded, or a server did not answer as it should."""


class StopRequested(PacelineError):
    """The run was asked to stop, saved its state and can be resumed.

    ``exit_code`` is 75 ("run me again") after SIGTERM and 130 after SIGINT.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
