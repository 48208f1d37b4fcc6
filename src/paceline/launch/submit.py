"""Submits a job to a launcher, and records it for `paceline jobs`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from paceline.core.config import RunConfig, select, to_flags
from paceline.core.errors import ConfigError, LaunchError
from paceline.core.files import parse_json, read_document, user_directory, write_atomically
from paceline.core.job import default_run_path
from paceline.core.launch_spec import RecoveryPolicy
from paceline.core.task_loading import split_spec
from paceline.launch.launcher import (
    EnvStyle,
    JobHandle,
    JobStatus,
    Launcher,
    LaunchSpec,
    RankLauncher,
    RenderedJob,
    RenderedOnlyError,
    get_launcher,
    job_name,
)

# --- Which jobs this user has submitted, over all launchers: one small JSON file each ---


_KEEP = 200
_LONG = 8192  # bytes; few records are longer
_PLACE = ("server", "namespace", "region", "boot", "pid_namespace")
"""In a reference: within what a number means one job."""


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """A job that was submitted.

    Attributes:
        id: the launcher's name and the system's own number: ``slurm-4711``; see :func:`record_id`.
        launcher: its launcher's name for ``--on``.
        directory: has its script and logs.
        run: the run's directory, of a task.
        reference: the launcher's identification of it.
        submitted: seconds since the epoch.
        ended: its last status, once it has ended: the system may forget.
    """

    id: str
    launcher: str
    name: str
    command: tuple[str, ...]
    directory: str
    run: str | None = None
    reference: Mapping[str, Any]
    submitted: float = field(default_factory=time.time)
    ended: Mapping[str, Any] | None = None

    def handle(self) -> JobHandle:
        """Return the handle of the job."""
        return get_launcher(self.launcher).reopen(self.reference)

    def status(self) -> JobStatus:
        """Return the job's status; queries the system only while it may change."""
        if self.ended is not None:
            return JobStatus(**self.ended)
        status = self.handle().status()
        if status.ended:
            with suppress(ConfigError):  # it is asked again
                add_record(dataclasses.replace(self, ended=dataclasses.asdict(status)))
        return status

    def status_asked_anew(self) -> JobStatus:
        """Return the job's status, but treat an end without an exit code as unknown: the system may not see the job.

        Raises:
            LaunchError: the system cannot be asked.
        """
        if self.ended is None or self.ended["exit_code"] is not None:
            return self.status()
        now = self.handle().status()
        if now.ended or now.state == "unknown":
            return self.status()
        with suppress(ConfigError):
            add_record(dataclasses.replace(self, ended=None))
        return now


def record_id(launcher: str, reference: Mapping[str, Any]) -> str:
    """Return ``LAUNCHER-NUMBER``, with a further number if an active job elsewhere has that id."""
    place = [reference.get(name) for name in _PLACE]
    taken = {
        record.id
        for record in read_records()
        if record.ended is None and [record.reference.get(name) for name in _PLACE] != place
    }
    wanted = f"{launcher}-{reference['id']}"
    numbered = (f"{wanted}-{number}" for number in itertools.count(2))
    return next(each for each in itertools.chain([wanted], numbered) if each not in taken)


def jobs_directory() -> Path:
    """``~/.local/state/paceline/jobs``, or where XDG_STATE_HOME says."""
    return user_directory("state") / "jobs"


def make_jobs_directory() -> Path:
    """Return the directory of records, private to its owner, because commands and variables may hold secrets."""
    directory = jobs_directory()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


@contextmanager
def room_for_record() -> Iterator[None]:
    """See that a job can be recorded before it is submitted; where that fails, no directory is left.

    Raises:
        ConfigError: the directory cannot be written.
    """
    made: list[Path] = []
    try:
        with _refused():
            made += (path for path in (jobs_directory(), *jobs_directory().parents) if not path.exists())
            probe = make_jobs_directory() / f".probe-{secrets.token_hex(4)}"
            write_atomically(probe, bytes(_LONG))
            probe.unlink(missing_ok=True)
        yield
    except BaseException:  # Ctrl-C too
        for directory in made:
            with suppress(OSError):  # another process has begun to use it
                directory.rmdir()
        raise


