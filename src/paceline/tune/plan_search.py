"""Measures what a trial costs, and starts the search."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError, PacelineError, TaskError
from paceline.core.files import read_json_lines
from paceline.core.job import default_run_path
from paceline.core.options import Interval, flag, parse_best, parse_interval
from paceline.core.parent_death import kill_with_parent_command
from paceline.core.task import Task
from paceline.core.task_loading import build_task, load_task_class, parse_assignments
from paceline.launch.launcher import Command, LaunchSpec
from paceline.launch.ray_cluster import import_ray, require_answer
from paceline.launch.ray_node import cluster_command
from paceline.launch.supervisor import RankStarter, SupervisedJob
from paceline.runs.directory import RunDirectory
from paceline.tune.search import (
    CostEstimate,
    Dimension,
    Search,
    SearchDirectory,
    estimate,
    require_room,
    show_seconds,
)

# --- Tries a task for some steps before a search: ``python -m paceline.tune.plan_search FILE`` ---
#
# It says, as a line of JSON, what the task's metrics are, how long a trial goes on, and what its steps and
# evaluations take here; or what is wrong. It is a run like any other, in a directory that goes away again,
# with the first trial's parameters; it is stopped at its first evaluation.


_STEPS = 4
_TRIES = 4


@dataclass(frozen=True, kw_only=True)
class TaskProfile:
    """What was found out.

    Attributes:
        metrics: of the validation split, by name, after some steps.
        best: the metric that the task itself recommends.
        total_steps: of a trial; None for a stream trained by epochs.
        evaluations: of a trial; None where nobody knows.
        step_s: seconds of a step.
        evaluation_s: seconds of an evaluation.
        seconds_per_evaluation: with the steps before it.
    """

    metrics: Mapping[str, float | None]
    best: str | None
    total_steps: int | None
    evaluations: int | None
    step_s: float
    evaluation_s: float
    seconds_per_evaluation: float


def probe(search: Search) -> TaskProfile:
    """Try the search's task, in a process of its own.

    Raises:
        ConfigError: something is wrong with the task, its fields or the options.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-probe-", dir="/tmp") as name:
        directory = SearchDirectory(Path(name))
        directory.write(search)
        done = subprocess.run(
            kill_with_parent_command([sys.executable, "-m", "paceline.tune.plan_search", name]),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    said = done.stdout.strip().splitlines()
    try:
        document = json.loads(said[-1]) if said else {}
    except ValueError:
        document = {}
    if "error" in document:
        raise ConfigError(document["error"])
    if done.returncode or not document:
        raise ConfigError(
            f"the task could not be tried: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}"
        )
    return TaskProfile(**document)


def main(argv: Sequence[str]) -> int:
    """Print what was found out."""
    directory = SearchDirectory(Path(argv[0]))
    try:
        facts = _probe(directory.read(), directory)
    except PacelineError as error:
        print(json.dumps({"error": str(error)}))
        return error.exit_code
    print(json.dumps(asdict(facts)))
    return 0


def _probe(search: Search, directory: SearchDirectory) -> TaskProfile:
    from paceline.tune.trial import RunningTrial, TrialCommand, TrialServer

    task_class = load_task_class(str(search.options["task"]))
    task = check_fields(task_class, search)
    with closing(TrialServer()) as server:
        # One that diverges at once is a trial like any other; if several do, something is wrong.
        for number in range(min(_TRIES, search.planned)):
            run = RunDirectory(directory.path / f"probe-{number}")
            options = {
                **search.trial_options(number, directory),
                "run_dir": str(run.path),
                "eval_every": f"{_STEPS}steps",
                "checkpoint_every": ["never"],
                "log_every": 1,
            }
            trial = RunningTrial(server, TrialCommand(options=options, iteration=0, step=0, stop_file=directory.stop))
            try:
                told = trial.next()
            finally:
                asked = time.time()
                trial.end()
            if told.state != "diverged":
                break
    if told.state in ("failed", "diverged", "waiting"):
        raise TaskError(f"{told.message or 'the task was stopped'} (tried with {', '.join(options['set'])})")
    if not told.metrics:
        raise ConfigError(
            f"{task_class.__name__} has no validation split, so trials cannot be compared. Carve one out of "
            "the training data with --val-fraction 0.1."
        )
    steps = [r for r in read_json_lines(run.metrics) if r["kind"] == "train"]
    step_s = statistics.median(max(rank["step_ms"] for rank in r["ranks"]) for r in steps[1:] or steps) / 1000
    evaluation_s = max(0.0, asked - steps[-1]["time"])
    data = run.read_complete_manifest()["data"]
    config = run.read_complete_manifest()["config"]
    total = data.get("total_steps")
    every = parse_interval(search.config.eval_every, "eval_every", allow_time=False)
    spacing = _steps_between(every, data.get("steps_per_epoch"), total)
    evaluations = _evaluations(every, config.get("epochs"), total, spacing)
    return TaskProfile(
        metrics=told.metrics,
        best=config.get("best_metric") or task.defaults.best_metric,
        total_steps=total,
        evaluations=evaluations,
        step_s=step_s,
        evaluation_s=evaluation_s,
        seconds_per_evaluation=step_s * (spacing or 0) + evaluation_s,
    )


def _steps_between(every: Interval, steps_per_epoch: int | None, total: int | None) -> int | None:
    """Steps from one evaluation to the next."""
    if every == Interval():
        raise ConfigError("--eval-every never: trials are compared by evaluations. Leave it out.")
    steps = every.steps
    if steps is None and steps_per_epoch is not None:
        steps = (every.epochs or 1) * steps_per_epoch
    return min(steps, total) if steps is not None and total is not None else steps


def _evaluations(every: Interval, epochs: int | None, total: int | None, spacing: int | None) -> int | None:
    """Of a whole run; there is one at its end, too."""
    if total is not None and spacing is not None:
        return -(-total // spacing)
    return -(-epochs // every.epochs) if epochs is not None and every.epochs is not None else None


def check_fields(task_class: type[Task], search: Search) -> Task:
    """Hold the space against the task's fields; return the first trial's task.

    Raises:
        TaskError: a field is unknown, or cannot have such values.
        ConfigError: a field is both set and searched.
    """
    fixed = parse_assignments(search.config.set)
    hints = typing.get_type_hints(task_class)
    known = {f.name for f in dataclasses.fields(task_class) if f.init}
    for dimension in search.parsed_space.dimensions:
        name = dimension.field
        if name in fixed:
            raise ConfigError(f"{name} is both given by --set and searched. Leave one of them out.")
        if name in known:
            _check_kind(task_class, dimension, hints[name])
        for value in dimension.values:
            build_task(task_class, {**fixed, name: str(value)})
    return build_task(task_class, {**fixed, **search.parsed_space.parameters(0)})


def _check_kind(task_class: type[Task], dimension: Dimension, hint: Any) -> None:
    """A range is for a number, and one of fractions not for a whole number."""
    kinds = {hint, *typing.get_args(hint)}
    if dimension.kind == "choice" or Any in kinds or (float in kinds):
        return
    if dimension.kind == "int" and int in kinds:
        return
    name = getattr(hint, "__name__", str(hint))
    instead = "int or choice" if int in kinds else "choice"
    raise TaskError(
        f"{flag('search')} {dimension.field}={dimension.kind}: {task_class.__name__}.{dimension.field} is "
        f"{name}. Search it with {instead}."
    )


# --- From a command to a search: try the task, check the budget, start the driver in a Ray cluster ---


_APART = ("hogwild", "ps")


def check(search: Search) -> None:
    """Refuse what cannot be searched, before anything is started.

    Raises:
        ConfigError: an option has a value that cannot work.
    """
    config = search.config
    for name, value in (("trials", search.trials), ("grace_period", search.grace_period)):
        if value < 1:
            raise ConfigError(f"--{name} must be at least 1, but is {value}.")
    if not search.reduction_factor > 1:
        raise ConfigError(f"--reduction-factor must be above 1, but is {search.reduction_factor:g}.")
    if search.cpus <= 0 or search.gpus < 0:
        raise ConfigError("--cpus-per-trial must be above 0, and --gpus-per-trial not below.")
    if config.on not in ("auto", "inprocess", "spawn", "torchrun") or config.nodes not in (1, "1"):
        raise ConfigError(
            "a trial runs on one machine, and Ray chooses which: leave --on and --nodes out. For several "
            "machines: paceline launch --on slurm --rank-launcher ray --nodes 4 -- paceline tune ..."
        )
    if config.val_fraction is None and config.eval_every == "never":
        raise ConfigError("--eval-every never: trials are compared by evaluations. Leave it out.")
    if any(method in _APART for method in config.strategies):
        raise ConfigError(f"--strategy {config.strategy}: its ranks do not stop at an evaluation together.")
    if config.early_stop is not None and search.scheduler == "asha":
        raise ConfigError("--early-stop ends trials by themselves; ASHA compares them. Use --scheduler none.")
    _ = search.parsed_space, search.mode, search.limit


def measure_search(search: Search, metric: str | None) -> tuple[Search, TaskProfile]:
    """Try the task for some steps; return the search with what it takes, and what was found out.

    Args:
        search: what was asked for.
        metric: the metric that was asked for; None: the one that the task recommends, else the loss.

    Raises:
        ConfigError: the task cannot be searched so.
    """
    facts = probe(search)
    metric = metric or facts.best or "loss:min"
    for name in (parse_best(metric)[0], *search.stop):
        if name not in facts.metrics:
            raise ConfigError(
                f"the task has no metric {name!r} on its validation split. It has: {', '.join(facts.metrics)}."
            )
    options = {**search.options}
    if options.get("best_metric") is None and facts.best is None:
        options["best_metric"] = metric
    return dataclasses.replace(
        search,
        options=options,
        metric=metric,
        evaluations=facts.evaluations,
        total_steps=facts.total_steps,
        seconds_per_evaluation=facts.seconds_per_evaluation,
    ), facts


def estimate_search(search: Search, cpus: int) -> CostEstimate | None:
    """What the search takes, by what was measured here; None where a trial's length is not known.

    Args:
        search: after :func:`measured`.
        cpus: that trials share.

    Raises:
        ConfigError: the budget is below one trial's cost.
    """
    if search.evaluations is None or search.seconds_per_evaluation is None:
        return None
    expected = estimate(
        evaluations=search.evaluations,
        seconds_per_evaluation=search.seconds_per_evaluation,
        trials=search.planned,
        rungs=search.rungs,
        reduction=search.reduction_factor,
        concurrent=max(1, int(cpus // search.cpus)),
        gpus_per_trial=search.gpus,
    )
    if search.limit is not None and search.budget is not None:
        require_room(search.limit, expected, search.budget)
    return expected


def require_same(there: Search, asked: Search, directory: SearchDirectory, metric: str | None) -> None:
    """Refuse to go on with another search than was asked for; trials and budget may differ.

    Args:
        there: the search that was begun.
        asked: what the command says.
        directory: where it was begun.
        metric: what the command says of the metric; None: nothing.

    Raises:
        ConfigError: they differ.
    """
    options = dict(there.options)
    if "best_metric" not in asked.options:
        options.pop("best_metric", None)  # the search's own
    names = {"space": "search", "cpus": "cpus-per-trial", "gpus": "gpus-per-trial"}
    fields = ("space", "scheduler", "grace_period", "reduction_factor", "stop", "cpus", "gpus")
    differing = [names.get(n, n) for n in fields if not _alike(getattr(there, n), getattr(asked, n))]
    differing += [
        name
        for name in sorted(options.keys() | asked.options.keys())
        if not _alike(options.get(name), asked.options.get(name))
    ]
    if metric not in (None, there.metric):
        differing.append("metric")
    if differing:
        raise ConfigError(
            f"--resume: {directory.path} holds a search that differs in {', '.join(map(flag, differing))}. "
            "Give what it was begun with, or another --run-dir DIR; see its tune.json."
        )


def _alike(one: object, other: object) -> bool:
    """Whether they are the same once they are read from JSON."""
    # A number compares as one, however it is written: 4 and 4.0.
    return bool(json.loads(json.dumps(one, default=list)) == json.loads(json.dumps(other, default=list)))


def describe(search: Search, expected: CostEstimate | None, *, here: bool) -> str:
    """What is going to happen, in a sentence or two.

    Args:
        search: after :func:`measured`.
        expected: what it takes, by this machine.
        here: trials run on this machine, not in a cluster.
    """
    trials = f"{search.planned} trials"
    if expected is None:
        return f"{trials}; how long each takes nobody knows before it ends."
    several = "s" if len(search.rungs) > 1 else ""
    after = ", ".join(map(str, search.rungs))
    rungs = f", compared after evaluation{several} {after}" if search.rungs else ""
    budget = "" if search.limit is None else f" ({search.limit.show(expected.search)})"
    one, whole = show_seconds(expected.trial.seconds), show_seconds(expected.search.seconds)
    if not here:
        return (
            f"{trials} of {search.evaluations} evaluations{rungs}: one takes about {one}, as tried on this "
            "machine. How long all of them take in the cluster is said after the first evaluation."
        )
    return (
        f"{trials} of {search.evaluations} evaluations{rungs}, {expected.concurrent} at a time: one takes "
        f"about {one}, all of them about {whole}{budget}."
    )


def find_cluster(address: str | None) -> str | None:
    """The address of the cluster in which the search is to run; None: one of its own, here.

    Args:
        address: that was given, as HOST:PORT; default: RAY_ADDRESS.

    Raises:
        ConfigError: it has another form.
        LaunchError: nothing answers there.
    """
    address = address or os.environ.get("RAY_ADDRESS") or None
    if address is not None:
        require_answer(address, "--ray-address")
    return address


def run(
    search: Search,
    directory: SearchDirectory,
    *,
    address: str | None,
    cpus: int,
    quiet: bool,
    say: Callable[[str], None],
) -> int:
    """Search, in the Ray cluster at ``address`` or in one of its own on this machine; return the exit code.

    Raises:
        LaunchError: Ray is not installed.
    """
    import_ray()
    path = directory.path.absolute()
    driver = (sys.executable, "-m", "paceline.tune.run_search", str(path), *(("--quiet",) if quiet else ()))
    if address is not None:
        say(f"the Ray cluster at {address} runs the trials; {path} must be a directory that it shares.")
        return _start(Command(title="the search", argv=driver, env={"RAY_ADDRESS": address}))
    # A cluster's files are its own: one whose command was killed may still be ending beside this one.
    with tempfile.TemporaryDirectory(prefix=".ray-", dir=path) as own:
        spec = LaunchSpec(command=driver, name="tune", directory=Path(own))
        argv = cluster_command(spec, driver, cpus=cpus, gpus=None if search.gpus else 0)
        return _start(Command(title="a Ray cluster on this machine, and the search in it", argv=argv))


def _start(command: Command) -> int:
    return SupervisedJob((command,), starter=RankStarter(name="the search", says_why=True)).wait()


def own_cpus() -> int:
    """How many CPUs this process may use."""
    return len(os.sched_getaffinity(0))


def default_directory(task: str) -> Path:
    """``runs/tune-TASK-TIME``, which is not there yet."""
    run = Path(default_run_path(task))
    return run.with_name(f"tune-{run.name}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
