"""The program of a submitit job, and the folder of its pickles."""

from __future__ import annotations

import os
import signal
import stat
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.core.environment import HOSTS, JOB_ID, NODE_RANK, NODES, Environment
from paceline.core.errors import RESTART_EXIT_CODE, ConfigError, LaunchError
from paceline.core.files import write_atomically
from paceline.core.job import Command
from paceline.core.sockets import job_port
from paceline.launch.rank_variables import env_style_variables
from paceline.launch.supervisor import RankStarter, SupervisedJob

if TYPE_CHECKING:
    import submitit


# --- The folder that holds submitit's pickles: its owner's alone, since loading one runs code ---


def make_private(folder: Path) -> Path:
    """Make the folder with mode 0700, or check the existing one; return its absolute path."""
    folder = folder.expanduser().absolute()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}.") from error
    check_private(folder)
    return folder


def check_private(folder: Path) -> None:
    """Reject a folder whose pickles another user may have written."""
    try:
        status = folder.lstat()
    except OSError as error:
        raise ConfigError(f"cannot read the folder {folder}: {error.strerror}.") from error
    why = "submitit keeps pickles there, and any user with write access to them can run code as you"
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{folder} is not a directory, but a link or a file; {why}. Choose another folder.")
    if status.st_uid != os.geteuid():
        raise ConfigError(f"{folder} belongs to user {status.st_uid}, not to you; {why}. Choose another folder.")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise ConfigError(f"{folder} is open to other users (mode {mode:o}); {why}. Close it: chmod 700 {folder}")


# --- The pickled objects that submitit runs on the nodes: a command, or the user's function ---
#
# Each writes its task's exit code into a text file, so that no reader has to load a pickle for it.


PREEMPT_SIGNAL = "USR1"
"""What Slurm and submitit announce the end with, to a command: Paceline saves on it."""

# After SIGTERM alone Slurm decides whether the job comes back; a task that ended first would end it.
_UNTIL_SLURM_KILLS_S = 600.0


def exit_code_file(folder: Path, job_id: str, rank: int) -> Path:
    """Return the path of a task's exit code."""
    return folder / f"{job_id}_{rank}_exit-code"


class StartCommand:
    """Runs a command, once for each task, until it ends; after a stop request, the job is requeued.

    Args:
        each: the kind of task: a "machine", on which the command starts the ranks, or a "rank".
    """

    def __init__(self, command: Sequence[str], each: Literal["machine", "rank"] = "machine") -> None:
        self.command = tuple(command)
        self.each = each

    def __call__(self) -> int:
        """Run it; return 0."""
        import submitit

        task = submitit.JobEnvironment()
        file = exit_code_file(task.paths.folder, task.job_id, task.global_rank)
        file.unlink(missing_ok=True)
        if self.each == "machine" and task.num_nodes > 1:
            _name_machine(task)
        command = Command(title="the command", argv=self.command)
        job = SupervisedJob((command,), starter=RankStarter(name="the command", says_why=True))
        code, asked_by = job.wait(), job.asked_by
        if code != 0 and asked_by == signal.SIGTERM and os.environ.get("SUBMITIT_EXECUTOR") == "slurm":
            time.sleep(_UNTIL_SLURM_KILLS_S)
        if code != 0 and (asked_by == signal.SIGUSR1 or (asked_by is None and code == RESTART_EXIT_CODE)):
            self._requeue(task)
        write_atomically(file, f"{code}\n".encode())
        if code:
            raise LaunchError(f"{self.command[0]} exited with {code}; its output is above.", exit_code=code)
        return code

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Ask submitit to start the same command again: a task continues from what it has saved."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)

    @staticmethod
    def _requeue(task: submitit.JobEnvironment) -> None:
        """Leave it to submitit, whose handler requeues the job from its first task; does not return."""
        if task.global_rank == 0:
            signal.raise_signal(getattr(signal, f"SIG{task.USR_SIG}"))
        # A task that will run again must write no result, and SystemExit writes none.
        sys.exit(RESTART_EXIT_CODE)


