"""Training with processes of this node: from a run's options to its end. The same command runs on each other node."""

from __future__ import annotations

import dataclasses
import hashlib
import json as json_module
import os
import socket
import sys
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.core.config import RunConfig, config_from_mapping, merge_resumed_options
from paceline.core.environment import (
    Environment,
    detect_environment,
    preferred_device,
    visible_gpus,
    without_rank_variables,
)
from paceline.core.errors import ConfigError
from paceline.core.files import write_atomically
from paceline.core.job import Placement, Recovery, RecoveryPolicy, WorkerConfig, default_run_path
from paceline.core.options import flag
from paceline.core.plugins import import_object
from paceline.core.sockets import require_loopback
from paceline.core.standard_streams import lasting_streams
from paceline.core.task_loading import check_spec
from paceline.launch.launcher import (
    LAUNCHER_NAMES,
    LOCAL_LAUNCHERS,
    EnvStyle,
    JobOptions,
    Launcher,
    LaunchSpec,
    RenderedJob,
    find_preflight,
    get_launcher,
)
from paceline.launch.rank_variables import find_framework
from paceline.runs.directory import RunDirectory
from paceline.runs.failures import STOPPED, NodeRemovedError, describe_stop


def processes_here() -> int:
    """Return the processes of ``--nproc auto``: one for each GPU of this node, else one for each core."""
    return visible_gpus() or len(os.sched_getaffinity(0))


def bound_loopback_socket(port: int = 0) -> socket.socket:
    """Return a TCP socket bound to ``port`` on loopback (0: a free one), not listening yet."""
    bound = socket.socket()
    # With this, a script's own TCPStore can still listen on the port that the socket reserves for it.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(("127.0.0.1", port))
    except OSError:
        bound.close()
        raise
    return bound


def free_master_port(env_style: EnvStyle, nproc: int) -> int:
    """Return a free port, or the first of ``nproc`` consecutive ones for a framework whose processes each listen."""
    if (framework := find_framework(env_style)) is not None:
        return framework.free_ports(nproc)
    with bound_loopback_socket() as bound:
        port: int = bound.getsockname()[1]
    return port


def refuse_job_options(on: str, options: JobOptions, own: Mapping[str, Any]) -> None:
    """Refuse all options of a job on a cluster, but for ``--preflight``, of a task that runs on this machine."""
    given = [f.name for f in dataclasses.fields(options) if getattr(options, f.name) != f.default]
    if own or not {*given} <= {"preflight"}:
        raise ConfigError(
            f"{', '.join(map(flag, (*given, *own)))}: only for jobs on a cluster, but --on is {on}. Choose a cluster: "
            f"--on {', '.join(name for name in LAUNCHER_NAMES if name not in LOCAL_LAUNCHERS)}."
        )


def task_launcher(config: RunConfig) -> Launcher:
    """Return the launcher of ``--on``; for auto the one for so many processes of this node.

    Raises:
        ConfigError: there is none of this name.
    """
    counts, on = config.processes.nproc or (available_processes(config),), config.processes.on
    if on == "auto":
        on = "inprocess" if counts == (1,) and config.processes.nodes.most == 1 else "spawn"
    return get_launcher(on)


# --- A run on this node ---


