"""``paceline train TASK`` and ``paceline resume RUN``: start or continue a run."""

from __future__ import annotations

import json as json_module
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from paceline.cli.options import (
    ARGUMENTS,
    COMMON,
    COMMON_OF_TRAIN,
    FileDefaults,
    explicit_options,
    group,
    job_options,
    launchers_options,
    read_defaults,
    run_options,
)
from paceline.core.built_in import PARTS
from paceline.core.config import all_options, config_from_mapping, read_config_file, resumed_options
from paceline.core.environment import Environment
from paceline.core.errors import ConfigError
from paceline.core.files import is_address, parse_toml
from paceline.core.job import WorkerConfig
from paceline.core.plugins import import_object

_COMMON_OF_RESUME = ("epochs", "max_steps", "nproc", "nodes", "on", "strategy", "device", "checkpoint_every")

Options: Any = run_options(common=COMMON_OF_TRAIN)
ResumeOptions: Any = run_options(common=_COMMON_OF_RESUME)
JobFlags: Any = job_options()
LauncherFlags: Any = launchers_options(for_tasks=True)
DryRun = Annotated[bool, Parameter(negative="", group=group(COMMON))]
Output = Annotated[bool, Parameter(negative="", group=group("Output"))]


def train(
    task: Annotated[str, Parameter(group=group(ARGUMENTS))] = "",
    *,
    options: Annotated[Options | None, Parameter(name="*")] = None,
    run_dir: Annotated[str | None, Parameter(group=group(COMMON))] = None,
    config: Annotated[Path | None, Parameter(group=group(COMMON))] = None,
    dry_run: DryRun = False,
    job_flags: Annotated[JobFlags | None, Parameter(name="*")] = None,
    launcher_flags: Annotated[LauncherFlags | None, Parameter(name="*")] = None,
    json: Output = False,
    quiet: Output = False,
) -> int:
    """Train TASK on one process or several; if its run exists, continue it.

    To see a launcher's own options: paceline train --on slurm --help.

    Args:
        task: file.py:Name, package.module:Name, a built-in task such as fashion-mnist, or hf:MODEL, whose options
            paceline train hf:MODEL --help lists.
        run_dir: The run's directory. Default: runs/TASK-TIME.
        config: A TOML file with these options, such as a run.toml; the command line takes precedence.
        dry_run: Print what would start; start nothing.
        json: Print the result as JSON on the last line.
        quiet: Show no progress.
    """
    typed = {
        **({"task": task} if task else {}),
        **({"run_dir": run_dir} if run_dir else {}),
        **explicit_options(options),
    }
    given = typed if config is None else _with_file(typed, config)
    defaults = read_defaults(given.get("task"))
    values = defaults.run_options(given)
    worker_config = WorkerConfig(
        config=config_from_mapping(values, "the command line"), explicit_options=frozenset(given), quiet=quiet
    )
    if dry_run and not json:
        defaults.print_used("run", {name: value for name, value in values.items() if name not in given})
    return _start(worker_config, typed, defaults, job_flags, launcher_flags, dry_run=dry_run, json=json)


