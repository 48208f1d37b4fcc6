"""``paceline train TASK`` and ``paceline resume RUN``: start or continue a run."""

from __future__ import annotations

import dataclasses
import json as json_module
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from paceline.cli.job_options import JobOptions, refuse_job_options
from paceline.cli.launcher_options import launchers_options
from paceline.cli.options import ARGUMENTS, COMMON, COMMON_OF_TRAIN, explicit_options, group, run_options
from paceline.core.config import all_options, config_from_mapping, read_config_file, resumed_options
from paceline.core.errors import ConfigError
from paceline.core.files import parse_toml

if TYPE_CHECKING:
    from paceline.core.launch_spec import Command, LaunchSpec
    from paceline.launch.local_run import LocalRun

_COMMON_OF_RESUME = ("epochs", "max_steps", "nproc", "nodes", "on", "strategy", "device", "checkpoint_every")

Options: Any = run_options(common=COMMON_OF_TRAIN)
ResumeOptions: Any = run_options(common=_COMMON_OF_RESUME)
LauncherOptions: Any = launchers_options(for_tasks=True)
DryRun = Annotated[bool, Parameter(negative="", group=group(COMMON))]
Output = Annotated[bool, Parameter(negative="", group=group("Output"))]
JobFlags = Annotated[JobOptions | None, Parameter(name="*")]
LauncherFlags = Annotated[LauncherOptions | None, Parameter(name="*")]
_LOCAL_LAUNCHERS = ("auto", "inprocess", "spawn", "torchrun")


def train(
    task: Annotated[str, Parameter(group=group(ARGUMENTS))] = "",
    *,
    options: Annotated[Options | None, Parameter(name="*")] = None,
    run_dir: Annotated[str | None, Parameter(group=group(COMMON))] = None,
    config: Annotated[Path | None, Parameter(group=group(COMMON))] = None,
    dry_run: DryRun = False,
    job: JobFlags = None,
    launcher_options: LauncherFlags = None,
    json: Output = False,
    quiet: Output = False,
) -> int:
    """Train TASK on one process or several; if its run exists, continue it.

    To see a launcher's own options: paceline train --on slurm --help.

    Parameters
    ----------
    task
        file.py:Name, package.module:Name, or a built-in task such as fashion-mnist.
    run_dir
        The run's directory. Default: runs/TASK-TIME.
    config
        A TOML file with these options, such as a run.toml; the command line takes precedence.
    dry_run
        Print what would start; start nothing.
    json
        Print the result as JSON on the last line.
    quiet
        Show no progress.
    """
    values = read_config_file(config) if config is not None else {}
    if config is not None and not task and "task" not in values:
        values |= _recorded_task(config)
    overrides = {
        **({"task": task} if task else {}),
        **({"run_dir": run_dir} if run_dir else {}),
        **explicit_options(options),
    }
    if "set" in overrides:
        overrides["set"] = (*values.get("set", ()), *overrides["set"])  # the last value of a field counts
    for name in overrides:
        if (replaced := all_options()[name].replaces) is not None:
            values.pop(replaced, None)
    values |= overrides
    own = explicit_options(launcher_options)
    return _start(values, frozenset(values), overrides, job, own, dry_run=dry_run, json=json, quiet=quiet)


def resume(
    run: Annotated[str, Parameter(group=group(ARGUMENTS))],
    *,
    options: Annotated[ResumeOptions | None, Parameter(name="*")] = None,
    dry_run: DryRun = False,
    job: JobFlags = None,
    launcher_options: LauncherFlags = None,
    json: Output = False,
    quiet: Output = False,
) -> int:
    """Continue the run in directory RUN at its exact next sample, with its processes and strategy.

    Parameters
    ----------
    run
        The run's directory.
    dry_run
        Print what would start; start nothing.
    json
        Print the result as JSON on the last line.
    quiet
        Show no progress.
    """
    from paceline.runs.directory import RunDirectory

    manifest = RunDirectory(Path(run)).read_complete_manifest()
    recorded = config_from_mapping(manifest["config"], f"{run}/run.toml")
    overrides = {**explicit_options(options), "run_dir": run, "resume": "must"}
    values = resumed_options(overrides, overrides, recorded)
    own = explicit_options(launcher_options)
    return _start(values, frozenset(overrides), overrides, job, own, dry_run=dry_run, json=json, quiet=quiet)


