"""From a command or a task to a submitted job: how the launchers of clusters start a task."""

from __future__ import annotations

import dataclasses
import json as json_module
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, get_args

from paceline.core.config import RunConfig, select, to_flags
from paceline.core.errors import ConfigError, LaunchError
from paceline.core.files import write_atomically
from paceline.core.job import RecoveryPolicy, WorkerConfig, default_run_path
from paceline.core.options import flag
from paceline.core.task_loading import split_spec
from paceline.launch.hosts import nodes_of, read_hosts
from paceline.launch.job_records import (
    JobRecord,
    add_record,
    jobs_directory,
    make_jobs_directory,
    read_records,
    record_id,
    room_for_record,
)
from paceline.launch.launcher import (
    LOCAL_LAUNCHERS,
    TORCHRUN_EQUALS,
    TORCHRUN_OTHERS,
    EnvStyle,
    JobHandle,
    JobOptions,
    Launcher,
    LaunchSpec,
    RankLauncher,
    RenderedJob,
    RenderedOnlyError,
    find_preflight,
    get_launcher,
    make_options,
)
from paceline.launch.local import OUTPUT, BackgroundJob, ForegroundJob
from paceline.launch.local_run import check_task
from paceline.launch.supervisor import RankStarter, SupervisedJob

# --- The launchers of clusters ---


class ClusterLauncher(Launcher):
    """Starts a task by a job: ``paceline train`` on each of its nodes."""

    def start_task(
        self, worker_config: WorkerConfig, options: JobOptions, own: Mapping[str, Any], *, dry_run: bool, json: bool
    ) -> int:
        """Print the job of the task, or submit it and say how to follow it."""
        config = worker_config.config
        launcher_options = make_options(self, own)
        if self.files == "uploaded":
            task = remote_task(config.processes.task, partial(self.remote_path, options=launcher_options))
            config = config.replace(task=task)
        spec = task_spec(self, config, launcher_options, options)
        if worker_config.quiet:
            spec = dataclasses.replace(spec, command=(*spec.command, "--quiet"))
        return start(
            self,
            spec,
            launcher_options,
            options,
            dry_run=dry_run,
            json=json,
            task=config.processes.task,
            keep=config.records.keep_checkpoints,
            init_timeout_s=config.processes.init_timeout,
        )


class ForegroundLauncher(ClusterLauncher):
    """Starts its job here, under this process's supervision.

    Attributes:
        starter: what its commands are.
    """

    attached = True
    starter: ClassVar[RankStarter]

    def submit(self, rendered: RenderedJob) -> JobHandle:
        return ForegroundJob(SupervisedJob(rendered.commands, starter=self.starter), rendered.spec.directory)

    def reopen(self, reference: Mapping[str, Any]) -> JobHandle:
        return BackgroundJob(reference)


class MachinesLauncher(ForegroundLauncher):
    """Starts its job on the user's own machines, which its option ``--hosts`` names."""

    preallocated = True

    def resolve_sizes(
        self, nodes: tuple[int, int], nproc: tuple[int, ...] | None, options: Any
    ) -> tuple[tuple[int, int], tuple[int, ...] | None]:
        """Set the job's nodes to all hosts, with as many processes as their slots."""
        hosts = getattr(options, "hosts", None)
        return (nodes, nproc) if hosts is None else nodes_of(read_hosts(hosts), nodes, nproc)


def task_spec(launcher: Launcher, config: RunConfig, own: Any, options: JobOptions) -> LaunchSpec:
    """Build the job of a task, on the nodes that the launcher's own options and ``--nodes`` name.

    Raises:
        ConfigError: the options fit no job.
        TaskError: the task does not exist.
    """
    for name in ("env_style", "roles"):
        if getattr(options, name) is not None:
            raise ConfigError(
                f"{flag(name)} is for scripts, but a task finds its rank itself. Leave it out, or start a "
                "script with paceline launch."
            )
    nodes, counts = launcher.resolve_sizes(config.processes.nodes, config.processes.nproc, own)
    if launcher.files == "shared":
        check_task(config)
    if counts is None:
        raise ConfigError(
            f"--nproc auto is not supported by --on {config.processes.on}: give the number of processes per node."
        )
    fields = {**options.spec_fields(None), "nodes": nodes, "nproc": counts}
    return task_job(config, fields, launcher, nodes_python(launcher, None))