def resume(
    run: Annotated[str, Parameter(group=group(ARGUMENTS))],
    *,
    run_dir: Annotated[str | None, Parameter(group=group(COMMON))] = None,
    options: Annotated[ResumeOptions | None, Parameter(name="*")] = None,
    accept_code_changes: DryRun = False,
    dry_run: DryRun = False,
    job_flags: Annotated[JobFlags | None, Parameter(name="*")] = None,
    launcher_flags: Annotated[LauncherFlags | None, Parameter(name="*")] = None,
    json: Output = False,
    quiet: Output = False,
) -> int:
    """Continue the run in directory RUN at its exact next sample, with its processes and strategy.

    Args:
        run: The run's directory, or its address in an object store, such as s3://bucket/run1.
        run_dir: With an address: the directory that is made from it. Default: runs/NAME.
        accept_code_changes: Continue although files of the task have changed, which may change the bits.
        dry_run: Print what would start; start nothing.
        json: Print the result as JSON on the last line.
        quiet: Show no progress.
    """
    from paceline.runs.code_record import require_same_code
    from paceline.runs.directory import RunDirectory

    if is_address(run):
        run = import_object(PARTS["resume"])(run, run_dir)
    elif run_dir is not None:
        raise ConfigError("--run-dir is where a run that is given by its address continues. Leave it out.")
    directory = RunDirectory(Path(run))
    manifest = directory.read_complete_manifest()
    if not accept_code_changes:
        require_same_code(directory)
    recorded = config_from_mapping(manifest["config"], f"{run}/run.toml")
    typed = {**explicit_options(options), "run_dir": run, "resume": "must"}
    values = resumed_options(typed, typed, recorded)
    worker_config = WorkerConfig(
        config=config_from_mapping(values, "the command line"), explicit_options=frozenset(typed), quiet=quiet
    )
    return _start(worker_config, typed, read_defaults(), job_flags, launcher_flags, dry_run=dry_run, json=json)


def _start(
    worker_config: WorkerConfig,
    typed: Collection[str],
    defaults: FileDefaults,
    job_flags: Any,
    launcher_flags: Any,
    *,
    dry_run: bool,
    json: bool,
) -> int:
    """Have the launcher of ``--on`` start the task; a process that another launcher has made a rank trains here.

    Args:
        typed: the names of the options on the command line.
    """
    from paceline.launch.local import LocalLauncher
    from paceline.launch.local_run import own_environment, refuse_job_options, task_launcher

    launcher = task_launcher(worker_config.config)
    if isinstance(launcher, LocalLauncher):
        defaults = FileDefaults({})  # those of jobs on a cluster do not hold here
    options, own = defaults.job_options(job_flags), defaults.launcher_options(launcher.name, launcher_flags)
    if dry_run and not json:
        defaults.print_used("job", vars(options))
        defaults.print_used(launcher.name, own)
    rank = own_environment(worker_config.config, typed) if isinstance(launcher, LocalLauncher) else Environment()
    if rank.source != "single" and options.preflight:
        raise ConfigError("--preflight runs once per node: give it to the command that starts the ranks.")
    if rank.source == "single" or dry_run:
        return launcher.start_task(worker_config, options, own, dry_run=dry_run, json=json)
    refuse_job_options(worker_config.config.processes.on, options, own)
    return _train_as_rank(worker_config, rank, json=json)


def _train_as_rank(worker_config: WorkerConfig, rank: Environment, *, json: bool) -> int:
    from paceline.launch.local_run import require_recovery
    from paceline.training.worker import run_reported

    require_recovery(worker_config.config, rank)
    code, result = run_reported(worker_config, rank)
    if json and result is not None and rank.rank == 0:
        print(json_module.dumps(result), flush=True)
    return code


def _with_file(typed: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the options of a ``--config`` file, with those of the command line in their place."""
    values = read_config_file(file)
    if "task" not in typed and "task" not in values:
        values |= _recorded_task(file)
    fields = (*values.get("set", ()), *typed.get("set", ()))  # the last value of a field counts
    for name in typed:
        if (replaced := all_options()[name].replaces) is not None:
            values.pop(replaced, None)
    return {**values, **typed, **({"set": fields} if fields else {})}


def _recorded_task(run_toml: Path) -> dict[str, Any]:
    """Return the task of a ``run.toml`` and its fields; nothing for another kind of file."""
    from paceline.core.task_loading import recorded_spec

    task = parse_toml(run_toml.read_bytes()).get("task")
    if not isinstance(task, dict) or "spec" not in task:
        return {}
    fields = task.get("fields")
    return {
        "task": recorded_spec(task),
        "set": tuple(f"{n}={v}" for n, v in fields.items()) if isinstance(fields, dict) else (),
    }