def _start(
    values: Mapping[str, Any],
    explicit: frozenset[str],
    typed: Collection[str],
    job_options: JobOptions | None,
    own: Mapping[str, Any],
    *,
    dry_run: bool,
    json: bool,
    quiet: bool,
) -> int:
    """Start or continue a run.

    Args:
        explicit: the names of those that the user gave, here or in a file.
        typed: the names of those on the command line.
        job_options: for launchers that submit a job.
        own: the launcher's own options.
        dry_run: print what would start.
        json: print the result as JSON.
        quiet: show no progress.
    """
    from paceline.core.environment import detect_environment
    from paceline.core.job import WorkerConfig
    from paceline.launch.local_run import own_environment, prepare_local_run, require_recovery

    config = config_from_mapping(values, "the command line")
    if config.processes.on not in _LOCAL_LAUNCHERS:
        from paceline.cli.job_start import start_task

        return start_task(config, job_options or JobOptions(), own, dry_run=dry_run, json=json, quiet=quiet)
    preflight = explicit_options(job_options) == {"preflight": True}
    if own or not (job_options is None or preflight):
        refuse_job_options(config.processes.on, job_options, own)
    job = WorkerConfig(config=config, explicit_options=explicit, quiet=quiet)
    environment = detect_environment(rdzv_endpoint=config.processes.rdzv_endpoint)
    environment = own_environment(config, typed, environment)
    if preflight and environment.source != "single":
        raise ConfigError("--preflight runs once per node: give it to the command that starts the ranks.")
    if environment.source != "single" and not dry_run:
        # A launcher has made this process a rank.
        from paceline.training.worker import run_reported

        require_recovery(config, environment)
        code, result = run_reported(job, environment)
        if json and result is not None and environment.rank == 0:
            print(json_module.dumps(result), flush=True)
        return code
    run = prepare_local_run(job, reserve=not dry_run)
    checks = _preflight(run, config.processes.nproc) if preflight else None
    if dry_run:
        _print_dry_run(run, checks, json=json)
        return 0
    if checks is not None:
        from paceline.launch.preflight import find_preflight

        code, interface = find_preflight().run_before(checks)
        if code:
            if config.records.run_dir is None:
                with suppress(OSError):  # a rank that was killed leaves its mark there
                    run.directory.path.rmdir()
            return code
        run = run.on_interface(interface)
    code = run.launch()
    if code == 0 and json:
        print(json_module.dumps(run.directory.read_result()), flush=True)
    return code


def _print_dry_run(run: LocalRun, checks: LaunchSpec | None, *, json: bool) -> None:
    job_file, text = run.rendered.spec.job_file, run.job.to_toml()
    before: tuple[Command, ...] = ()
    if checks is not None:
        from paceline.launch.launcher import get_launcher

        before = get_launcher("spawn").render(checks).commands
    if json:
        commands = (*before, *run.rendered.commands)
        document = {"files": {str(job_file): text}, "commands": [command.to_json() for command in commands]}
        print(json_module.dumps(document))
        return
    for command in before:
        print(command.text)
    print(f"# {job_file}")
    print("".join(f"#   {line}\n" for line in text.splitlines()))
    print(run.rendered.text, end="")


def _preflight(run: LocalRun, nproc: tuple[int, ...] | None) -> LaunchSpec | None:
    """Return the ranks that check this node, and all nodes that the same command runs on, before the run."""
    from paceline.launch.preflight import find_preflight

    config, spec = run.job.config, run.rendered.spec
    checks, _ = find_preflight().prepare(
        dataclasses.replace(spec, nproc=nproc or spec.nproc),
        is_local=True,
        run=run.directory.path.absolute(),
        task=config.processes.task,
        keep=config.records.keep_checkpoints,
        timeout_s=spec.recovery.init_timeout_s,
        agents=run.launcher.name == "spawn" and spec.recovery.recover != "none",
    )
    return checks


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
