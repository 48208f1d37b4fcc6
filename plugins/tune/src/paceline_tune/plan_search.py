"""Planning of a search: profile the task, check the budget, and start the search."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.built_in import PARTS
from paceline.core.config import all_options, select
from paceline.core.errors import ConfigError, LaunchError, PacelineError, TaskError
from paceline.core.files import read_json_lines
from paceline.core.job import default_run_path
from paceline.core.options import Interval, check_bounds, flag, parse_best
from paceline.core.ownership import own_prefix
from paceline.core.plugins import import_object
from paceline.core.sockets import require_loopback
from paceline.core.standard_streams import discard
from paceline.core.task import Task
from paceline.core.task_loading import build_task, convert, field_type, load_task_class, parse_assignments, split_spec
from paceline.launch.launcher import Command, LaunchSpec
from paceline.launch.supervisor import RankStarter, SupervisedJob
from paceline.runs.directory import RunDirectory
from paceline_ray.cluster import import_ray, require_answer
from paceline_ray.node import cluster_command
from paceline_tune.history import MAX_FAILED, SearchHistory, describe_failure, describe_failures
from paceline_tune.sampler import import_optuna
from paceline_tune.search import CostEstimate, Search, SearchCost, SearchDirectory, show_seconds
from paceline_tune.space import FORMS, Dimension, Value

if TYPE_CHECKING:
    from paceline_tune.trial import TrialReport, TrialServer

# --- Profile a task for a few steps before a search ---
#
# It is a run with the first configuration's parameters in a temporary directory, stopped at its first evaluation. If
# that one fails or diverges, so will its trial in the search; the next configuration is profiled.


_STEPS = 4
_OUTSIDE = ("log_to", "backup_to")  # options that write outside of the run


@dataclass(frozen=True, kw_only=True)
class TaskProfile:
    """The results of profiling a task.

    Attributes:
        search: with its space resolved, and the length and the times of a trial.
        failures: why configurations that were tried before could not be trained.
        metrics: of the validation split, by name, after a few steps.
        best: the metric that the task itself recommends.
    """

    search: Search
    failures: tuple[str, ...]
    metrics: Mapping[str, float | None]
    best: str | None


def probe(search: Search) -> TaskProfile:
    """Profile the search's task, whose output is hidden: the standard output is for the result.

    Raises:
        UserError: the task, its fields or the options are wrong.
    """
    with tempfile.TemporaryDirectory(prefix=own_prefix("probe")) as name, _hidden_output():
        try:
            return _probe(search, Path(name))
        except PacelineError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(f"the task could not be run: {type(error).__name__}: {error}") from error


@contextmanager
def _hidden_output() -> Iterator[None]:
    """Hide what Python, native code and child processes print on the standard output."""
    sys.stdout.flush()
    saved = os.dup(1)
    try:
        discard(1)
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def _probe(search: Search, directory: Path) -> TaskProfile:
    from paceline_tune.trial import TrialServer

    if search.config.records.log_to:
        import_object(PARTS["--log-to"])(search.config.records.log_to)
    task_class = load_task_class(str(search.options["task"]))
    search = resolve_space(task_class, search)
    failures: list[str] = []
    report = None
    with closing(TrialServer()) as server:
        for number in range(0, min(MAX_FAILED * search.repeats, search.planned), search.repeats):
            run = RunDirectory(directory / f"probe-{number}")
            parameters = search.parameters(number)
            options = search.run_options(number, parameters)
            report, began_at, evaluated_at = _run_first_steps(server, options, run, directory / "stop")
            if report.state not in ("failed", "diverged", "waiting"):
                break
            failures.append(describe_failure(parameters, report.state, report.message or "the task was stopped"))
            report = None
    if report is None:
        raise TaskError(describe_failures(failures))
    if not report.metrics:
        raise ConfigError(
            f"{task_class.__name__} has no validation split, so trials cannot be compared. Split one off "
            "the training data with --val-fraction 0.1."
        )
    steps = [r for r in read_json_lines(run.metrics) if r["kind"] == "train"]
    step_s = statistics.median(max(rank["step_ms"] for rank in r["ranks"]) for r in steps[1:] or steps) / 1000
    evaluation_s = max(0.0, evaluated_at - steps[-1]["time"])
    start_s = max(0.0, steps[0]["time"] - max(rank["step_ms"] for rank in steps[0]["ranks"]) / 1000 - began_at)
    data = run.read_complete_manifest()["data"]
    config = run.read_complete_manifest()["config"]
    total = data.get("total_steps")
    every = search.config.evaluation.eval_every
    spacing = _steps_between(every, data.get("steps_per_epoch"), total)
    evaluations = _evaluations(every, config.get("epochs"), total, spacing)
    # Options that change the length of a trial make it unknown in advance.
    if {"epochs", "max_steps"} & set(search.searched_options):
        total = evaluations = None
    elif "global_batch_size" in search.searched_options and config.get("max_steps") is None:
        total, evaluations = None, evaluations if every.steps is None else None
    return TaskProfile(
        search=dataclasses.replace(
            search,
            total_steps=total,
            evaluations=evaluations,
            start_s=start_s,
            seconds_per_evaluation=step_s * (spacing or 0) + evaluation_s,
        ),
        failures=tuple(failures),
        metrics=report.metrics,
        best=config.get("best_metric") or task_class.defaults.best_metric,
    )


def _run_first_steps(
    server: TrialServer, options: Mapping[str, Any], run: RunDirectory, stop_file: Path
) -> tuple[TrialReport, float, float]:
    """Run a configuration to its first evaluation; return the report, and the Unix times of its begin and its end."""
    from paceline_tune.trial import RunningTrial, TrialCommand, TrialReport

    # Without trackers and backups, which would keep a run that is deleted after it was measured.
    first = {
        "run_dir": str(run.path),
        "eval_every": f"{_STEPS}steps",
        "checkpoint_every": ["never"],
        "log_every": 1,
    }
    kept = {name: value for name, value in options.items() if name not in _OUTSIDE}
    command = TrialCommand(options={**kept, **first}, iteration=0, step=0, stop_file=stop_file)
    try:
        trial = RunningTrial(server, command)
        began_at = time.time()
        try:
            return trial.next(), began_at, time.time()
        finally:
            trial.end()
    except (ConfigError, LaunchError) as error:
        failed = TrialReport(iteration=0, step=0, metrics={}, state="failed", message=str(error))
        return failed, time.time(), time.time()


def _steps_between(every: Interval, steps_per_epoch: int | None, total: int | None) -> int | None:
    steps = every.steps
    if steps is None and steps_per_epoch is not None:
        steps = (every.epochs or 1) * steps_per_epoch
    return min(steps, total) if steps is not None and total is not None else steps


def _evaluations(every: Interval, epochs: int | None, total: int | None, spacing: int | None) -> int | None:
    """Return the number of evaluations of a whole run, including the one at its end."""
    if total is not None and spacing is not None:
        return -(-total // spacing)
    return -(-epochs // every.epochs) if epochs is not None and every.epochs is not None else None


SEARCHABLE = select(lambda its: its.bits == "always" and its.scope in ("training", "data", "parallel"))
"""Options of a run that can be searched, except ``val_fraction``, which decides the data that trials compare by."""


def resolve_space(task_class: type[Task], search: Search) -> Search:
    """Return the search with its space resolved: whose dimensions those are, and the types of their choices.

    A name is a field of the task if there is one, else an option of the run.

    Raises:
        TaskError: a name is unknown, or does not accept such values.
        ConfigError: the space is empty, or a name is both set and searched.
    """
    space = search.space or task_class.defaults.search
    if not space:
        raise ConfigError(
            f"a search needs at least one field: --search {FORMS}. Or the task declares a search space: "
            'defaults = Defaults(search=("lr=log:1e-3:1",)).'
        )
    fixed = parse_assignments(search.config.processes.set)
    options = all_options()
    choices: dict[str, tuple[Value, ...]] = {}
    searched_options = []
    for dimension in dataclasses.replace(search, space=space).parsed_space.dimensions:
        name = dimension.name
        hint = field_type(task_class, name)
        if hint is not None:
            where = f"{task_class.__name__}.{name}"
            if name in fixed:
                raise ConfigError(f"{name} is both set by --set and searched. Remove one of them.")
        elif name in options:
            where, hint = flag(name), options[name].type
            _check_searched_option(search, dimension)
            searched_options.append(name)
        else:
            build_task(task_class, {name: dimension.values[0]})  # raises, with the names of the fields
            raise AssertionError(name)
        _check_kind(where, dimension, hint)
        values = dimension.values
        if dimension.kind == "choice" and typing.get_origin(hint) is not tuple:
            values = tuple(convert(value, hint, where) for value in values)
            if any(value in values[:index] for index, value in enumerate(values)):
                raise ConfigError(f"{flag('search')} {name}=choice: two of the choices are the same {where}.")
            # Lists and dicts stay text, which --set converts.
            if all(value is None or isinstance(value, bool | int | float | str) for value in values):
                choices[name] = values
        if name in searched_options:
            for value in values:
                check_bounds(name, value, options[name])
    resolved = dataclasses.replace(search, space=space, choices=choices, searched_options=tuple(searched_options))
    resolved.parameters(0)  # checks the constraints
    return resolved


def _check_searched_option(search: Search, dimension: Dimension) -> None:
    name = dimension.name
    if search.scheduler == "pbt":
        raise ConfigError(
            f"{flag(name)} cannot be searched with --scheduler pbt, which changes values while a member trains: "
            "options of a run stay. Search fields of the task."
        )
    if name not in SEARCHABLE or name == "val_fraction" or (name == "seed" and search.repeats > 1):
        raise ConfigError(
            f"{flag(name)} cannot be searched: it belongs to the search or the node, or decides what trials are "
            f"compared by. Options that can: {', '.join(n for n in SEARCHABLE if n != 'val_fraction')}."
        )
    if name in search.options:
        raise ConfigError(f"{name} is both set by {flag(name)} and searched. Remove one of them.")


def _check_kind(where: str, dimension: Dimension, hint: Any) -> None:
    """Check that a range is used for a number, and a range of floats not for an integer."""
    kinds = {hint, *typing.get_args(hint)}
    if dimension.kind == "choice" or Any in kinds or (float in kinds):
        return
    if dimension.kind in ("int", "log-int") and int in kinds:
        return
    name = getattr(hint, "__name__", str(hint))
    alternative = "int, log-int or choice" if int in kinds else "choice"
    raise TaskError(
        f"{flag('search')} {dimension.name}={dimension.kind}: {where} is {name}. Search it with {alternative}."
    )


# --- From a command to a search: profile the task, check the budget, start the driver in a Ray cluster ---


_CLUSTER_PREFIX = ".ray-"
_UNSUPPORTED_STRATEGIES = ("hogwild", "ps")


def check(search: Search) -> None:
    """Check the options of a search before anything is started."""
    config = search.config
    for name in ("trials", "grace_period", "perturbation_interval", "repeats"):
        if (value := getattr(search, name)) < 1:
            raise ConfigError(f"{flag(name)} must be at least 1, but is {value}.")
    if search.repeats > 1 and search.scheduler == "asha":
        raise ConfigError(
            "--repeats compares the means of whole trials, and ASHA would stop some of them. Leave --scheduler out."
        )
    if search.scheduler == "pbt":
        _check_population(search)
    if search.sampler == "tpe":
        import_optuna()
    if not search.reduction_factor > 1:
        raise ConfigError(f"--reduction-factor must be above 1, but is {search.reduction_factor:g}.")
    if search.cpus <= 0 or search.gpus < 0:
        raise ConfigError("--cpus-per-trial must be above 0, and --gpus-per-trial at least 0.")
    if config.processes.on not in ("auto", "inprocess", "spawn", "torchrun") or config.processes.nodes != (1, 1):
        raise ConfigError(
            "a trial runs on one node, which Ray chooses: leave --on and --nodes out. To use several nodes: "
            "paceline launch --on slurm --rank-launcher ray --nodes 4 -- paceline tune ..."
        )
    if config.evaluation.eval_every == Interval():
        raise ConfigError("--eval-every never: a search compares trials by their evaluations. Leave it out.")
    if any(method in _UNSUPPORTED_STRATEGIES for method in config.strategies):
        raise ConfigError(
            f"--strategy {config.parallel.strategy}: cannot be searched, since its ranks do not stop together at an "
            "evaluation."
        )
    if config.evaluation.early_stop is not None and search.scheduler == "asha":
        raise ConfigError(
            "--early-stop cannot be combined with ASHA, which stops trials by comparison. Use --scheduler none."
        )
    _ = search.parsed_space, search.mode, search.limit


def _check_population(search: Search) -> None:
    """Check the options of population-based training."""
    combined = {
        "--trials 1: a population has at least 2 members": search.trials < 2,
        "--sampler tpe: the members themselves choose their values": search.sampler == "tpe",
        "--repeats: each member has its own history": search.repeats > 1,
        "--stop: members are compared when all have got equally far": bool(search.stop),
        "--early-stop: members are compared when all have got equally far": search.config.evaluation.early_stop
        is not None,
        "--budget in trials: give it in hours": search.limit is not None and search.limit.unit == "trials",
    }
    for why, applies in combined.items():
        if applies:
            raise ConfigError(f"--scheduler pbt cannot be combined with {why}.")


def measure_search(search: Search, metric: str | None) -> tuple[Search, TaskProfile]:
    """Profile the task; return the search with the measured costs, and the profile.

    Args:
        metric: the requested metric; None: the metric that the task recommends, else the loss.

    Raises:
        ConfigError: the task cannot be searched.
    """
    profile = probe(search)
    metric = metric or profile.best or "loss:min"
    for name in (parse_best(metric)[0], *search.stop):
        if name not in profile.metrics:
            raise ConfigError(
                f"the task has no metric {name!r} on its validation split. It has: {', '.join(profile.metrics)}."
            )
    if search.scheduler == "pbt" and profile.search.evaluations is None:
        raise ConfigError("--scheduler pbt needs trials of a known number of evaluations. Give --max-steps.")
    options = {**search.options}
    if options.get("best_metric") is None and profile.best is None:
        options["best_metric"] = metric
    return dataclasses.replace(profile.search, options=options, metric=metric), profile


def estimate_search(search: Search, cpus: int) -> CostEstimate | None:
    """Estimate the costs of the search from the profile; None if the length of a trial is unknown.

    Args:
        cpus: shared by the trials.

    Raises:
        ConfigError: the budget is below one trial's costs.
    """
    limit, seconds = search.limit, search.seconds_per_evaluation or 0.0
    expected = search.estimate(search.start_s, seconds, concurrent=max(1, int(cpus // search.cpus)))
    if limit is not None and expected is not None and limit.used(expected.trial) > 1:
        raise ConfigError(
            f"--budget {search.budget} is less than the costs of one whole trial, about {limit.show(expected.trial)}. "
            "Increase it, or shorten trials (--epochs, --max-steps)."
        )
    return expected


def find_task(search: Search) -> Search:
    """Return a search that continues, with the directory in which its task's file is now.

    Raises:
        TaskError: it is neither where the search began nor here; every trial would fail.
    """
    module, _ = split_spec(str(search.options["task"]))
    if not module.endswith(".py"):
        return search
    for directory in (Path(search.workdir), Path.cwd()):
        if (directory / Path(module).expanduser()).is_file():
            return dataclasses.replace(search, workdir=str(directory))
    raise TaskError(
        f"task {search.options['task']!r}: there is no file {Path(search.workdir) / module}. Restore it, or continue "
        f"the search in a directory in which {module} is."
    )


def require_same(recorded: Search, requested: Search, directory: SearchDirectory, metric: str | None) -> None:
    """Refuse to continue a search with other settings; trials and budget may differ."""
    options = dict(recorded.options)
    if "best_metric" not in requested.options:
        options.pop("best_metric", None)  # chosen by the search itself
    names = {"space": "search", "constraints": "constraint", "cpus": "cpus-per-trial", "gpus": "gpus-per-trial"}
    fields = ["constraints", "sampler", "repeats", "scheduler", "grace_period", "reduction_factor", "stop"]
    fields += ["perturbation_interval", *(["trials"] if recorded.scheduler == "pbt" else [])]
    fields += ["cpus", "gpus", *(["space"] if requested.space else [])]  # without --search, it is the task's
    differing = [names.get(n, n) for n in fields if not _are_equal(getattr(recorded, n), getattr(requested, n))]
    differing += [
        name
        for name in sorted(options.keys() | requested.options.keys())
        if not _are_equal(options.get(name), requested.options.get(name))
    ]
    if metric not in (None, recorded.metric):
        differing.append("metric")
    if differing:
        raise ConfigError(
            f"--resume: {directory.path} contains a search that differs in {', '.join(map(flag, differing))}. "
            "Use the same options, or another --run-dir DIR; see its tune.json."
        )


def _are_equal(trial_time: object, other: object) -> bool:
    # JSON compares numbers by value: 4 and 4.0.
    return bool(json.loads(json.dumps(trial_time, default=list)) == json.loads(json.dumps(other, default=list)))


def estimate_rest(search: Search, history: SearchHistory, expected: CostEstimate | None) -> CostEstimate | None:
    """Estimate the costs of the trials of a search that have not ended, by those of the whole search."""
    trials = history.trials.values()
    left = search.planned - sum(trial.ended for trial in trials)
    if expected is None or not left:
        return expected
    done_s = sum(trial.seconds for trial in trials if not trial.ended)
    trials_s = max(0.0, expected.trials_s * left / search.planned - done_s)
    clock_s = max(trials_s / min(expected.concurrent, left), min(trials_s, expected.trial.seconds))
    cost = SearchCost(clock_s, left, trials_s / 3600 * search.gpus)
    return dataclasses.replace(expected, search=cost, trials_s=trials_s)


def describe(
    search: Search,
    expected: CostEstimate | None,
    *,
    here: bool,
    left: int | None = None,
    spent: SearchCost | None = None,
) -> str:
    """Describe the planned search in a sentence or two.

    Args:
        here: trials run on this machine, not in a cluster.
        left: number of trials that have not ended, if others have.
        spent: costs of earlier starts of the search.
    """
    trials = f"{search.planned} trials" if left is None else f"{left} of {search.planned} trials are left"
    if search.scheduler == "pbt":
        trials = f"a population of {search.trials} in {search.generations} generations: {trials}"
    if expected is None:
        return f"{trials}; their length is unknown in advance."
    trials = f"{trials} of" if left is None else f"{trials}, each of"
    plural = "s" if len(search.rungs) > 1 else ""
    evaluations = ", ".join(map(str, search.rungs))
    rungs = f", compared after evaluation{plural} {evaluations}" if search.rungs else ""
    cost = expected.search + (spent or SearchCost())
    budget = "" if search.limit is None else f" ({search.limit.show(cost)})"
    trial_time, search_time = show_seconds(expected.trial.seconds), show_seconds(expected.search.seconds)
    if not here:
        return (
            f"{trials} {search.evaluations} evaluations{rungs}: one takes about {trial_time} on this machine. "
            "The time of the search in the cluster is estimated after the first evaluation."
        )
    return (
        f"{trials} {search.evaluations} evaluations{rungs}, {expected.concurrent} at a time: one takes "
        f"about {trial_time}, all of them about {search_time}{budget}."
    )


def find_cluster(address: str | None) -> str | None:
    """Return the address (HOST:PORT) of the search's cluster, also by RAY_ADDRESS; None: a new one on this machine.

    Raises:
        ConfigError: it has another form, or this machine's processes cannot reach each other.
        LaunchError: no cluster answers there.
    """
    address = address or os.environ.get("RAY_ADDRESS") or None
    if address is not None:
        require_answer(address, "--ray-address")
    else:
        require_loopback()  # without it, Ray tries again and again
    return address


def run(
    search: Search,
    directory: SearchDirectory,
    *,
    address: str | None,
    cpus: int,
    quiet: bool,
    print_status: Callable[[str], None],
) -> int:
    """Run the search in the Ray cluster at ``address``, or in a new one on this machine; return the exit code.

    Raises:
        LaunchError: Ray is not installed.
    """
    import_ray()
    path = directory.path.absolute()
    driver = (sys.executable, "-P", "-m", "paceline_tune.run_search", str(path), *(("--quiet",) if quiet else ()))
    if address is not None:
        print_status(f"the Ray cluster at {address} runs the trials; all its nodes must share {path}.")
        return _start(Command(title="search", argv=driver, env={"RAY_ADDRESS": address}))
    # Use a directory for this cluster only: a killed command's cluster may still be ending.
    left_behind = list(path.glob(f"{_CLUSTER_PREFIX}*"))
    with tempfile.TemporaryDirectory(prefix=_CLUSTER_PREFIX, dir=path) as directory_of_cluster:
        spec = LaunchSpec(command=driver, name="tune", directory=Path(directory_of_cluster))
        argv = cluster_command(spec, driver, cpus=cpus, gpus=None if search.gpus else 0)
        code = _start(Command(title="a Ray cluster on this machine, with the search", argv=argv))
    if code == 0:  # the search had the lock all the time, so the commands that left these have ended
        for other in left_behind:
            shutil.rmtree(other, ignore_errors=True)
    return code


def _start(command: Command) -> int:
    return SupervisedJob((command,), starter=RankStarter(name="the search", says_why=True)).wait()


def own_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def default_directory(task: str) -> Path:
    """Return ``runs/tune-TASK-TIME``, which does not exist yet."""
    run = Path(default_run_path(task))
    return run.with_name(f"tune-{run.name}")