def add_record(record: JobRecord) -> None:
    """Write a record, over an earlier one of the same job.

    Raises:
        ConfigError: the directory cannot be written.
    """
    with _refused():
        directory = make_jobs_directory()
        content = json.dumps(dataclasses.asdict(record), indent=1) + "\n"
        write_atomically(directory / f"{record.id}.json", content.encode())
        _forget_old(directory)


@contextmanager
def _refused() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot record the job in {jobs_directory()}: {error.strerror}. Set XDG_STATE_HOME to a place "
            "that can be written."
        ) from error


def _forget_old(directory: Path) -> None:
    """Keep so many that a list of them can be read."""
    if sum(1 for _ in directory.glob("*.json")) <= _KEEP:
        return
    ended = [record for record in read_records() if record.ended is not None]
    for record in ended[:-_KEEP]:
        (directory / f"{record.id}.json").unlink(missing_ok=True)
        if Path(record.directory).parent == directory:
            shutil.rmtree(record.directory, ignore_errors=True)


def read_records() -> list[JobRecord]:
    """Return all jobs, the oldest first; damaged files are skipped."""
    records = []
    for path in jobs_directory().glob("*.json"):
        try:
            values = parse_json(read_document(path))
            records.append(JobRecord(**{**values, "command": tuple(values["command"])}))
        except (OSError, ValueError, TypeError, KeyError):
            continue
    return sorted(records, key=lambda record: record.submitted)


def find_record(text: str) -> JobRecord:
    """Find the job of that id, the system's own number, name or run directory; of several the newest.

    Raises:
        ConfigError: there is none.
    """
    records = read_records()
    path = str(Path(text).resolve())
    for record in reversed(records):
        if text in (record.id, record.reference.get("id"), record.name) or path in (
            record.run,
            record.directory,
        ):
            return record
    recent = ", ".join(record.id for record in records[-5:])
    raise ConfigError(
        f"there is no job {text!r}. " + (f"The newest: {recent}." if recent else "None was submitted yet.")
    )


# --- From a command or a task to a submitted job ---


OF_THE_LAUNCHER = select(lambda its: its.from_launcher)
"""Options that the command line of each machine has from its launcher."""


def normal_command(words: Sequence[str], python: str, place_of: Callable[[str], str]) -> tuple[str, ...]:
    """Return a script or ``-m module`` with its interpreter in front; any other command unchanged.

    Args:
        python: the interpreter on the machines.
        place_of: where the machines find a script or a program; see :meth:`Launcher.place_of`.

    Raises:
        ConfigError: there is no such script or program, or the machines do not get it.
    """
    if not words:
        raise ConfigError("there is no command to launch. Give it after --, such as: -- python train.py")
    first, *others = words
    if first.endswith(".py"):
        return (python, place_of(first), *others)
    if first == "-m":
        return (python, *words)
    if os.sep in first:
        program = place_of(first)
        first = program if os.sep in program else f"{os.curdir}{os.sep}{program}"
    if others and others[0].endswith(".py"):
        others[0] = place_of(others[0])
    return (first, *others)


_STARTERS = {
    "torchrun": "torchrun",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate": "torchrun",
    "accelerate.commands.launch": "torchrun",
    "fabric": "torchrun",
    "deepspeed": "torchrun",
    "horovodrun": "horovod",
    "mpirun": "mpi",
    "mpiexec": "mpi",
}
"""Programs that start ranks themselves, and the launcher in their place."""

_LOCAL_RANK_ARGUMENTS = {
    "deepspeed": ("--local_rank={local_rank}", ("--no_local_rank",)),
    "torch.distributed.launch": ("--local-rank={local_rank}", ("--use-env", "--use_env")),
}
"""Starters that pass an argument to the script, which so must take it; and their options to leave it out."""

_PROCESSES = re.compile(
    r"(?:--(?:nproc[-_]per[-_]node|num[-_]processes|num[-_]gpus|devices|num-proc)|-np?|-g)(?:=|\0)(\d+)\0"
)