def start(
    launcher: Launcher,
    spec: LaunchSpec,
    own: Any,
    options: JobOptions,
    *,
    dry_run: bool,
    json: bool,
    task: str = "",
    keep: int = 3,
    init_timeout_s: float = 300.0,
) -> int:
    """Print the job, or submit it and say how to follow it.

    Args:
        json: print the job as JSON, after the output of its processes.
        task: the task that ``--preflight`` imports.
        keep: the number of checkpoints for which ``--preflight`` requires space.
        init_timeout_s: how long ``--preflight`` waits for all nodes.
    """
    first = None
    if options.preflight:
        # Nodes that do not have this machine's files have no directory for a script's, and several no common one.
        has_own_files = launcher.files == "uploaded" and spec.nodes[1] > 1
        run = spec.workdir if launcher.files == "shared" else None
        run = None if has_own_files else spec.run or run
        is_local = launcher.name in LOCAL_LAUNCHERS
        first, spec = find_preflight().prepare(
            spec, own, is_local=is_local, run=run, task=task, keep=keep, timeout_s=init_timeout_s
        )
        if launcher.preallocated:
            spec = dataclasses.replace(spec, gpus_per_node=None)  # the preflight has checked them
    refuse_gpu_type(spec, launcher.name)
    refuse_torchrun_options(spec)
    rendered = launcher.render(spec, own)
    before = () if first is None else get_launcher("spawn").render(first).commands
    if dry_run and json:
        commands = (*before, *rendered.commands)
        document = {"files": dict(rendered.files), "commands": [command.to_json() for command in commands]}
        print(json_module.dumps(document))
        return 0
    if dry_run:
        print(*(f"{command.text}\n" for command in before), rendered.text, sep="", end="")
        return 0
    if options.detach and launcher.attached:
        _detach(spec)
    if first is not None:
        code, interface = find_preflight().run_before(first)
        if code:
            return code
        if spec.interface is None and interface is not None:
            rendered = launcher.render(dataclasses.replace(spec, interface=interface), own)
    record, handle = submit(launcher, rendered)
    if launcher.attached:
        code = finish(record, handle)
        if json:
            print(json_module.dumps({**dataclasses.asdict(record), "exit_code": code}), flush=True)
        return code
    if json and not options.wait:
        print(json_module.dumps(dataclasses.asdict(record)), flush=True)
        return 0
    print(f"paceline: submitted {record.id}. Follow its output with: paceline logs -f {record.id}", file=sys.stderr)
    if not options.wait:
        return 0
    try:
        for line in handle.logs(follow=True):
            print(line, flush=True)
        code = finish(record, handle)
    except KeyboardInterrupt:
        print(f"paceline: {record.id} keeps running. Cancel it with: paceline cancel {record.id}", file=sys.stderr)
        return 130
    if json:
        print(json_module.dumps({**dataclasses.asdict(record), "exit_code": code}), flush=True)
    return code


def _detach(spec: LaunchSpec) -> None:
    """Continue in a process of its own, which prints into a file of the job's directory.

    Returns in that process. The process that the user waits for exits here as soon as the job is recorded.

    Raises:
        SystemExit: in the waiting process: 0, or the other process's exit code if it ended without a job.
    """
    log = spec.directory / OUTPUT
    with make_directory(spec.directory):
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            with log.open("ab") as output, Path(os.devnull).open("rb") as nothing:
                os.dup2(nothing.fileno(), 0)
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            return
        code = None
        try:
            while code is None and not _is_recorded(spec, pid):
                time.sleep(0.1)
                ended, status = os.waitpid(pid, os.WNOHANG)
                code = os.waitstatus_to_exitcode(status) if ended else None
        except KeyboardInterrupt:
            os.kill(pid, signal.SIGTERM)
            os.waitpid(pid, 0)
            raise
        if code and not _is_recorded(spec, pid):
            sys.stderr.write(log.read_text(errors="replace"))
            raise SystemExit(code if code > 0 else 1)
    print(f"paceline: started as process {pid}. Follow its output with: paceline logs -f {pid}", file=sys.stderr)
    raise SystemExit(0)


