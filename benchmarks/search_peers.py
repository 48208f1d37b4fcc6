"""Searches as people write them without Paceline: ``python -m benchmarks.search_peers optuna|ray JSON``.

Each trains the task's model in a plain loop, on one thread, with the same space, sampler (TPE) and number of steps, and
stops trials early by successive halving; as many trials at a time as there are CPUs. It prints a line of JSON: the best
value and the number of steps.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from paceline.core.parent_death import die_with_parent
from paceline_ray.cluster import private_directory
from paceline_tune.plan_search import own_cpus

_REDUCTION = 4


@dataclass(frozen=True, kw_only=True)
class SearchJob:
    """What is searched.

    Attributes:
        task: a built-in task, which declares its space.
        metric: of the task.
        mode: "min" or "max".
        trials: number of configurations.
        steps: of a whole trial.
        every: steps between evaluations.
        seed: of the sampler, the weights and the order of the data.
    """

    task: str
    metric: str
    mode: str
    trials: int
    steps: int
    every: int
    seed: int


def ask(job: SearchJob, trial: Any) -> dict[str, Any]:
    """Ask a trial of Optuna's for the parameters of the task's space."""
    from paceline.core.task_loading import load_task_class
    from paceline_tune.space import parse_space

    parameters: dict[str, Any] = {}
    for dimension in parse_space(load_task_class(job.task).defaults.search, 0).dimensions:
        low, high = dimension.bounds
        is_log = dimension.kind.startswith("log")
        if dimension.kind in ("int", "log-int"):
            parameters[dimension.name] = trial.suggest_int(dimension.name, int(low), int(high), log=is_log)
        else:
            parameters[dimension.name] = trial.suggest_float(dimension.name, low, high, log=is_log)
    return parameters


def train(job: SearchJob, parameters: dict[str, Any]) -> Iterator[tuple[int, float]]:
    """Train in a plain loop; yield steps and metric after each evaluation."""
    import torch
    from torch.utils.data import TensorDataset, random_split

    from paceline.core.task_loading import build_task, load_task_class

    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    task = build_task(load_task_class(job.task), parameters)
    dataset, held_out = task.build_dataset("train"), task.build_dataset("val")
    if held_out is None:
        held_out, dataset = random_split(dataset, (0.1, 0.9))
    model = task.build_model()
    optimizer: Any = task.build_optimizer(model)
    scheduler = task.build_scheduler(optimizer, job.steps)
    size = task.defaults.global_batch_size or 64

    def batches(of: Any, order: Any) -> Iterator[list[torch.Tensor]]:
        if not isinstance(of, TensorDataset):
            of, order = of.dataset, torch.as_tensor(of.indices)[order]
        for indices in order.split(size):
            yield [tensor[indices] for tensor in of.tensors]

    step = 0
    while step < job.steps:
        for batch in batches(dataset, torch.randperm(len(dataset))):
            if len(batch[0]) < size or step == job.steps:
                break
            model.train()
            optimizer.zero_grad()
            loss: Any = task.loss(model, batch)
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            if step % job.every == 0 or step == job.steps:
                model.eval()
                with torch.no_grad():
                    parts = [task.metrics(model, b)[job.metric] for b in batches(held_out, torch.arange(len(held_out)))]
                yield step, float(torch.cat(parts).mean())


def search_with_optuna(job: SearchJob, directory: Path) -> tuple[float, int]:
    """Search with Optuna alone, by processes that share its journal; return value and steps."""
    path, context = str(directory / "optuna.log"), multiprocessing.get_context("spawn")
    workers = [context.Process(target=_work, args=(job, path, os.getpid(), n)) for n in range(own_cpus())]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise SystemExit(1)
    trials = [trial for trial in _study(job, path, 0).trials if trial.intermediate_values]
    best = max if job.mode == "max" else min
    return (
        best(value for trial in trials for value in trial.intermediate_values.values()),
        sum(max(trial.intermediate_values) for trial in trials) * job.every,
    )


def _study(job: SearchJob, path: str, worker: int) -> Any:
    import optuna
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(
        study_name="search",
        storage=optuna.storages.JournalStorage(JournalFileBackend(path)),
        sampler=optuna.samplers.TPESampler(seed=job.seed + 1000 * worker, constant_liar=True),
        pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=_REDUCTION),
        direction="maximize" if job.mode == "max" else "minimize",
        load_if_exists=True,
    )


def _work(job: SearchJob, path: str, parent: int, worker: int) -> None:
    die_with_parent(parent=parent)
    import optuna

    def objective(trial: Any) -> float:
        value = 0.0
        for step, value in train(job, ask(job, trial)):
            trial.report(value, -(-step // job.every))
            if step < job.steps and trial.should_prune():
                raise optuna.TrialPruned
        return value

    states = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
    stop = optuna.study.MaxTrialsCallback(job.trials - own_cpus() + 1, states=states)
    _study(job, path, worker).optimize(objective, callbacks=[stop])


def _ask_nothing_else(job: SearchJob, trial: Any) -> None:
    """Ask for the parameters; a returned dict would hold constants. Tune pickles this function."""
    ask(job, trial)


def search_with_ray(job: SearchJob, directory: Path) -> tuple[float, int]:
    """Search with Ray Tune alone, by OptunaSearch and ASHA; return value and steps."""
    with ExitStack() as stack:
        import ray
        from ray import tune
        from ray.tune.schedulers import ASHAScheduler
        from ray.tune.search import ConcurrencyLimiter
        from ray.tune.search.optuna import OptunaSearch

        ray.init(
            num_cpus=own_cpus(),
            include_dashboard=False,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(stack.enter_context(private_directory())),
        )
        stack.callback(ray.shutdown)

        def trainable(config: dict[str, Any]) -> None:
            for step, value in train(job, config):
                tune.report({"value": value, "iteration": -(-step // job.every), "step": step})

        limited = ConcurrencyLimiter(
            OptunaSearch(partial(_ask_nothing_else, job), metric="value", mode=job.mode, seed=job.seed),
            max_concurrent=own_cpus(),
        )
        scheduler = ASHAScheduler(
            time_attr="iteration",
            metric="value",
            mode=job.mode,
            max_t=-(-job.steps // job.every),
            grace_period=1,
            reduction_factor=_REDUCTION,
        )
        tuner = tune.Tuner(
            trainable,
            tune_config=tune.TuneConfig(num_samples=job.trials, search_alg=limited, scheduler=scheduler),
            run_config=tune.RunConfig(storage_path=str(directory), verbose=0),
        )
        results = [result for result in tuner.fit() if result.metrics_dataframe is not None]
        best: Callable[[Sequence[float]], float] = max if job.mode == "max" else min
        values = [best(list(result.metrics_dataframe["value"])) for result in results]
        return best(values), sum(int(result.metrics["step"]) for result in results)


def main(argv: Sequence[str]) -> int:
    """Search, and print what was found."""
    peers = {"optuna": search_with_optuna, "ray": search_with_ray}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        value, steps = peers[argv[0]](SearchJob(**json.loads(argv[1])), Path(name))
    print(json.dumps({"value": value, "steps": steps}))
    return 0


def command(peer: str, job: SearchJob) -> list[str]:
    """Return the command of a peer's search."""
    return [sys.executable, "-m", "benchmarks.search_peers", peer, json.dumps(asdict(job))]


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.exit(code)
