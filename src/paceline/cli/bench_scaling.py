"""``paceline bench scaling TASK --nproc 1,2,4``: one job for each size, and how well it scales."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from paceline.cli.job_options import LOCAL_LAUNCHERS, JobOptions, refuse_job_options
from paceline.cli.launcher_options import launchers_options
from paceline.cli.options import explicit_options, run_options
from paceline.core.config import RunConfig, config_from_mapping
from paceline.core.errors import ConfigError, LaunchError, PacelineError
from paceline.core.options import flag, parse_nodes, parse_nproc
from paceline.insight.bench.report import print_report
from paceline.insight.bench.scaling import Scaling, ScalingReport, SizeResult, read_result, sized_config

if TYPE_CHECKING:
    from paceline.launch.launcher import JobHandle, Launcher, RenderedJob
    from paceline.launch.submit import JobRecord

Options: Any = run_options(common=("nproc", "nodes", "on", "strategy", "global_batch_size", "device"))
LauncherOptions: Any = launchers_options(for_tasks=True)
Flag = Annotated[bool, Parameter(negative="")]
_REFUSED_JOB_OPTIONS = {
    "preflight": "a scaling benchmark runs no preflight checks. Leave it out, and run paceline doctor first.",
    "wait": "a scaling benchmark waits for its jobs anyway. Leave it out.",
    "detach": "a scaling benchmark stays to the end of its jobs, and shows how they compare. Leave it out.",
}


def scaling(
    task: str,
    *,
    run_dir: Path | None = None,
    steps: int = 100,
    warmup: int = 20,
    mode: Annotated[Scaling, Parameter(name="--scaling")] = "strong",
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
        file.py:Name, package.module:Name, or a built-in task such as fashion-mnist.
    run_dir
        A directory for the runs. Default: runs/TASK-TIME.
    steps
        Steps to measure.
    warmup
        Steps before those; speeds are measured over windows of the same length.
    mode
        strong: the same global batch for all sizes; weak: it grows with the size, from --global-batch-size.
    plot
        Write a chart into this SVG file.
    json
        Print JSON.
    markdown
        Print Markdown.
    """
    from paceline.core.job import default_run_path
    from paceline.core.task_loading import check_spec
    from paceline.launch.launcher import get_launcher

    for name, value in (("steps", steps), ("warmup", warmup)):
        if value < 1:
            raise ConfigError(f"--{name} must be at least 1, but is {value}.")
    if plot is not None and (plot.suffix != ".svg" or not plot.absolute().parent.is_dir()):
        raise ConfigError(f"--plot must be a file that ends in .svg, in an existing directory: {plot}.")
    for name, why in _REFUSED_JOB_OPTIONS.items():
        if getattr(job, name, False):
            raise ConfigError(f"{flag(name)}: {why}")
    check_spec(task)
    values = {"on": "spawn", **explicit_options(options), "task": task}
    sizes = _sizes(values)
    least, most = parse_nodes(values.get("nodes", "1"))
    if least != most:
        raise ConfigError(f"--nodes {least}:{most}: a scaling benchmark is of fixed sizes. Give one number.")
    asked = config_from_mapping({**values, "nproc": sizes[0]}, "the command line")
    if asked.on == "auto":
        asked = dataclasses.replace(asked, on="spawn")
    home = (run_dir or Path(default_run_path(task))).resolve()
    configs = {
        nproc: sized_config(
            *(asked, nproc, sizes[0]),
            scaling=mode,
            steps=steps,
            warmup=warmup,
            run=home / f"nproc-{nproc}",
        )
        for nproc in sizes
    }
    own = explicit_options(launcher_options)
    if asked.on in LOCAL_LAUNCHERS:
        if own or explicit_options(job):
            refuse_job_options(asked.on, job, own)
        processes = {nproc: nproc * least for nproc in sizes}
        codes = _run_here(configs)
    else:
        launcher = get_launcher(asked.on)
        jobs = _rendered(launcher, configs, job or JobOptions(), own)
        processes = {nproc: rendered.spec.world_size for nproc, rendered in jobs.items()}
        codes = _run_as_jobs(launcher, jobs)
    results: list[SizeResult] = [
        read_result(Path(str(config.run_dir)), processes[nproc], codes[nproc], warmup=warmup)
        for nproc, config in configs.items()
    ]
    report = ScalingReport(task, mode, results)
    if plot is not None and len(report.failed) < len(results):
        plot.write_text(report.chart(), encoding="utf-8")
    print_report(report, json=json, markdown=markdown)
    if not json and not markdown:
        print(f"runs: {home}")
    return 1 if report.failed else 0