def _name_machine(task: submitit.JobEnvironment) -> None:
    """Tell the command which machine this is; srun's variables would make it a rank of its step."""
    os.environ[NODE_RANK] = str(task.node)
    os.environ[NODES] = str(task.num_nodes)
    os.environ[HOSTS] = ",".join(task.hostnames)
    os.environ[JOB_ID] = _job_id(task)
    os.environ.pop("SLURM_STEP_ID", None)


def _job_id(task: submitit.JobEnvironment) -> str:
    """No other job's, and no earlier start's of this one."""
    return f"{task.job_id}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"


class CallFunction:
    """Calls a function; if the job has several tasks, each gets torch's rank variables.

    Args:
        script: the file that it is defined in, where that is the program itself.
    """

    def __init__(self, function: Callable[..., Any], script: Path | None) -> None:
        self.function = function
        self.script = script

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it in this task."""
        import submitit

        task = submitit.JobEnvironment()
        file = exit_code_file(task.paths.folder, task.job_id, task.global_rank)
        file.unlink(missing_ok=True)
        if task.num_tasks > 1:
            os.environ.update(rank_variables(task))
        if self.script is not None:
            _become_main(self.function, self.script)
        try:
            result = self.function(*args, **kwargs)
        except Exception:
            write_atomically(file, b"1\n")
            raise
        write_atomically(file, b"0\n")
        return result


class CallCheckpointable(CallFunction):
    """Calls an object that has a ``checkpoint`` method, which says what is called after a requeue."""

    def checkpoint(self, *args: Any, **kwargs: Any) -> submitit.helpers.DelayedSubmission | None:
        """Ask the object; it returns a callable, submitit's DelayedSubmission, or None to end the job."""
        import submitit

        again = self.function.checkpoint(*args, **kwargs)  # type: ignore[attr-defined]
        if again is None:
            return None
        if not isinstance(again, submitit.helpers.DelayedSubmission):
            again = submitit.helpers.DelayedSubmission(again, *args, **kwargs)
        again.function = callable_for(again.function, self.script)
        return again


def callable_for(function: Callable[..., Any], script: Path | None = None) -> CallFunction:
    """Wrap a function for submitit, which finds ``checkpoint`` by name."""
    module = _home(function).__module__
    if module == "__mp_main__":
        raise ConfigError(
            "the program submits a job whenever a worker process imports it. Put the call under "
            'if __name__ == "__main__":'
        )
    if module == "__main__" and script is None:
        file = getattr(sys.modules["__main__"], "__file__", None)
        script = None if file is None else Path(file).resolve()
    kind = CallCheckpointable if hasattr(function, "checkpoint") else CallFunction
    return kind(function, script)


def _home(function: Callable[..., Any]) -> Any:
    """Return the function, or the class of a callable object."""
    return function if hasattr(function, "__globals__") else type(function)


def _become_main(function: Callable[..., Any], script: Path) -> None:
    """Make this process the program that submitted the job, for multiprocessing: functions may spawn workers.

    Objects defined there were sent by value, and are named ``__main__.NAME``: pickle searches there for objects that a
    worker gets, and a spawned worker imports the file of ``__main__`` first.
    """
    main = types.ModuleType("__main__")
    home = _home(function)
    globals_ = getattr(home, "__globals__", None) or getattr(home.__call__, "__globals__", {})
    main.__dict__.update(globals_, __name__="__main__", __file__=str(script), __spec__=None)
    setattr(main, home.__name__, home)
    sys.modules["__main__"] = main


def rank_variables(task: submitit.JobEnvironment) -> Mapping[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and the like, of submitit's task."""
    several = task.num_nodes > 1
    environment = Environment(
        source="variables",
        rank=task.global_rank,
        world_size=task.num_tasks,
        local_rank=task.local_rank,
        local_world_size=task.num_tasks // task.num_nodes,
        node_rank=task.node,
        nodes=task.num_nodes,
        master_addr=task.hostnames[0] if several else "127.0.0.1",
        master_port=job_port(_job_id(task)),
    )
    return env_style_variables("torch", environment)
