"""``paceline train TASK`` and ``paceline resume RUN``."""

from __future__ import annotations

import json as json_module
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from paceline.cli.options import Options, given
from paceline.config import config_from_mapping, read_config_file
from paceline.distributed.environment import detect_environment
from paceline.job import Job
from paceline.launchers.job import launch, prepare, require_recovery
from paceline.run_directory import RunDirectory

Flag = Annotated[bool, Parameter(negative="")]
RunOptions = Annotated[Options | None, Parameter(name="*")]


def train(
    task: str = "",
    *,
    run: Annotated[str | None, Parameter(name=("--run", "--run-dir"), group="Run directory")] = None,
    config: Annotated[Path | None, Parameter(group="Task")] = None,
    options: RunOptions = None,
    dry_run: Flag = False,
    json: Flag = False,
    quiet: Flag = False,
) -> int:
    """Train TASK, on one process or several; continue it where it stands if it exists.

    Parameters
    ----------
    task
        file.py:Name, package.module:Name, or a recipe such as fashion-mnist.
    run
        The run's directory. Default: runs/TASK-TIME. Under torchrun write --run-dir: torchrun takes
        --run for an abbreviation of one of its own options.
    config
        A TOML file with these options, such as a run.toml; the command line wins.
    dry_run
        Print what would be started, and start nothing.
    json
        Print the result as JSON, as the last line.
    quiet
        Show no progress.
    """
    values = read_config_file(config) if config is not None else {}
    if config is not None and not task and "task" not in values:
        values |= _recorded_task(config)
    asked = {**({"task": task} if task else {}), **({"run": run} if run else {}), **given(options)}
    if "set" in asked:
        asked["set"] = (*values.get("set", ()), *asked["set"])  # the last one wins
    for length, other in (("epochs", "max_steps"), ("max_steps", "epochs")):
        if length in asked:
            values.pop(other, None)
    values |= asked
    return _start(values, dry_run=dry_run, json=json, quiet=quiet)


def resume(
    run: str,
    *,
    options: RunOptions = None,
    dry_run: Flag = False,
    json: Flag = False,
    quiet: Flag = False,
) -> int:
    """Continue the run in directory RUN at its exact next sample, with as many processes as before.

    Parameters
    ----------
    run
        The run's directory.
    dry_run
        Print what would be started, and start nothing.
    json
        Print the result as JSON, as the last line.
    quiet
        Show no progress.
    """
    recorded = RunDirectory(Path(run)).read_complete_manifest()["config"]
    kept = {name: recorded[name] for name in _KEPT if name in recorded}
    values = {**kept, **given(options), "run": run, "resume": "must"}
    return _start(values, dry_run=dry_run, json=json, quiet=quiet)


# Options that decide no bit of the model but that a continued run is expected to keep.
_KEPT: tuple[str, ...] = (
    *("on", "nproc", "nodes", "rdzv_id", "backend", "interface", "threads", "device", "workers"),
    *("checkpoint_every", "keep", "backup_to", "log_every"),
    *("recover", "max_restarts", "heartbeat", "hang_timeout", "walltime", "verify_every"),
)


def _start(values: Mapping[str, Any], *, dry_run: bool, json: bool, quiet: bool) -> int:
    config = config_from_mapping(values, "the command line")
    job = Job(config=config, given=frozenset(values), quiet=quiet)
    environment = detect_environment(rdzv_endpoint=config.rdzv_endpoint)
    if environment.source != "single" and not dry_run:
        # Some launcher has made this process a rank: be one.
        from paceline.worker import run_reported

        require_recovery(config, environment)
        code, result = run_reported(job, environment)
        if json and result is not None and environment.rank == 0:
            print(json_module.dumps(result), flush=True)
        return code
    if dry_run:
        _, rendered, job, directory = prepare(job)
        print(f"# {directory.path}/job.toml")
        print("".join(f"#   {line}\n" for line in job.to_toml().splitlines()))
        print(rendered.text, end="")
        return 0
    code, directory = launch(job)
    if code == 0 and json:
        print(json_module.dumps(directory.read_result()), flush=True)
    return code


def _recorded_task(run_toml: Path) -> dict[str, Any]:
    """The task that a ``run.toml`` names, and its fields; nothing where it is some other file."""
    task = tomllib.loads(run_toml.read_text(encoding="utf-8")).get("task")
    if not isinstance(task, dict) or "spec" not in task:
        return {}
    return {"task": task["spec"], "set": tuple(f"{n}={v}" for n, v in task.get("fields", {}).items())}
