"""``paceline tune TASK --search lr=log:1e-3:1``: search for the best hyperparameters."""

from __future__ import annotations

import dataclasses
import json as json_module
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from paceline.cli.options import explicit_options, group, run_options
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from paceline.core.output import Console
    from paceline_tune.search import Search, SearchDirectory

Options: Any = run_options(without=("resume", "metrics_port", "metrics_host", "metrics_token_file"))
Flag = Annotated[bool, Parameter(negative="")]
_SEARCH, _BUDGET, _RESOURCES = group("Search", 0), group("Budget", 1), group("Resources", 2)
_TRIALS, _POPULATION = 128, 8
_MAX_SHOWN_FAILURES = 3


def tune(
    task: str = "",
    *,
    search: Annotated[tuple[str, ...], Parameter(group=_SEARCH, negative="")] = (),
    metric: Annotated[str | None, Parameter(group=_SEARCH)] = None,
    constraint: Annotated[tuple[str, ...], Parameter(group=_SEARCH, negative="")] = (),
    trials: Annotated[int | None, Parameter(group=_SEARCH)] = None,
    repeats: Annotated[int | None, Parameter(group=_SEARCH)] = None,
    sampler: Annotated[Literal["random", "tpe"] | None, Parameter(group=_SEARCH)] = None,
    scheduler: Annotated[Literal["asha", "pbt", "none"] | None, Parameter(group=_SEARCH)] = None,
    grace_period: Annotated[int | None, Parameter(group=_SEARCH)] = None,
    reduction_factor: Annotated[float | None, Parameter(group=_SEARCH)] = None,
    perturbation_interval: Annotated[int | None, Parameter(group=_SEARCH)] = None,
    stop: Annotated[tuple[str, ...], Parameter(group=_SEARCH, negative="")] = (),
    budget: Annotated[str | None, Parameter(group=_BUDGET)] = None,
    price_per_hour: Annotated[float | None, Parameter(group=_BUDGET)] = None,
    cpus_per_trial: Annotated[float | None, Parameter(group=_RESOURCES)] = None,
    gpus_per_trial: Annotated[float | None, Parameter(group=_RESOURCES)] = None,
    ray_address: Annotated[str | None, Parameter(group=_RESOURCES)] = None,
    run_dir: Path | None = None,
    resume: Annotated[bool, Parameter(name="--resume", negative="")] = False,
    options: Annotated[Options | None, Parameter(name="*")] = None,
    json: Flag = False,
    quiet: Flag = False,
) -> int:
    """Search for the hyperparameters that give TASK the best result on its validation split.

    Each trial is a run in trials/ of the search's directory, with the options of paceline train. By default
    ASHA stops trials early that fall behind.

    Args:
        task: file.py:Name, package.module:Name, hf:MODEL, or a built-in task such as fashion-mnist.
        search: Values of a field or of an option; may be repeated for others. lr=log:1e-3:1,
            n=log-int:16:1024, momentum=uniform:0.1:0.9, n=int:1:8, width=choice:32,64, or
            "momentum=uniform:0:1 if opt=sgd". Default: the task's.
        constraint: What every configuration satisfies, such as "width * depth <= 512".
        metric: NAME:min or NAME:max, to rank trials by. Default: the task's, else loss:min.
        trials: Most configurations to try; with pbt, the members. Default: 128; with pbt 8.
        repeats: Trials of each configuration, with different seeds, ranked by their mean. Default: 1.
        sampler: random, or tpe, which learns from results. Default: random.
        scheduler: asha compares trials after 1, 4, 16, ... evaluations; pbt lets bad ones continue from good ones with
            other values; none trains each to its end. Default: asha; with --repeats none.
        grace_period: Evaluations that every trial has. Default: 1.
        reduction_factor: With asha, one in N trials passes a comparison; the next is N times later. Default: 4.
        perturbation_interval: pbt's evaluations between changes. Default: 1.
        stop: NAME=VALUE: stop trials there; repeatable.
        budget: 2h (wall-clock time), 100trials, 50gpu-h or $200; when it is spent, running trials save and stop.
        price_per_hour: Price of the nodes, for a budget in dollars.
        cpus_per_trial: CPUs of each trial. Default: --nproc times --threads.
        gpus_per_trial: GPUs of each trial. Default: --nproc, if there are GPUs.
        ray_address: HOST:PORT of a Ray cluster. Default: RAY_ADDRESS; without it, a new cluster on this machine.
        run_dir: The search's directory. Default: runs/tune-TASK-TIME.
        resume: Continue the search in --run-dir, or in DIR with --resume DIR. If TASK and all options are given again,
            start it if it does not exist: for jobs that a queue may restart.
        json: Print the result as JSON.
        quiet: Show no progress.
    """
    from paceline_tune import plan_search
    from paceline_tune.history import read_trials
    from paceline_tune.search import SearchDirectory

    changes = _given(budget=budget, price_per_hour=price_per_hour, trials=trials)
    settings = _given(
        metric=metric,
        sampler=sampler,
        repeats=repeats,
        scheduler=scheduler or ("none" if (repeats or 1) > 1 else None),
        grace_period=grace_period,
        reduction_factor=reduction_factor,
        perturbation_interval=perturbation_interval,
    )
    address = plan_search.find_cluster(ray_address)
    if resume and run_dir is None and task and SearchDirectory(Path(task)).settings.exists():
        task, run_dir = "", Path(task)
    elif task and SearchDirectory(Path(task)).settings.exists():
        raise ConfigError(f"{task} is a search. Continue it by paceline tune --resume {task}, or give a TASK.")
    if resume and run_dir is None:
        is_directory = bool(task) and ":" not in task
        problem = f"there is no search in {task}" if is_directory else "--resume needs the search's directory"
        raise ConfigError(f"{problem}. Give it by paceline tune --resume DIR or, with a task, by --run-dir DIR.")
    directory = SearchDirectory(run_dir or plan_search.default_directory(task))
    request = None
    if task or not resume:
        trials = trials or (_POPULATION if scheduler == "pbt" else _TRIALS)
        request = _make_search(
            task, explicit_options(options), cpus_per_trial, gpus_per_trial, trials, stop, here=address is None
        )
        request = dataclasses.replace(request, space=search, constraints=constraint, **settings, **changes)
    elif (
        any((search, constraint, stop, settings, explicit_options(options)))
        or cpus_per_trial is not None
        or gpus_per_trial is not None
    ):
        raise ConfigError(
            "--resume continues the search with its recorded options. Only --trials, --budget and "
            "--price-per-hour can be changed."
        )
    cpus = plan_search.own_cpus()
    if resume and (request is None or directory.settings.exists()):
        recorded = directory.read()
        if request is not None:
            plan_search.require_same(recorded, request, directory, metric)
        if recorded.scheduler == "pbt" and trials not in (None, recorded.trials):
            raise ConfigError("--trials: the members of a population stay. Leave it out, or start another search.")
        search_plan = dataclasses.replace(recorded, **changes)
        plan_search.check(search_plan)
        history = read_trials(directory.journal)
        left = search_plan.planned - sum(trial.ended for trial in history.trials.values())
        estimate = plan_search.estimate_rest(search_plan, history, plan_search.estimate_search(search_plan, cpus))
        if left:
            search_plan = plan_search.find_task(search_plan)
            spent = history.cost(history.clock_s, search_plan.gpus)
            plan = plan_search.describe(search_plan, estimate, here=address is None, left=left, spent=spent)
        else:
            plan = f"all {search_plan.planned} trials have ended; --trials N continues with more."
    else:
        assert request is not None
        directory.require_none()
        plan_search.check(request)
        _print_status(quiet, "measuring the task for a few steps ...")
        search_plan, profile = plan_search.measure_search(request, metric)
        for failure in profile.failures:
            _print_status(quiet, f"a configuration cannot be trained, and a trial of it fails: {failure}")
        estimate = plan_search.estimate_search(search_plan, cpus)
        plan = plan_search.describe(search_plan, estimate, here=address is None)
    _print_status(quiet, plan)
    directory.write(search_plan, new=not resume)
    code = plan_search.run(
        search_plan,
        directory,
        address=address,
        cpus=max(cpus, int(-(-search_plan.cpus // 1))),
        quiet=quiet,
        print_status=lambda text: _print_status(quiet, text),
    )
    return _print_result(search_plan, directory, code, json=json)


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _make_search(
    task: str,
    options: Mapping[str, Any],
    cpus_per_trial: float | None,
    gpus_per_trial: float | None,
    trials: int,
    stop: tuple[str, ...],
    *,
    here: bool,
) -> Search:
    from paceline.core.config import config_from_mapping
    from paceline.core.environment import preferred_device
    from paceline.core.task_loading import check_spec
    from paceline_tune.search import Search

    check_spec(task)
    config = config_from_mapping({**options, "task": task}, "the command line")
    counts = config.processes.nproc
    if counts is None or len(counts) > 1:
        raise ConfigError(f"--nproc {config.values['nproc']}: give one number, the processes of each trial.")
    if gpus_per_trial is None:
        wants_gpus = config.processes.device == "cuda" or (
            config.processes.device == "auto" and here and preferred_device() == "cuda"
        )
        gpus_per_trial = float(counts[0]) if wants_gpus else 0.0
    elif config.processes.device == "cuda" and not gpus_per_trial:
        raise ConfigError("--device cuda: a trial has no GPU. Leave --gpus-per-trial 0 out, or use --device cpu.")
    # Ray may leave all GPUs visible to a trial that has reserved none.
    device = {} if gpus_per_trial else {"device": "cpu"}
    threads = config.processes.threads or max(1, int((cpus_per_trial or 0) // counts[0]))
    return Search(
        # The number of threads decides bits, so it must not depend on the machine that runs a trial.
        options={**options, **device, "task": task, "threads": threads},
        space=(),
        trials=trials,
        metric="loss:min",
        stop=dict(map(_goal, stop)),
        cpus=cpus_per_trial or counts[0] * threads,
        gpus=gpus_per_trial,
        workdir=str(Path.cwd()),
    )


def _goal(text: str) -> tuple[str, float]:
    name, separator, value = text.partition("=")
    try:
        goal = float(value)
    except ValueError:
        separator = ""
    if not separator or not name:
        raise ConfigError(f"--stop must be NAME=VALUE, such as accuracy=0.95, but is {text!r}.")
    return name.strip(), goal


def _print_result(search: Search, directory: SearchDirectory, code: int, *, json: bool) -> int:
    from paceline_tune.history import read_trials
    from paceline_tune.status import render

    if not directory.result.exists():
        return code or 1
    result = json_module.loads(directory.result.read_bytes())
    if json:
        print(json_module.dumps(result))
        return code
    from paceline.core.output import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 140)
    say = partial(console.print, markup=False, soft_wrap=True)
    journal = read_trials(directory.journal)
    status = render(search, journal, clock_s=result["seconds"], budget=result["budget"] or "", show_all=True)
    console.print(status, soft_wrap=False)
    failed = [trial for trial in journal.trials.values() if trial.state == "failed"]
    for trial in failed[:_MAX_SHOWN_FAILURES]:
        say(f"trial {trial.number:05d} failed: {trial.results[-1].message}", style="red")
        say(f"  see {directory.trial(trial.number)}/logs")
    if result["best"] is None:
        say(f"There is no best trial: no successful trial reported {search.metric_name}.", style="red")
    else:
        best = journal.ranking(search.metric_name, search.mode, search.repeats)[0]
        seeds = f", the mean of {search.repeats} seeds" if search.repeats > 1 else ""
        first = best.trials[0]
        is_trained = first.state == "finished" or search.scheduler == "pbt"
        if search.scheduler == "pbt":
            _print_schedule(console, result["best"]["schedule"])
        text = f"trial {first.number:05d}, {search.mode} {search.metric_name} {best.show()}{seeds}"
        advice = "Export its model:" if is_trained else "Train it in full:"
        say(f"\nBest: {text}. {advice}", style="bold", soft_wrap=False)
        if is_trained and search.scheduler != "pbt":
            say(f"paceline export {directory.trial(first.number)}")
            say("Or train it again:", style="bold", soft_wrap=False)
        say(result["best"]["command"])
    if not result["done"]:
        say(f"Continue with: paceline tune --resume --run-dir {directory.path}")
    say(f"search: {directory.path}; compare its trials: paceline runs --compare {directory.path}", style="dim")
    return code


def _print_schedule(console: Console, schedule: Sequence[Mapping[str, Any]]) -> None:
    """Print the values of the best trial and of those that it continues, by step."""
    from rich.table import Table

    table = Table("from step", "trial", *schedule[0]["parameters"])
    for part in schedule:
        values = (str(value) for value in part["parameters"].values())
        table.add_row(str(part["from_step"]), f"{part['trial']:05d}", *values)
    console.print(table)


def _print_status(quiet: bool, text: str) -> None:
    if not quiet:
        # Standard output is for the result.
        print(f"paceline: {text}", file=sys.stderr, flush=True)