@dataclass(frozen=True, kw_only=True)
class LocalRun:
    """A run on this node, resolved and rendered; :meth:`launch` starts it.

    Attributes:
        rendered: the description of their job, and its commands.
    """

    launcher: Launcher
    rendered: RenderedJob
    worker_config: WorkerConfig
    directory: RunDirectory

    def on_interface(self, interface: str | None) -> LocalRun:
        """Return this run on a network interface, unless its options name one."""
        if interface is None or self.worker_config.config.processes.interface is not None:
            return self
        worker_config = dataclasses.replace(
            self.worker_config, config=self.worker_config.config.replace(interface=interface)
        )
        rendered = self.launcher.render(dataclasses.replace(self.rendered.spec, interface=interface))
        return dataclasses.replace(self, rendered=rendered, worker_config=worker_config)

    def preflight(self, nproc: tuple[int, ...] | None) -> LaunchSpec | None:
        """Return the ranks that check this node, and all nodes that the same command runs on, before the run.

        Args:
            nproc: the processes of each node, as ``--nproc`` has them.
        """
        config, spec = self.worker_config.config, self.rendered.spec
        checks, _ = find_preflight().prepare(
            dataclasses.replace(spec, nproc=nproc or spec.nproc),
            is_local=True,
            run=self.directory.path.absolute(),
            task=config.processes.task,
            keep=config.records.keep_checkpoints,
            timeout_s=spec.recovery.init_timeout_s,
            agents=self.launcher.name == "spawn" and spec.recovery.recover != "none",
        )
        return checks

    def description(self, checks: LaunchSpec | None, *, json: bool) -> str:
        """Return what would start, as ``--dry-run`` prints it: the checks, the job file, the processes."""
        job_file, text = self.rendered.spec.job_file, self.worker_config.to_toml()
        before = () if checks is None else get_launcher("spawn").render(checks).commands
        if json:
            commands = [command.to_json() for command in (*before, *self.rendered.commands)]
            return json_module.dumps({"files": {str(job_file): text}, "commands": commands}) + "\n"
        commented = "".join(f"#   {line}\n" for line in text.splitlines())
        return "".join(f"{command.text}\n" for command in before) + f"# {job_file}\n{commented}\n" + self.rendered.text

    def launch(self) -> int:
        """Start the run and wait for its end; return the exit code.

        If the other nodes have removed this one because they could not reach it, it joins the job again.

        Raises:
            RunDirectoryError: the run directory cannot be written, or another process uses it.
            LaunchError: a process could not be started.
        """
        run = self
        while True:
            try:
                with without_rank_variables(), lasting_streams():
                    return run._launch_once()
            except NodeRemovedError as removed:
                print(f"paceline: {removed} It joins again once it reaches them.", file=sys.stderr, flush=True)
            # This time it discovers the others through the run directory.
            config = run.worker_config.config.replace(node_rank=None, rdzv_endpoint=None)
            run = prepare_local_run(run.launcher, dataclasses.replace(run.worker_config, config=config), joins=True)

    def _launch_once(self) -> int:
        worker_config, spec, directory = self.worker_config, self.rendered.spec, self.directory
        # Another node of the job may use the shared directory already. Without recovery none does yet where this one
        # has no number: torchrun starts no rank before it has all nodes.
        may_be_later = spec.recovery.recover != "none" and _lacks_node_rank(spec.placement.node_rank, spec.nodes)
        if not (spec.placement.node_rank or spec.placement.joins or may_be_later):
            directory.require_unused()
            directory.check_resume(worker_config.config.records.resume)
        if spec.local_world_size > 1:
            require_loopback()
        directory.create()
        assert spec.job_file is not None
        try:
            write_atomically(spec.job_file, worker_config.to_toml().encode())
        except OSError as error:
            raise directory.unwritable(error) from error
        with ExitStack() as stack:
            for reference in worker_config.config.changes.companions:
                stack.enter_context(import_object(reference)(worker_config.config, directory))
            code = self.launcher.submit(self.rendered).wait()
        if code == 0 and spec.nodes[1] == 1 and not (directory.has_result() or worker_config.script):
            print(
                f"paceline: the processes ended with status 0, but {directory.path} has no result: the task's own code "
                "has ended them, as os._exit(0) does. Raise an exception to fail, or set --max-steps or --epochs.",
                file=sys.stderr,
            )
            return 1
        if code in STOPPED and worker_config.supervised and not worker_config.quiet:
            last = directory.read_events()[-1:]
            # A job that is interrupted before its ranks have connected has saved nothing.
            if last and last[0]["event"] == "stopped":
                print(f"paceline: {describe_stop(last[0], directory)}", file=sys.stderr)
        return code