def refuse_starters(command: Sequence[str], env_style: EnvStyle) -> None:
    """Refuse a command that starts ranks itself: each of Paceline's processes would start all of them.

    With ``--env-style none`` a process finds no rank, so a command with the node's number in it may do so.

    Raises:
        ConfigError: the command is one; the message says what to write instead.
    """
    words = list(command)
    if "-m" in words[:2]:
        words = words[words.index("-m") + 1 :]
    starter = Path(words[0]).name if words else ""
    if starter not in _STARTERS or env_style == "none" or (starter == "fabric" and words[1:2] != ["run"]):
        return
    script = next((number for number, word in enumerate(words) if number and word.endswith(".py")), None)
    found = _PROCESSES.search("\0".join(words[1:script]) + "\0")
    on = _STARTERS[starter]
    instead = "COMMAND"
    if script is not None:
        local_rank = _LOCAL_RANK_ARGUMENTS.get(starter, ("", ()))
        passes = local_rank[0] and not set(local_rank[1]) & set(words[1:script])
        instead = shlex.join([words[script], *([local_rank[0]] if passes else []), *words[script + 1 :]])
    raise ConfigError(
        f"{starter} starts processes itself, and each of Paceline's would start all of them. Write: paceline launch "
        f"--on {on} --nproc {found[1] if found is not None else 'N'} -- {instead} (on Slurm: --on slurm "
        f"--rank-launcher {on}). Where it should run once on each node, add --env-style none."
    )


def remote_task(spec: str, place_of: Callable[[str], str]) -> str:
    """Return a task's spec on the nodes.

    Args:
        spec: the task's file or module and its class, or a built-in task.
        place_of: where the machines find a file; see :meth:`Launcher.place_of`.

    Raises:
        TaskError: the spec has another form.
        ConfigError: there is no such file, or the machines do not get it.
    """
    place, name = split_spec(spec)
    return f"{place_of(place)}:{name}" if place.endswith(".py") else spec


def nodes_python(launcher: Launcher, asked: str | None) -> str:
    """Return the interpreter on the nodes: this one if they share its files, else their image's."""
    return asked or (sys.executable if launcher.files == "shared" else "python")


def task_command(config: RunConfig, run: Path, python: str) -> tuple[str, ...]:
    """``paceline train`` with the options of ``config``, but for those that say where it runs."""
    words = [python, "-m", "paceline", "train"]
    if config.processes.task:
        words.append(config.processes.task)
    words += ["--run-dir", str(run)]
    words += to_flags(config.non_defaults(), leave_out=OF_THE_LAUNCHER)
    return tuple(words)


def choose_rank_launcher(
    launcher: Launcher, rank_launcher: RankLauncher | None, env_style: EnvStyle, is_task: bool
) -> RankLauncher:
    """Choose the rank launcher: the requested one, else Paceline's agent for tasks, else the one for the env style.

    Raises:
        ConfigError: the launcher cannot have it, or it cannot keep the env style.
    """
    if rank_launcher is not None:
        if rank_launcher not in launcher.rank_launchers:
            raise ConfigError(
                f"--rank-launcher {rank_launcher} does not work with --on {launcher.name}. Choose one of: "
                f"{', '.join(launcher.rank_launchers)}."
            )
        if rank_launcher == "ray" and is_task:
            raise ConfigError(
                "--rank-launcher ray starts programs that use Ray by themselves. For a task use --rank-launcher agent."
            )
        if rank_launcher == "agent" and not is_task:
            raise ConfigError(
                "--rank-launcher agent starts Paceline's own tasks. For a script use --rank-launcher torchrun."
            )
        if rank_launcher == "torchrun" and env_style not in ("torch", "none"):
            raise ConfigError(
                f"--rank-launcher torchrun keeps the torch env style, not {env_style}. Use --rank-launcher spawn."
            )
        return rank_launcher
    if is_task and "agent" in launcher.rank_launchers:
        return "agent"
    usual = next(each for each in launcher.rank_launchers if each != "agent")
    if env_style == launcher.env_styles[0]:
        return usual
    wanted: dict[EnvStyle, RankLauncher] = {
        "torch": "torchrun",
        "tensorflow": "spawn",
        "none": "spawn",
        "mpi": "mpi",
        "horovod": "horovod",
    }
    preferred = wanted.get(env_style)
    return preferred if preferred in launcher.rank_launchers else usual