def _sizes(values: Mapping[str, Any]) -> tuple[int, ...]:
    sizes = parse_nproc(values.get("nproc", ""))
    if sizes is None or len(set(sizes)) < len(sizes):
        raise ConfigError("--nproc must list different numbers of processes, such as 1,2,4.")
    return tuple(sorted(sizes))


def _run_here(configs: Mapping[int, RunConfig]) -> dict[int, int]:
    """Run the sizes one after another, because they would share the machine."""
    from paceline.core.job import WorkerConfig
    from paceline.launch.local_run import launch

    codes = {}
    for nproc, config in configs.items():
        _say(f"--nproc {nproc}")
        try:
            codes[nproc], _ = launch(WorkerConfig(config=config, quiet=True))
        except PacelineError as error:
            _say(str(error))
            codes[nproc] = error.exit_code
        if codes[nproc] == 130:
            raise KeyboardInterrupt
    return codes


def _rendered(
    launcher: Launcher, configs: Mapping[int, RunConfig], options: JobOptions, own: Mapping[str, Any]
) -> dict[int, RenderedJob]:
    """Return the job of each size; an impossible one is rejected before any of them is submitted.

    Raises:
        ConfigError: there is such a thing, or their results could not be read.
    """
    from paceline.cli.job_start import task_spec
    from paceline.launch.registry import make_options

    if launcher.files != "shared":
        raise ConfigError(
            f"--on {launcher.name}: its results are not seen from here, since the machines do not share this "
            f"one's files. Start each size by itself: paceline train --on {launcher.name}."
        )
    launcher_options = make_options(launcher, own)
    jobs = {}
    for nproc, config in configs.items():
        spec = task_spec(launcher, config, launcher_options, options)
        if spec.nproc != (nproc,):
            raise ConfigError(
                f"--nproc {nproc}: --hosts says {','.join(map(str, spec.nproc))} processes a machine. "
                "A scaling benchmark is of several numbers: leave them out of --hosts."
            )
        jobs[nproc] = launcher.render(spec, launcher_options)
    return jobs


def _run_as_jobs(launcher: Launcher, rendered: Mapping[int, RenderedJob]) -> dict[int, int]:
    """Submit all sizes at once; if a job ends with its command, one after another."""
    from paceline.launch.submit import submit

    jobs: dict[int, tuple[JobRecord, JobHandle]] = {}
    codes: dict[int, int] = {}
    try:
        for nproc, job in rendered.items():
            record, handle = jobs[nproc] = submit(launcher, job)
            _say(f"--nproc {nproc}: {record.id}")
            if launcher.attached:
                codes[nproc] = _finished(nproc, record, handle)
        for nproc, (record, handle) in jobs.items():
            if nproc not in codes:
                codes[nproc] = _finished(nproc, record, handle)
    except BaseException:  # Ctrl-C, or a size that was refused
        for nproc, (_, handle) in jobs.items():
            if nproc not in codes:
                with suppress(PacelineError):
                    handle.cancel()
        raise
    return codes


def _finished(nproc: int, record: JobRecord, handle: JobHandle) -> int:
    """Return the exit code of a job, once it has ended; where that cannot be learned, wait for the others."""
    from paceline.launch.submit import finish

    try:
        return finish(record, handle)
    except LaunchError as error:
        _say(f"--nproc {nproc}: {error}")
        return error.exit_code


def _say(line: str) -> None:
    # Not on the standard output, which is for the result.
    print(f"paceline: {line}", file=sys.stderr, flush=True)
