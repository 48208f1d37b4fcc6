"""From a run's options to a started job: choose the launcher, write the job file, wait."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.job import Job, default_run_path
from paceline.launchers.base import JobSpec, Rendered, get_launcher
from paceline.launchers.failures import STOPPED
from paceline.run_directory import RunDirectory, write_atomically
from paceline.task import check_spec

_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


def prepare(job: Job) -> tuple[str, Rendered, Job, RunDirectory]:
    """The launcher's name, what would run, the job with nothing left open, and the run's directory.

    Nothing is touched.

    Raises:
        ConfigError: no launcher can run this.
        TaskError: there is no such task; a wrong name is told before anything is started.
    """
    config = job.config
    if config.task or config.run is None or not RunDirectory(Path(config.run)).exists():
        check_spec(config.task)
    nproc = available_processes(config) if config.nproc == "auto" else config.nproc
    several = nproc > 1 or config.nodes > 1
    name = config.on if config.on != "auto" else "spawn" if several else "inprocess"
    if config.nodes > 1 and config.rdzv_endpoint is None:
        raise ConfigError("--nodes above 1 needs --rdzv-endpoint HOST:PORT, the address of machine 0.")
    directory = RunDirectory(Path(config.run or default_run_path(config.task)))
    config = dataclasses.replace(config, run=str(directory.path), nproc=nproc)
    job = dataclasses.replace(job, config=config, supervised=name != "inprocess")
    inplace = _recovers_in_place(config, name, directory)
    spec = JobSpec(
        command=("-m", "paceline.worker", str(_job_file(config, directory))),
        nproc=nproc,
        nodes=config.nodes,
        node_rank=config.node_rank,
        rdzv_endpoint=config.rdzv_endpoint,
        rdzv_id=config.rdzv_id,
        threads=config.threads,
        directory=directory,
        recover="inplace" if inplace else "none",
        max_restarts=config.max_restarts,
        heartbeat_s=config.heartbeat,
    )
    return name, get_launcher(name).render(spec), job, directory


def launch(job: Job) -> tuple[int, RunDirectory]:
    """Start a run and wait for its end; return the exit code and the run's directory.

    Raises:
        ConfigError: no launcher can run this.
        TaskError: there is no such task.
        RunDirectoryError: the run's directory cannot be written, or another process uses it.
        LaunchError: a process could not be started.
    """
    name, rendered, job, directory = prepare(job)
    config = job.config
    # By hand on several machines, machine 0 may be at work in the shared directory already.
    if not config.node_rank and directory.is_running():
        raise directory.in_use()
    if not config.node_rank:
        directory.check_resume(config.resume)
    directory.create()
    try:
        write_atomically(_job_file(config, directory), job.to_toml().encode())
    except OSError as error:
        raise directory.unwritable(error) from error
    code = get_launcher(name).submit(rendered).wait()
    if code in STOPPED and job.supervised and not job.quiet:
        last = directory.read_events()[-1:]
        # Interrupted before its ranks had met, a job has saved nothing.
        if last and last[0]["event"] == "stopped":
            print(
                "paceline: stopped, as asked; everything is saved. "
                f"Continue with: paceline resume {directory.path}",
                file=sys.stderr,
            )
    return code, directory


def _recovers_in_place(config: RunConfig, name: str, directory: RunDirectory) -> bool:
    """Whether workers that die are replaced while the others go on.

    Raises:
        ConfigError: that was asked for, and cannot be.
    """
    if config.recover != "inplace":
        return False
    reduction = config.reduction
    if directory.exists():
        reduction = directory.read_manifest()["config"].get("reduction", reduction)
    obstacles = [
        obstacle
        for obstacle, there in (
            (f"--on {name}", name != "spawn"),
            (f"--nodes {config.nodes}", config.nodes > 1),
            (f"--reduction {reduction}", reduction == "torch"),
            ("a GPU", config.device != "cpu" and _visible_gpus() > 0),
        )
        if there
    ]
    if obstacles:
        raise ConfigError(
            f"--recover inplace does not work with {', '.join(obstacles)} yet: it needs --on spawn on one "
            "machine, --reduction exact or fast, and --device cpu. Use --recover none."
        )
    return True


def _job_file(config: RunConfig, directory: RunDirectory) -> Path:
    """The job's file; each machine has its own."""
    return directory.path / (f"job-{config.node_rank}.toml" if config.node_rank else "job.toml")


def available_processes(config: RunConfig) -> int:
    """What ``--nproc auto`` means here: one process a GPU, else one a core."""
    gpus = _visible_gpus() if config.device != "cpu" else 0
    return gpus or len(os.sched_getaffinity(0))


def _visible_gpus() -> int:
    """The number of NVIDIA GPUs, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1")])
    return len(list(_NVIDIA_GPUS.iterdir())) if _NVIDIA_GPUS.is_dir() else 0