def prepare_local_run(
    launcher: Launcher, worker_config: WorkerConfig, *, joins: bool = False, reserve: bool = False
) -> LocalRun:
    """Resolve and render a run; it starts nothing.

    Args:
        joins: whether this node joins a run that is active on others.
        reserve: create a directory that the user has not named, so that no other command takes its name.

    Raises:
        ConfigError: no launcher can run this.
        TaskError: there is no such task; a wrong name fails before any process starts.
        RunDirectoryError: the directory cannot be created.
    """
    config = worker_config.config
    check_task(config)
    first_nodes, most_nodes = config.processes.nodes
    counts = config.processes.nproc or (available_processes(config),)
    nproc = _processes_here(config, counts)
    several_nodes = most_nodes > 1
    if several_nodes and config.processes.rdzv_endpoint is None and not joins:
        raise ConfigError("--nodes above 1 needs --rdzv-endpoint HOST:PORT, the address of node 0.")
    directory = RunDirectory(Path(config.records.run_dir or default_run_path(config.processes.task)))
    kept = _with_recorded_options(worker_config, directory)
    recover = _recovery(kept, launcher.name)
    if recover == "none" and most_nodes > first_nodes:
        raise ConfigError(
            f"--nodes {config.values['nodes']}: nodes can only join and leave a run that recovers. "
            "Use --on spawn, and leave out --recover none."
        )
    if recover != "none" and several_nodes and config.records.run_dir is None:
        raise ConfigError(
            "a run on several nodes needs --run-dir DIR, a directory that all of them share; "
            "without one use --recover none."
        )
    if (
        "coordinator" in worker_config.explicit_options
        and config.recovery.coordinator
        and (recover == "none" or not several_nodes)
    ):
        raise ConfigError(
            "--coordinator decides which of several nodes take part in a run that recovers. Use it with --nodes above "
            "1 and without --recover none, or leave it out."
        )
    if _lacks_node_rank(config.processes.node_rank, (first_nodes, most_nodes)):
        job_file = directory.path / f"job-{socket.gethostname()}-{os.getpid()}.toml"
    else:  # each node has its own
        job_file = directory.path / (
            f"job-{config.processes.node_rank}.toml" if config.processes.node_rank else "job.toml"
        )
    resolved = dataclasses.replace(
        worker_config,
        config=config.replace(run_dir=str(directory.path), nproc=nproc, device=kept.processes.device),
        supervised=launcher.name != "inprocess",
        device=_device(kept),
        world_size=sum(counts[:first_nodes]) if len(counts) > 1 else nproc * first_nodes,
    )
    spec = LaunchSpec(
        command=(sys.executable, "-P", "-m", "paceline.training.worker", str(job_file)),
        job_file=job_file,
        nodes=(first_nodes, most_nodes),
        nproc=(nproc,),
        threads=config.processes.threads,
        is_task=True,
        run=directory.path,
        interface=config.processes.interface,
        placement=Placement(
            node_rank=config.processes.node_rank,
            rdzv_endpoint=config.processes.rdzv_endpoint,
            rdzv_id=config.processes.rdzv_id,
            joins=joins,
            log_directory=directory,
        ),
        recovery=RecoveryPolicy(
            recover=recover,
            max_restarts=config.recovery.max_restarts,
            heartbeat_s=config.recovery.heartbeat,
            spares=config.recovery.hot_spares,
            task_digest=_task_digest(worker_config),
            token_file=None if config.processes.token_file is None else Path(config.processes.token_file),
            init_timeout_s=config.processes.init_timeout,
            coordinator=config.recovery.coordinator,
        ),
    )
    run = LocalRun(launcher=launcher, rendered=launcher.render(spec), worker_config=resolved, directory=directory)
    if reserve and config.records.run_dir is None and not directory.reserve():
        return prepare_local_run(launcher, worker_config, joins=joins, reserve=True)  # under the next free name
    return run


def launch(worker_config: WorkerConfig, *, joins: bool = False) -> tuple[int, RunDirectory]:
    """Prepare a run, start it and wait for its end; return the exit code and the run directory.

    Raises:
        UserError: as :func:`prepare_local_run` and :meth:`LocalRun.launch`.
    """
    run = prepare_local_run(task_launcher(worker_config.config), worker_config, joins=joins, reserve=True)
    return run.launch(), run.directory


def check_task(config: RunConfig) -> None:
    """Make sure that the task is there; a run that exists names its own."""
    if (
        config.processes.task
        or config.records.run_dir is None
        or not RunDirectory(Path(config.records.run_dir)).exists()
    ):
        check_spec(config.processes.task)


def _with_recorded_options(worker_config: WorkerConfig, directory: RunDirectory) -> RunConfig:
    """Return the options, with those that a run in the directory keeps."""
    if not directory.exists() or worker_config.config.records.resume == "never":
        return worker_config.config
    recorded = config_from_mapping(directory.read_manifest().get("config", {}), str(directory.manifest))
    return RunConfig(**merge_resumed_options(worker_config.config.values, worker_config.explicit_options, recorded))


def _recovery(config: RunConfig, name: str) -> Recovery:
    """Return the response to the death of a worker."""
    if config.recovery.recover == "none":
        return "none"
    obstacles = list(config.non_elastic_options)  # to recovery in place
    if config.parallel.reduction == "ddp":
        obstacles.insert(0, f"--reduction {config.parallel.reduction}")
    if _device(config) == "cuda":
        obstacles.append("a GPU")
    if name == "torchrun" and config.recovery.recover == "restart":
        return "restart"
    if config.recovery.recover == "auto":
        return "none" if name != "spawn" else "restart" if obstacles else "inplace"
    if name != "spawn":
        raise ConfigError(
            f"--recover {config.recovery.recover} does not work with --on {name}: it needs Paceline's agent, which "
            "--on spawn starts on each node. Use --recover none, or with --on torchrun restart."
        )
    if config.recovery.recover == "inplace" and obstacles:
        raise ConfigError(
            f"--recover inplace does not work with {', '.join(obstacles)}: a survivor that waits there for a "
            "lost rank cannot be freed. Use --recover restart."
        )
    return config.recovery.recover