def _is_recorded(spec: LaunchSpec, pid: int) -> bool:
    return any(
        record.directory == str(spec.directory) and record.reference.get("pid") == pid for record in read_records()
    )


# --- From a command or a task to a job ---


def job_name(text: str) -> str:
    """``text`` as every system takes it for a name: lower-case letters, digits and single dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40] or "job"


OF_THE_LAUNCHER = select(lambda its: its.from_launcher)
"""Options that the command line of each machine has from its launcher."""


def normal_command(words: Sequence[str], python: str, path_of: Callable[[str], str]) -> tuple[str, ...]:
    """Return a script or ``-m module`` with its interpreter in front; any other command unchanged.

    Args:
        path_of: where the machines find a script or a program; see :meth:`Launcher.remote_path`.
    """
    if not words:
        raise ConfigError("there is no command to launch. Give it after --, such as: -- python train.py")
    first, *others = words
    if first.endswith(".py"):
        return (python, path_of(first), *others)
    if first == "-m":
        return (python, *words)
    if os.sep in first:
        program = path_of(first)
        first = program if os.sep in program else f"{os.curdir}{os.sep}{program}"
    if others and others[0].endswith(".py"):
        others[0] = path_of(others[0])
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


def remote_task(spec: str, path_of: Callable[[str], str]) -> str:
    """Return a task's spec on the nodes.

    Args:
        spec: the task's file or module and its class, or a built-in task.
        path_of: where the machines find a file; see :meth:`Launcher.remote_path`.

    Raises:
        TaskError: the spec has another form.
        ConfigError: there is no such file, or the machines do not get it.
    """
    path, name = split_spec(spec)
    return f"{path_of(path)}:{name}" if path.endswith(".py") else spec


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
    """Choose the rank launcher: the requested one, else Paceline's agent for tasks, else the one for the env style."""
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
    """Choose the env style of the processes: the requested one, else the rank launcher's."""
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
    """Make a job's directory; where what follows fails, nothing that was made for it is left."""
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
    """
    options = {"walltime_s": config.recovery.walltime, **options}
    _refuse_impossible(config, options)
    run, name, directory = _task_location(config, launcher)
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


def _task_location(config: RunConfig, launcher: Launcher) -> tuple[Path, str, Path | None]:
    """Return a task's run directory, the job's name, and its directory if that is in the run's."""
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
    """Record a job that has just been submitted; where that fails, cancel it."""
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


def refuse_gpu_type(spec: LaunchSpec, name: str) -> None:
    """Reject a type of GPUs that the system has no such word for."""
    if spec.gpu_type is not None and name != "slurm":
        raise ConfigError(
            f"--gpus-per-node {spec.gpu_type}:{spec.gpus_per_node}: only --on slurm takes a type of GPUs. Give "
            f"--gpus-per-node {spec.gpus_per_node}, and name the type in the way of --on {name}."
        )


def refuse_torchrun_options(spec: LaunchSpec) -> None:
    """Reject options that torchrun does not have or Paceline sets, and all where another program starts the ranks."""
    for text in spec.torchrun:
        name = text.removeprefix("--").partition("=")[0].replace("_", "-")
        if spec.rank_launcher != "torchrun":
            raise ConfigError(
                f"--torchrun {text}: the ranks are started by {spec.rank_launcher}. Use --rank-launcher torchrun, here "
                "--on torchrun, or leave it out."
            )
        if name in TORCHRUN_EQUALS:
            raise ConfigError(f"--torchrun {text} is not allowed. Use {TORCHRUN_EQUALS[name]}.")
        if name not in TORCHRUN_OTHERS:
            raise ConfigError(f"--torchrun {text}: torchrun has {', '.join(TORCHRUN_OTHERS)}.")
