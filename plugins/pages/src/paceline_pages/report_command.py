"""``paceline report RUN [RUN...]``: analyse runs and write a page, or check what they have recorded."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from paceline.cli.progress import progress_bar
from paceline.core.errors import ConfigError, RunDirectoryError
from paceline.core.files import write_atomically
from paceline.core.plugins import import_library
from paceline.runs.checkpoint_manifest import MANIFEST
from paceline.runs.directory import RunDirectory

if TYPE_CHECKING:
    from paceline_pages.recorded_metrics import RecordCheck
    from paceline_pages.report import RunReport

Flag = Annotated[bool, Parameter(negative="")]


def report(
    run: Annotated[list[Path], Parameter(negative="")],
    *,
    output: Path | None = None,
    checkpoint: str | None = None,
    split: Literal["test", "val"] = "test",
    task: str = "",
    check: Flag = False,
    tolerance: float = 0.0,
    trust: Flag = False,
    json: Flag = False,
) -> int:
    """Analyse runs on the test split, and write a self-contained page or JSON.

    The models are evaluated again in this process. With several runs, each is compared with the first. With
    --check, the exit code is 0 if all recorded metrics, weights and programs hold with the installed libraries,
    and 1 if one does not.

    Args:
        run: Directories of the runs. With --check also packages: NAME@TAG, a directory, or the beginning of a digest.
        output: File of the page. Default: report.html in the run's directory; for several runs, comparison.html.
        checkpoint: best, last or a step. Default: the best, or the last if the run has no validation.
        split: Split to evaluate the models on: test or val.
        task: Where the task is now (file.py:Name), if not where the run's training found it.
        check: Write no page: compare each recorded metric, of all splits, with its value now.
        tolerance: Largest absolute difference that --check accepts. Default: rounding of float32.
        trust: Trust a package's program and task from now on; both can run code.
        json: Print all figures as one line of JSON; with --check, as a line for each run.
    """
    paths = list(dict.fromkeys(run))
    if check:
        if not tolerance >= 0 or output or checkpoint:
            raise ConfigError("--check takes a --tolerance of at least 0, and no --output or --checkpoint.")
        return max(_check(path, task, tolerance, trust=trust, json=json) for path in paths)
    if trust:
        raise ConfigError("--trust is for a package with --check: a report evaluates runs.")
    for path in paths:
        if not RunDirectory(path).exists() and (path / "tune.json").exists():
            raise ConfigError(f"{path} is a search, not a run. Give its trials, such as {path / 'trials' / '00000'}.")
        RunDirectory(path).read_complete_manifest()
    target = output or paths[0] / ("report.html" if len(paths) == 1 else "comparison.html")
    if not target.parent.is_dir():
        raise ConfigError(f"--output {target}: the folder {target.parent} does not exist. Create it first.")
    if target.is_dir():
        raise ConfigError(f"--output {target} is a folder. Give a file, such as {target / 'report.html'}.")
    # Imported here so that --help does not wait for torch.
    from paceline_pages.analysis import analyse
    from paceline_pages.report import as_json, make_report
    from paceline_pages.report_page import render

    for library in ("jinja2", "matplotlib", "PIL"):  # before the long evaluation, not after it
        import_library(library, "a report", "report")
    analyses = []
    for path in paths:
        with progress_bar(f"evaluating {path}", quiet=json) as on_progress:
            directory = RunDirectory(path)
            analyses.append(analyse(directory, split=split, checkpoint=checkpoint, task=task, on_progress=on_progress))
    report_data = make_report(analyses)
    page = render(report_data).encode()
    try:
        write_atomically(target, page)
    except OSError as error:
        raise RunDirectoryError(
            f"cannot write {target}: {error.strerror}. Choose another place with --output FILE."
        ) from error
    if json:
        print(json_module.dumps({**as_json(report_data), "page": str(target)}))
    else:
        _print(report_data, target)
    return 0


def _check(subject: Path, task: str, tolerance: float, *, trust: bool, json: bool) -> int:
    """Print what holds of a run's or package's record; return the exit code."""
    directory = RunDirectory(subject)
    with progress_bar(f"evaluating {subject}", quiet=json) as on_progress:
        if directory.exists() or (subject.is_dir() and not (subject / MANIFEST).is_file()):
            # Imported here so that --help does not wait for torch.
            from paceline_pages.recorded_metrics import check_run

            result = check_run(directory, on_progress, task=task, tolerance=tolerance)
        else:
            from paceline.runs import package

            opened = package.open_package(str(subject))
            if trust:
                package.trust(opened.digest)
            from paceline_pages.recorded_metrics import check_package

            result = check_package(opened, on_progress, task=task, tolerance=tolerance)
    if json:
        print(json_module.dumps({"subject": str(subject), "holds": result.holds, **asdict(result)}))
    else:
        _print_check(result, subject)
    return 0 if result.holds else 1


def _print_check(result: RecordCheck, subject: Path) -> None:
    from rich.text import Text

    from paceline.core.output import Console, ListTable

    console = Console(highlight=False)
    table = ListTable("", ">recorded", ">now", "", folds=("",))
    for finding in result.findings:
        values = ("" if value is None else f"{value:.6g}" for value in (finding.recorded, finding.now))
        table.add(finding.name, *values, finding.verdict, style=None if finding.holds else "bold red")
    console.print(table)
    for name, version in result.now.items():
        if result.then.get(name, version) != version:
            console.print(Text(f"{name}: {result.then[name]} recorded, {version} now"), soft_wrap=True)
    for change in result.changed_numerics:
        console.print(Text(change.replace("in the checkpoint", "recorded")), soft_wrap=True)
    wrong = sum(not finding.holds for finding in result.findings)
    found = (
        f"does not hold: {wrong} of {len(result.findings)} differ." if wrong else f"holds after step {result.step:,}."
    )
    console.print(Text(f"{subject} {found}", style="bold red" if wrong else "green"), soft_wrap=True)


def _print(report_data: RunReport, target: Path) -> None:
    from rich.text import Text

    from paceline.core.output import Console, ListTable
    from paceline_pages.report import interval, number

    console = Console(highlight=False)
    console.print(Text(report_data.headline.headline, style="bold"))
    console.print(Text(report_data.headline.sentence), soft_wrap=True)
    table = ListTable("run", "metric", ">value", "95 % interval", folds=("run", "metric"))
    for analysis in report_data.analyses:
        for name, estimate in analysis.metrics.items():
            table.add(analysis.record.name, name, number(estimate), interval(estimate))
    console.print(table)
    console.print(Text(f"Page: {target}"), soft_wrap=True)
