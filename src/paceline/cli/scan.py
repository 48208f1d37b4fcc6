"""``paceline scan TASK --nproc 1,2,4``: one job for each size, and how well it scales."""

from __future__ import annotations

import dataclasses
import json as json_module
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from paceline.bench.scaling import Scaling, ScalingReport, SizeResult, read_result, sized_config
from paceline.cli.job_options import JobOptions
from paceline.cli.launcher_options import launchers_options
from paceline.cli.options import given, run_options
from paceline.config import RunConfig, config_from_mapping, parse_duration_s, parse_nodes, parse_nproc
from paceline.errors import ConfigError, PacelineError

if TYPE_CHECKING:
    from paceline.launchers.base import JobHandle
    from paceline.launchers.registry import JobRecord

Options: Any = run_options()
LauncherOptions: Any = launchers_options(for_tasks=True)
Flag = Annotated[bool, Parameter(negative="")]
_HERE = ("spawn", "torchrun")


def scan(
    task: str,
    *,
    run: Annotated[Path | None, Parameter(name=("--run", "--run-dir"), group="Run directory")] = None,
    steps: int = 100,
    warmup: int = 20,
    scaling: Scaling = "strong",
    plot: Path | None = None,
    options: Annotated[Options | None, Parameter(name="*")] = None,
    job: Annotated[JobOptions | None, Parameter(name="*")] = None,
    launcher_options: Annotated[LauncherOptions | None, Parameter(name="*")] = None,
    json: Flag = False,
    markdown: Flag = False,
) -> int:
    """Train TASK for some steps with each number of processes, and tabulate throughput and efficiency.

    Here the sizes run one after another; on a cluster each is a job, and all are submitted at once. The exit
    code is 0 if all came to their end.

    Parameters
    ----------
    task
        file.py:Name, package.module:Name, or a recipe such as fashion-mnist.
    run
        A directory for the runs. Default: runs/TASK-TIME.
    steps
        Steps to measure.
    warmup
        Steps before those; speeds are taken over windows of as many.
    scaling
        strong: the same global batch for all; weak: --global-batch-size is the smallest size's, and grows.
    plot
        Write a chart into this SVG file.
    json
        Print JSON.
    markdown
        Print Markdown.
    """
    from paceline.job import default_run_path
    from paceline.task import check_spec

    for name, value in (("steps", steps), ("warmup", warmup)):
        if value < 1:
            raise ConfigError(f"--{name} must be at least 1, but is {value}.")
    if plot is not None and (plot.suffix != ".svg" or not plot.absolute().parent.is_dir()):
        raise ConfigError(f"--plot must be a file that ends in .svg, in a directory that is there: {plot}.")
    check_spec(task)
    values = {"on": "spawn", **given(options), "task": task}
    sizes = _sizes(values)
    least, most = parse_nodes(values.get("nodes", "1"))
    if least != most:
        raise ConfigError(f"--nodes {least}:{most}: a scan is of fixed sizes. Give one number.")
    asked = config_from_mapping({**values, "nproc": sizes[0]}, "the command line")
    if asked.on == "auto":
        asked = dataclasses.replace(asked, on="spawn")
    home = (run or Path(default_run_path(task))).resolve()
    configs = {
        nproc: sized_config(
            *(asked, nproc, sizes[0]),
            scaling=scaling,
            steps=steps,
            warmup=warmup,
            run=home / f"nproc-{nproc}",
        )
        for nproc in sizes
    }
    if asked.on in _HERE:
        codes = _run_here(configs)
    else:
        codes = _run_as_jobs(configs, job or JobOptions(), given(launcher_options))
    results: list[SizeResult] = [
        read_result(Path(str(config.run)), nproc * least, codes[nproc], warmup=warmup)
        for nproc, config in configs.items()
    ]
    report = ScalingReport(task, scaling, results)
    if plot is not None and len(report.failed) < len(results):
        plot.write_text(report.chart(), encoding="utf-8")
    if json:
        print(json_module.dumps(report.as_json(), indent=2))
    elif markdown:
        print(report.as_markdown())
    else:
        from rich.console import Console

        console = Console()
        console.print(report.as_table())
        console.print(f"runs: {home}", style="dim", highlight=False)
    return 1 if report.failed else 0


def _sizes(values: Mapping[str, Any]) -> tuple[int, ...]:
    sizes = parse_nproc(values.get("nproc", ""))
    if sizes is None or len(set(sizes)) < len(sizes):
        raise ConfigError("--nproc must list different numbers of processes, such as 1,2,4.")
    return tuple(sorted(sizes))


def _run_here(configs: Mapping[int, RunConfig]) -> dict[int, int]:
    """One after another: they would share the machine."""
    from paceline.job import Job
    from paceline.launchers.training import launch

    codes = {}
    for nproc, config in configs.items():
        _say(f"--nproc {nproc}")
        try:
            codes[nproc], _ = launch(Job(config=config, quiet=True))
        except PacelineError as error:
            _say(str(error))
            codes[nproc] = error.exit_code
        if codes[nproc] == 130:
            raise KeyboardInterrupt
    return codes


def _run_as_jobs(
    configs: Mapping[int, RunConfig], options: JobOptions, own: Mapping[str, Any]
) -> dict[int, int]:
    """All are in the queue at once; where a job ends with its command, one after another."""
    from paceline.launchers.base import get_launcher
    from paceline.launchers.submission import finish

    jobs: dict[int, tuple[JobRecord, JobHandle]] = {}
    codes: dict[int, int] = {}
    try:
        for nproc, config in configs.items():
            record, handle = jobs[nproc] = _submit(config, nproc, options, own)
            _say(f"--nproc {nproc}: {record.id}")
            if get_launcher(config.on).attached:
                codes[nproc] = finish(record, handle)
        for nproc, (record, handle) in jobs.items():
            if nproc not in codes:
                codes[nproc] = finish(record, handle)
    finally:
        for nproc, (_, handle) in jobs.items():
            if nproc not in codes:
                with suppress(PacelineError):
                    handle.cancel()
    return codes


def _submit(
    config: RunConfig, nproc: int, options: JobOptions, own: Mapping[str, Any]
) -> tuple[JobRecord, JobHandle]:
    from paceline.launchers.base import get_launcher
    from paceline.launchers.own_options import make_options
    from paceline.launchers.submission import submit, task_job

    launcher = get_launcher(config.on)
    fields = {
        **options.spec_fields(None),
        "nodes": parse_nodes(config.nodes),
        "nproc": (nproc,),
        "walltime_s": None if config.walltime is None else parse_duration_s(config.walltime, "walltime"),
    }
    spec = task_job(config, fields, launcher, sys.executable)
    return submit(launcher, launcher.render(spec, make_options(launcher, own)))


def _say(line: str) -> None:
    # Not on the standard output, which is for the result.
    print(f"paceline: {line}", file=sys.stderr, flush=True)
