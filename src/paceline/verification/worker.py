"""A rank of a group that trains one run after another: ``python -m paceline.verification.worker PLAN.json``.

A process takes seconds to start, so a group stays for all runs on its number of processes. Each run is begun
as by every launcher (:func:`paceline.worker.run`), in a world of its own.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.state import model_sha256
from paceline.config import RunConfig, config_from_mapping
from paceline.distributed.environment import Environment, detect_environment
from paceline.distributed.process import dump_stacks_on_signal, read_failure, record_failure
from paceline.errors import StopRequested
from paceline.job import Job
from paceline.run_directory import write_atomically
from paceline.task import Task, TaskReference, parse_assignments
from paceline.training.automatic import memory_of_process
from paceline.training.control import StopSignals
from paceline.training.pins import configure_numerics, numerics_kept
from paceline.training.preparation import Request, prepare
from paceline.verification.lint.all import lint
from paceline.verification.plan import (
    Plan,
    Training,
    directory_of,
    done_path,
    forward_path,
    is_done,
    lints_path,
    outcome_path,
    tensors_path,
    trace_path,
)
from paceline.verification.simulation import load_simulation
from paceline.verification.store import Reference, ReferenceWriter
from paceline.verification.watching import Watch, watched
from paceline.worker import run

_OTHERS_S = 120.0
_POLL_S = 0.02

_log = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    """Do what the plan says; return the exit code: 0 whatever becomes of the runs, 130 or 75 when stopped."""
    dump_stacks_on_signal()
    plan = Plan.read(Path(argv[0]))
    environment = detect_environment()
    root = Path(plan.root)
    reference = TaskReference(plan.task, parse_assignments(plan.set))
    if plan.lint:
        _lint(plan, reference.load())
    for training in plan.trainings:
        task = reference.load()  # anew: a task may keep what it has built
        directory = directory_of(root, training)
        outcome_path(root, training).parent.mkdir(exist_ok=True)
        try:
            if training.simulation is None:
                _train(plan, training, task, environment)
            else:
                _simulate(plan, training, task)
        except StopRequested as stopped:
            return stopped.exit_code
        except Exception as error:
            _log.debug("%s failed", training.name, exc_info=error)
            record_failure(directory, environment.rank, error)
        done_path(root, training, environment.rank).touch()
        if not _together(root, training, environment):
            break
    return 0


def _train(plan: Plan, training: Training, task: Task, environment: Environment) -> None:
    root, rank = Path(plan.root), environment.rank
    with ExitStack() as stack:
        watch = Watch(
            trace=stack.enter_context(trace_path(root, training, rank).open("w")),
            notes_steps=training.noted,
            double=training.double,
            writer=ReferenceWriter(tensors_path(root, training.name)) if training.double else None,
            reference=None
            if training.reference is None
            else Reference(tensors_path(root, training.reference)),
        )
        if training.forward_step is not None:
            watch.forward_step = training.forward_step
            watch.forward = stack.enter_context(forward_path(root, training, rank).open("w"))
        config = _config(plan, training, task)
        job = Job(config=config, given=frozenset(training.options), quiet=True, supervised=True)
        result = run(job, environment, watched(task, watch))
    if rank == 0:
        _write(outcome_path(root, training), result)


def _simulate(plan: Plan, training: Training, task: Task) -> None:
    assert training.simulation is not None
    config = _config(plan, training, task)
    directory = directory_of(Path(plan.root), training)
    world_size = int(training.options["nproc"])
    request = Request(
        config=config,
        given=frozenset(training.options),
        task=task,
        started=time.time(),
        default_threads=1,
        quiet=True,
    )
    device = torch.device(config.device if config.device != "auto" else "cpu")
    with numerics_kept():
        run_of_ranks, _ = prepare(
            request,
            None,
            directory,
            StopSignals(launched=True),
            device=device,
            world_size=world_size,
            processes=1,
            memory=memory_of_process(device, 1),
        )
        weights = load_simulation(training.simulation)(run_of_ranks, world_size)
    _write(outcome_path(Path(plan.root), training), {"model_sha256": model_sha256(dict(weights))})


def _config(plan: Plan, training: Training, task: Task) -> RunConfig:
    """The run's options, the same for all numbers of processes: the shards are part of what is computed."""
    options = dict(training.options)
    if options.get("shards") in (None, "auto"):
        options["shards"] = max(task.defaults.shards or 1, plan.least_shards)
    options["global_batch_size"] = (
        options.get("global_batch_size") or task.defaults.global_batch_size or task.recommended_batch_size()
    )
    directory = directory_of(Path(plan.root), training)
    return config_from_mapping({**options, "task": plan.task, "run": str(directory.path)}, "paceline verify")


def _lint(plan: Plan, task: Task) -> None:
    config = _config(plan, plan.trainings[0], task)
    with numerics_kept():
        configure_numerics(config, config.threads or 1)
        findings = lint(task, config)
    _write(lints_path(Path(plan.root)), [asdict(finding) for finding in findings])


def _together(root: Path, training: Training, environment: Environment) -> bool:
    """Whether all ranks can go on to the next run: none failed, or all of them did for the same wrong option.

    Where one failed otherwise, others may still wait for it: they end, and a new group does the rest.
    """
    deadline = time.monotonic() + _OTHERS_S
    while not is_done(root, training):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    directory = directory_of(root, training)
    failures = [read_failure(directory.error_of(rank)) for rank in range(environment.world_size)]
    return not any(failures) or all(f is not None and f.user_error for f in failures)


def _write(path: Path, document: Any) -> None:
    write_atomically(path, json.dumps(document).encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
