"""Searches in the Ray cluster that RAY_ADDRESS names: ``python -m paceline.tuning.driver DIRECTORY``.

Ray Tune places the trials and ASHA ends them early; what is known of them is in the search's own journal, and
nothing that Tune writes is ever read: it is made of pickles.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING

from paceline.distributed.process import STOP_SIGNALS, StopRequests, signals_handled
from paceline.distributed.ray_cluster import connect, import_ray
from paceline.errors import LaunchError, PacelineError, RunDirectoryError
from paceline.tuning.charts import draw
from paceline.tuning.conclusion import write_result
from paceline.tuning.journal import Journal
from paceline.tuning.search import Search, SearchDirectory
from paceline.tuning.tensorboard import write_hparams

if TYPE_CHECKING:
    from paceline.tuning.observer import Observer

_MOST_FAILURES = 3
# Tune's own output, loggers and handlers; ours take their place.
_TUNE = {
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "TUNE_GLOBAL_CHECKPOINT_S": "600",
    "TUNE_MAX_PENDING_TRIALS_PG": "16",
    "RAY_NUM_REDIS_GET_RETRIES": "5",
    "RAY_AIR_NEW_OUTPUT": "0",
}


def main(argv: Sequence[str]) -> int:
    """Search; return the exit code.

    It is 0 once all trials have ended well, 75 or 130 if the search was stopped, and 1 where a trial failed,
    or none has a value of the metric.
    """
    parser = argparse.ArgumentParser(prog="python -m paceline.tuning.driver", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--quiet", action="store_true")
    options = parser.parse_args(argv)
    directory = SearchDirectory(options.directory)
    os.environ.update({name: value for name, value in _TUNE.items() if name not in os.environ})
    try:
        with ExitStack() as stack:
            stack.enter_context(directory.locked())
            search = directory.read()
            ray = import_ray()
            connect(ray, os.environ["RAY_ADDRESS"], "--ray-address")
            stack.callback(ray.shutdown)
            return _search(ray, search, directory, quiet=options.quiet)
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return error.exit_code


def unfinished(search: Search, journal: Journal) -> list[int]:
    """The trials that are to run: those that have begun and not ended, then those that have not begun."""
    there = [n for n, trial in journal.trials.items() if not trial.ended]
    return [*sorted(there), *(n for n in range(search.planned) if n not in journal.trials)]


def _search(ray: ModuleType, search: Search, directory: SearchDirectory, *, quiet: bool) -> int:
    from paceline.tuning.observer import Observer

    require_room(ray, search)
    directory.stop.unlink(missing_ok=True)
    journal = Journal(directory.journal)
    numbers = unfinished(search, journal)
    asked: list[int] = []
    requests = StopRequests()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if requests.hear(number) == "end":
            raise SystemExit(128 + number)
        asked.append(number)
        directory.stop.touch()

    observer = Observer(ray, search, directory, journal, quiet=quiet)
    try:
        with signals_handled(STOP_SIGNALS, on_signal), observer:
            observer.turn()
            if numbers and not observer.closed:
                _tune(search, directory, journal, numbers, observer)
    finally:
        journal.close()
    directory.stop.unlink(missing_ok=True)
    trials = [journal.trial(number) for number in range(search.planned)]
    done = all(trial.ended for trial in trials)
    try:
        write_result(search, directory, journal, done=done)
        write_hparams(search, directory, journal)
        draw(search, journal, directory.path)
    except OSError as error:
        raise RunDirectoryError(
            f"cannot write to {directory.path}: {error.strerror}. Make room, then go on with: paceline tune "
            f"--resume --run {directory.path}. What had ended is not run again."
        ) from error
    except LaunchError as error:
        observer.say(str(error))
    if asked:
        return 130 if asked[0] == signal.SIGINT else 75
    if not done and not observer.spent:
        raise LaunchError(
            f"{sum(not t.ended for t in trials)} trials did not end: "
            f"{observer.failure or 'Ray gave them up'}. Go on with: paceline tune --resume --run "
            f"{directory.path}"
        )
    if (done or observer.spent) and journal.best(search.metric_name, search.mode) is None:
        return 1
    return 1 if any(trial.state == "failed" for trial in trials) else 0


def require_room(ray: ModuleType, search: Search) -> None:
    """Refuse trials that no machine of the cluster has room for.

    Raises:
        LaunchError: they would wait for ever.
    """
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(m.get("CPU", 0) >= search.cpus and m.get("GPU", 0) >= search.gpus for m in machines):
        has = ", ".join(f"{m.get('CPU', 0):g} CPUs and {m.get('GPU', 0):g} GPUs" for m in machines)
        raise LaunchError(
            f"no machine has room for a trial of {search.cpus:g} CPUs and {search.gpus:g} GPUs; the cluster "
            f"has {has}. Give less: --cpus-per-trial, --gpus-per-trial."
        )


def _tune(
    search: Search,
    directory: SearchDirectory,
    journal: Journal,
    numbers: Sequence[int],
    observer: Observer,
) -> None:
    from ray import tune

    from paceline.tuning.trainable import TrialRun
    from paceline.tuning.trials import Trials, make_scheduler

    # It misses the files that its own loggers would have written.
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    observer.scheduler = make_scheduler(search, journal.results)
    with tempfile.TemporaryDirectory(prefix="paceline-tune-", dir="/tmp", ignore_cleanup_errors=True) as own:
        try:
            # Not tune.Tuner, which pickles all that it is given.
            tune.run(
                TrialRun,
                name="search",
                storage_path=own,
                num_samples=len(numbers),
                search_alg=Trials(search, directory, journal, numbers, lambda: observer.closed),
                scheduler=observer.scheduler,
                resources_per_trial={"cpu": search.cpus, **({"gpu": search.gpus} if search.gpus else {})},
                reuse_actors=True,
                max_failures=_MOST_FAILURES,
                raise_on_failed_trial=False,
                callbacks=[observer.callback],
                verbose=0,
            )
        except (tune.TuneError, RuntimeError) as error:
            raise LaunchError(f"Ray Tune ended: {str(error).strip().splitlines()[-1]}") from error


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.exit(code)