def _device(config: RunConfig) -> Literal["cpu", "cuda"]:
    """Return the device of the workers on this node; each of them checks it."""
    return preferred_device() if config.processes.device == "auto" else config.processes.device


def _lacks_node_rank(node_rank: int | None, nodes: tuple[int, int]) -> bool:
    """Return whether this is one of several nodes, and its number is not known."""
    return node_rank is None and nodes[1] > 1


def _processes_here(config: RunConfig, counts: tuple[int, ...]) -> int:
    """Return this node's number of processes, from a list for all nodes."""
    if len(counts) == 1:
        return counts[0]
    if config.processes.node_rank is None or config.processes.node_rank >= len(counts):
        raise ConfigError(
            f"--nproc {config.values['nproc']} lists the processes of nodes 0 to {len(counts) - 1}, so each node "
            "needs its number: --node-rank."
        )
    return counts[config.processes.node_rank]


def _task_digest(worker_config: WorkerConfig) -> str:
    """Return a digest of the task's code and options: nodes that differ in it must not join."""
    spec = worker_config.config.processes.task
    file = Path(spec.rpartition(":")[0])
    code = file.read_bytes() if file.suffix == ".py" and file.is_file() else spec.encode()
    parts = (
        code,
        spec.rpartition(":")[2].encode(),
        repr((worker_config.config.processes.set, worker_config.fields)).encode(),
    )
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def available_processes(config: RunConfig) -> int:
    """Resolve ``--nproc auto``: one process per GPU, else one per core; one alone for dp."""
    if "dp" in config.strategies:
        return 1
    return (visible_gpus() if _device(config) == "cuda" else 0) or len(os.sched_getaffinity(0))


# --- A command of training that another launcher has started ---


_STARTED_BY: dict[str, str] = {
    "caller": "a script has numbered",
    "torchrun": "torchrun has started",
    "variables": "a launcher that sets RANK has started",
    "slurm": "srun has started",
}


def _started_by(environment: Environment) -> str:
    return _STARTED_BY.get(environment.source, f"{environment.source}run has started")


def own_environment(
    config: RunConfig, explicit_options: Collection[str], environment: Environment | None = None
) -> Environment:
    """Return the environment of a command of training, whose own options may ask for other processes.

    A world of one does not count where the command asks for more: hosted notebooks and jobs of one replica set RANK and
    WORLD_SIZE too.

    Args:
        explicit_options: the names of those that the user gave; a resumed run keeps others.
        environment: as the variables of launchers have it, which is the default.
    """
    environment = environment or detect_environment(rdzv_endpoint=config.processes.rdzv_endpoint)
    if environment.source == "single":
        return environment
    counts, (least, most) = config.processes.nproc, config.processes.nodes
    given = {"nproc", "nodes"} & set(explicit_options)
    if environment.world_size == 1:
        asks_for_more = most > 1 or counts != (1,)
        if not asks_for_more or not (given or environment.source == "variables"):
            return environment
        wanted = (
            f"--nodes {config.values['nodes']} --nproc {config.values['nproc']}"
            if most > 1
            else f"--nproc {config.values['nproc']}"
        )
        print(
            f"paceline: {_started_by(environment)} one process alone, so {wanted} counts, and this command "
            "starts its own processes.",
            file=sys.stderr,
        )
        return Environment()
    if "nproc" not in given or counts is None:
        return environment
    total = sum(counts) if len(counts) > 1 else counts[0] * least
    if total != environment.world_size and counts != (environment.local_world_size,):
        raise ConfigError(
            f"--nproc {config.values['nproc']} does not fit: {_started_by(environment)} "
            f"{environment.world_size} processes (WORLD_SIZE), {environment.local_world_size} of them on this node, "
            f"and this one is rank {environment.rank}. Leave out --nproc, or start the command once, without that "
            "launcher."
        )
    return environment


def require_recovery(config: RunConfig, environment: Environment) -> None:
    """Reject options that need Paceline's launcher or agent where another launcher has started the ranks."""
    if config.changes.companions:
        raise ConfigError(
            "--metrics-port needs ranks that Paceline starts. Leave it out, or give the command once on each node, "
            "without another launcher."
        )
    if config.recovery.recover in ("auto", "none") or (
        config.recovery.recover == "restart" and environment.source == "torchrun"
    ):
        return
    ways = "--recover none"
    if environment.source == "torchrun":
        ways = "--recover restart and torchrun's own --max-restarts"
    raise ConfigError(
        f"--recover {config.recovery.recover} does not work where {_started_by(environment)} the processes: "
        f"it needs Paceline's agent. Use {ways} here, or have Paceline start them: give the command once on "
        "each node, with --on spawn."
    )