def choose_env_style(launcher: Launcher, env_style: EnvStyle | None, rank_launcher: RankLauncher | None) -> EnvStyle:
    """Choose the env style of the processes: the requested one, else the rank launcher's.

    Raises:
        ConfigError: the launcher cannot keep it.
    """
    if env_style is None:
        natural: dict[RankLauncher | None, EnvStyle] = {"horovod": "horovod", "ray": "none"}
        for_torch = rank_launcher in ("torchrun", "spawn", "mpi") and "torch" in launcher.env_styles
        env_style = natural.get(rank_launcher, "torch" if for_torch else launcher.env_styles[0])
    if env_style not in get_args(EnvStyle) or env_style not in launcher.env_styles:
        raise ConfigError(
            f"--env-style {env_style} does not work with --on {launcher.name}. Choose one of: "
            f"{', '.join(launcher.env_styles)}."
        )
    return env_style


def job_directory(name: str, *, attached: bool) -> Path:
    """Return a new directory for a script's job: ``jobs/NAME-TIME-ID`` here, which clusters share.

    The ID is random: jobs that begin in the same second, on whatever machines, have a place each. An
    attached job leaves nothing here; its files are kept with its record.
    """
    home = jobs_directory() if attached else Path.cwd() / "jobs"
    return home / f"{job_name(name)}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}"


@contextmanager
def make_directory(directory: Path) -> Iterator[None]:
    """Make a job's directory; where what follows fails, nothing that was made for it is left.

    Raises:
        ConfigError: it cannot be made.
    """
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        if directory.is_relative_to(jobs_directory()):
            make_jobs_directory()
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write the job into {directory}: {error.strerror}.") from error
    try:
        yield
    except RenderedOnlyError:
        raise
    except BaseException:  # Ctrl-C too
        if made:
            shutil.rmtree(directory, ignore_errors=True)
        for parent in made[1:]:
            with suppress(OSError):  # another process has begun to use it
                parent.rmdir()
        raise


def task_job(config: RunConfig, options: Mapping[str, Any], launcher: Launcher, python: str) -> LaunchSpec:
    """Describe the job of a task.

    Args:
        options: fields of :class:`LaunchSpec` that were given; the time limit is else that of ``config``.
        python: the interpreter on the machines.

    Raises:
        ConfigError: it could not run, wherever it would be.
    """
    options = {"walltime_s": config.recovery.walltime, **options}
    _refuse_impossible(config, options)
    run, name, directory = _task_place(config, launcher)
    env_style: EnvStyle = options.get("env_style") or "torch"
    rank_launcher = choose_rank_launcher(launcher, options.get("rank_launcher"), env_style, is_task=True)
    by_torchrun = config.recovery.recover == "restart" and rank_launcher == "torchrun"
    if config.recovery.recover in ("inplace", "restart") and rank_launcher != "agent" and not by_torchrun:
        raise ConfigError(
            f"--recover {config.recovery.recover} needs Paceline's agent, but with --on {launcher.name} "
            f"{rank_launcher} starts each process. Use --recover none, and give the command again after a fault."
        )
    restarts = config.recovery.max_restarts if config.recovery.recover == "restart" else 0
    return LaunchSpec(
        **{
            **options,
            "recovery": RecoveryPolicy(max_restarts=restarts),
            "command": task_command(config, run, python),
            "name": options.get("name") or name,
            "directory": directory or job_directory(options.get("name") or name, attached=True),
            "run": run,
            "rank_launcher": rank_launcher,
            "env_style": env_style,
            "is_task": True,
            "threads": config.processes.threads,
            "interface": config.processes.interface,
            "python": python,
        }
    )


