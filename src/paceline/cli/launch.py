"""``paceline launch --on NAME ... -- COMMAND``: start any program with a launcher."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from paceline.cli.options import job_options, launchers_options, read_defaults
from paceline.core.built_in import PARTS
from paceline.core.errors import ConfigError
from paceline.core.job import RecoveryPolicy
from paceline.core.options import parse_nodes, parse_nproc, parse_walltime_s
from paceline.core.plugins import has_part, import_object
from paceline.launch.launcher import LOCAL_LAUNCHERS, LaunchSpec, get_launcher, make_options

JobFlags: Any = job_options()
LauncherFlags: Any = launchers_options()
Flag = Annotated[bool, Parameter(negative="")]


def launch(
    *command: str,
    on: str,
    nodes: str = "1",
    nproc: str = "1",
    threads: int | None = None,
    walltime: str | None = None,
    max_restarts: int = 0,
    interface: str | None = None,
    python: str | None = None,
    job_flags: Annotated[JobFlags | None, Parameter(name="*")] = None,
    launcher_flags: Annotated[LauncherFlags | None, Parameter(name="*")] = None,
    dry_run: Flag = False,
    json: Flag = False,
) -> int:
    """Start any program on one process or many nodes: a .py file, -m module, or an executable.

    To see a launcher's own options: paceline launch --on slurm --help.

    Args:
        command: After --: the program and its arguments. {master_addr}, {master_port}, {node_rank}, {nnodes}, {rank},
            {world_size} and {local_rank} in the arguments are replaced, unless their braces are doubled.
        on: The launcher.
        nodes: Number of nodes, N or MIN:MAX.
        nproc: Processes per node: one number, or a list such as 8,4; auto: one per GPU, else per core; in a Slurm
            allocation
            its tasks; gpu: one per GPU.
        threads: OMP_NUM_THREADS of every process.
        walltime: Time limit of the job, such as 90min or 2h, or in Slurm's forms: 12:00:00, 1-06:00.
        max_restarts: How often torchrun may restart its workers.
        interface: Network interface to the other nodes, e.g. eth0.
        python: Python interpreter on the nodes. Default: this one; in an image, python.
        dry_run: Print the whole job and start nothing; does not need the cluster.
        json: Print the job as JSON.
    """
    from paceline.launch.submit import (
        choose_env_style,
        choose_rank_launcher,
        job_directory,
        job_name,
        nodes_python,
        normal_command,
        refuse_starters,
        start,
    )

    defaults, launcher = read_defaults(), get_launcher(on)
    job, of_run = defaults.job_options(job_flags), defaults.values("run")
    own_options = defaults.launcher_options(on, launcher_flags)
    own = make_options(launcher, own_options)
    interface = interface or of_run.get("interface")
    if dry_run and not json:
        defaults.print_used("job", vars(job))
        defaults.print_used(on, own_options)
    if nproc == "gpu" and on in LOCAL_LAUNCHERS:
        from paceline.core.environment import visible_gpus

        if not (gpus := visible_gpus()):
            raise ConfigError("--nproc gpu: there is no GPU on this node. Use --nproc auto, or give a number.")
        nproc = str(gpus)
    node_range, counts = launcher.resolve_sizes(parse_nodes(nodes), parse_nproc(nproc), own)
    if counts is None:
        raise ConfigError(
            f"--nproc auto does not work with --on {on}, except in a Slurm allocation with -n or GPUs. Give a number."
        )
    interpreter = nodes_python(launcher, python)
    words = normal_command(command, interpreter, partial(launcher.remote_path, options=own))
    env_style = choose_env_style(launcher, job.env_style, job.rank_launcher)
    refuse_starters(words, env_style)
    rank_launcher = choose_rank_launcher(launcher, job.rank_launcher, env_style, is_task=False)
    name = job.name or job_name(Path(next((w for w in words if w.endswith(".py")), words[0])).stem)
    world_size = sum(counts) if len(counts) > 1 else counts[0] * node_range[0]
    has_local_files = launcher.attached or launcher.files != "shared"
    spec = LaunchSpec(
        **{
            **job.spec_fields(world_size),
            "command": words,
            "name": name,
            "directory": job_directory(name, attached=has_local_files),
            "nodes": node_range,
            "nproc": counts,
            "threads": threads,
            "walltime_s": None if walltime is None else parse_walltime_s(walltime),
            "recovery": RecoveryPolicy(max_restarts=max_restarts),
            "interface": interface,
            "env_style": env_style,
            "rank_launcher": rank_launcher,
            "python": interpreter,
        }
    )
    script_warnings = PARTS["launch"]
    if has_part(script_warnings):
        for warning in import_object(script_warnings)(spec, on):
            print(f"paceline: {warning}", file=sys.stderr)
    return start(launcher, spec, own, job, dry_run=dry_run, json=json)
