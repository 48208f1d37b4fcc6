"""From a command to a search: try the task, check the budget, start the driver in a Ray cluster."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from paceline.config import flag, parse_best
from paceline.distributed.ray_cluster import import_ray, require_answer
from paceline.errors import ConfigError
from paceline.job import default_run_path
from paceline.launchers.attached import start_commands
from paceline.launchers.base import Command, JobSpec, Rendered
from paceline.launchers.local.supervision import Starter
from paceline.launchers.ray.node import cluster_command
from paceline.tuning.budget import Estimate, estimate, require_room, show_seconds
from paceline.tuning.probe import Facts, probe
from paceline.tuning.search import Search, SearchDirectory

_APART = ("hogwild", "ps")


def check(search: Search) -> None:
    """Refuse what cannot be searched, before anything is started.

    Raises:
        ConfigError: an option has a value that cannot work.
    """
    config = search.config
    for name, value in (("trials", search.trials), ("grace", search.grace)):
        if value < 1:
            raise ConfigError(f"--{name} must be at least 1, but is {value}.")
    if not search.reduction_factor > 1:
        raise ConfigError(f"--reduction-factor must be above 1, but is {search.reduction_factor:g}.")
    if search.cpus <= 0 or search.gpus < 0:
        raise ConfigError("--cpus-per-trial must be above 0, and --gpus-per-trial not below.")
    if config.on not in ("auto", "inprocess", "spawn", "torchrun") or config.nodes not in (1, "1"):
        raise ConfigError(
            "a trial runs on one machine, and Ray chooses which: leave --on and --nodes out. For several "
            "machines: paceline launch --on slurm --inner ray --nodes 4 -- paceline tune ..."
        )
    if config.val_fraction is None and config.eval_every == "never":
        raise ConfigError("--eval-every never: trials are compared by evaluations. Leave it out.")
    if any(method in _APART for method in config.methods):
        raise ConfigError(f"--strategy {config.strategy}: its ranks do not stop at an evaluation together.")
    if config.early_stop is not None and search.scheduler == "asha":
        raise ConfigError("--early-stop ends trials by themselves; ASHA compares them. Use --scheduler none.")
    _ = search.parsed_space, search.mode, search.limit


def measured(search: Search, metric: str | None) -> tuple[Search, Facts]:
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
                f"the task has no metric {name!r} on its validation split. It has: "
                f"{', '.join(facts.metrics)}."
            )
    options = {**search.options}
    if options.get("best") is None and facts.best is None:
        options["best"] = metric
    return dataclasses.replace(
        search,
        options=options,
        metric=metric,
        evaluations=facts.evaluations,
        total_steps=facts.total_steps,
        seconds_per_evaluation=facts.seconds_per_evaluation,
    ), facts


def estimated(search: Search, cpus: int) -> Estimate | None:
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
    if "best" not in asked.options:
        options.pop("best", None)  # the search's own
    names = {"space": "search", "cpus": "cpus-per-trial", "gpus": "gpus-per-trial"}
    fields = ("space", "scheduler", "grace", "reduction_factor", "stop", "cpus", "gpus")
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
            "Give what it was begun with, or another --run DIR; see its tune.json."
        )


def _alike(one: object, other: object) -> bool:
    """Whether they are the same once they are read from JSON."""
    # A number compares as one, however it is written: 4 and 4.0.
    return bool(json.loads(json.dumps(one, default=list)) == json.loads(json.dumps(other, default=list)))


def describe(search: Search, expected: Estimate | None, *, here: bool) -> str:
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
    driver = (sys.executable, "-m", "paceline.tuning.driver", str(path), *(("--quiet",) if quiet else ()))
    if address is not None:
        say(f"the Ray cluster at {address} runs the trials; {path} must be a directory that it shares.")
        command = Command(title="the search", argv=driver, env={"RAY_ADDRESS": address})
        return _start(JobSpec(command=driver, name="tune", directory=path), command)
    # A cluster's files are its own: one whose command was killed may still be ending beside this one.
    with tempfile.TemporaryDirectory(prefix=".ray-", dir=path) as own:
        spec = JobSpec(command=driver, name="tune", directory=Path(own))
        argv = cluster_command(spec, driver, cpus=cpus, gpus=None if search.gpus else 0)
        return _start(spec, Command(title="a Ray cluster on this machine, and the search in it", argv=argv))


def _start(spec: JobSpec, command: Command) -> int:
    rendered = Rendered(spec=spec, commands=(command,))
    return start_commands(rendered, Starter(name="the search", says_why=True)).wait()


def own_cpus() -> int:
    """How many CPUs this process may use."""
    return len(os.sched_getaffinity(0))


def default_directory(task: str) -> Path:
    """``runs/tune-TASK-TIME``, which is not there yet."""
    run = Path(default_run_path(task))
    return run.with_name(f"tune-{run.name}")