def _task_place(config: RunConfig, launcher: Launcher) -> tuple[Path, str, Path | None]:
    """Return a task's run directory, the job's name, and its directory if that is in the run's.

    Raises:
        ConfigError: the nodes do not share this one's files, and the run's directory there is not given.
    """
    if launcher.files == "shared":
        run = Path(config.records.run_dir or default_run_path(config.processes.task)).resolve()
        # The jobs of an array have a run each, and share what is rendered.
        directory = run / "job" if "{" not in run.name else run.with_name(f"{job_name(run.name)}-job")
        return run, job_name(run.name), directory
    there = config.records.run_dir or launcher.default_run
    if there is None or not Path(there).is_absolute():
        given = "" if config.records.run_dir is None else f", and not {config.records.run_dir}"
        raise ConfigError(
            f"--on {launcher.name}: the machines do not see this one's files. Give --run-dir with an absolute "
            f"path there, such as --run-dir /runs/a{given}."
        )
    return (
        Path(there),
        job_name(config.processes.task.rpartition(":")[2] or config.processes.task or Path(there).name),
        None,
    )


def _refuse_impossible(config: RunConfig, options: Mapping[str, Any]) -> None:
    """Refuse at once what would fail after hours in a queue."""
    counts: tuple[int, ...] = options.get("nproc", (1,))
    least, _ = options.get("nodes", (1, 1))
    processes = sum(counts) if len(counts) > 1 else counts[0] * least
    if isinstance(config.parallel.microbatches, int) and processes > config.parallel.microbatches:
        raise ConfigError(
            f"{processes} processes cannot share --microbatches {config.parallel.microbatches}: each needs at least "
            f"one. Use fewer, or --microbatches {processes} or more."
        )
    gpus = options.get("gpus_per_node")
    if gpus and max(counts) > gpus and config.processes.device != "cpu":
        raise ConfigError(
            f"--nproc {max(counts)} processes cannot have a GPU each of --gpus-per-node {gpus}. Make them equal."
        )
    walltime_s = options["walltime_s"]
    intervals = config.records.checkpoint_every
    by_clock = [interval.seconds for interval in intervals if interval.seconds is not None]
    if walltime_s is not None and len(by_clock) == len(intervals) and min(by_clock, default=0) >= walltime_s:
        raise ConfigError(
            f"--walltime {config.values['walltime']} is over before the first --checkpoint-every "
            f"{' or '.join(config.values['checkpoint_every'])}: a job that is lost would have saved "
            "nothing. Save more often."
        )


def submit(launcher: Launcher, rendered: RenderedJob) -> tuple[JobRecord, JobHandle]:
    """Write the rendered files, start the job, and record it.

    Raises:
        LaunchError: the system rejected it; nothing of it is left.
        ConfigError: the job's directory, its record, or the directory of its logs cannot be written.
        RenderedOnlyError: the launcher submits nothing; the written files stay.
    """
    spec = dataclasses.replace(rendered.spec, is_recorded=True)
    with make_directory(spec.directory), room_for_record():
        try:
            for name, text in rendered.files.items():
                write_atomically(spec.directory / name, text.encode(), private=True)
        except OSError as error:
            raise ConfigError(f"cannot write the job into {spec.directory}: {error.strerror}.") from error
        handle = launcher.submit(dataclasses.replace(rendered, spec=spec))
    record = JobRecord(
        id=record_id(launcher.name, handle.reference),
        launcher=launcher.name,
        name=spec.name,
        command=spec.command,
        directory=str(spec.directory),
        run=None if spec.run is None else str(spec.run),
        reference=handle.reference,
    )
    try:
        remember(record, handle)
    except ConfigError:
        if launcher.attached:
            handle.wait()  # until its processes have ended
        raise
    return record, handle


def remember(record: JobRecord, handle: JobHandle) -> None:
    """Record a job that has just been submitted; where that fails, cancel it.

    Raises:
        ConfigError: it was cancelled.
        LaunchError: it could not be cancelled; the message has its id.
    """
    try:
        add_record(record)
    except ConfigError as error:
        try:
            handle.cancel()
        except LaunchError as refused:
            raise LaunchError(f"{record.id} was submitted, but {error} It continues: {refused}") from error
        raise ConfigError(f"{record.id} is cancelled: {error}") from error


def finish(record: JobRecord, handle: JobHandle) -> int:
    """Wait for a job, and remember how it ended; return its exit code."""
    code = handle.wait()
    with suppress(LaunchError, ConfigError):  # a later query may succeed
        add_record(dataclasses.replace(record, ended=dataclasses.asdict(handle.status())))
    return code
