"""``paceline fork RUN --set lr=0.003 --epochs 20``: another run, which continues with other hyperparameters."""

from __future__ import annotations

import dataclasses
import json as json_module
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from paceline.core.config import OF_FORKS
from paceline.core.files import is_address
from paceline.core.job import default_run_path
from paceline.core.task_loading import parse_assignments, recorded_spec
from paceline.runs.backup import open_run
from paceline.runs.directory import RunDirectory
from paceline_fine_tuning.fork import fork_run


def fork(
    run: str,
    *,
    set: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    epochs: int | None = None,
    max_steps: int | None = None,
    global_batch_size: int | None = None,
    microbatches: int | None = None,
    step: int | None = None,
    run_dir: Path | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Make a run that continues from a checkpoint of RUN with other hyperparameters, longer, or with other batches.

    RUN stays as it is.

    It takes over the weights, the optimizer's state and the position in the data. The optimizer's hyperparameters and
    the schedule are those that the task builds with the new values. Start it with paceline resume.

    Args:
        run: The run's directory, or its address in an object store; the run may be active.
        set: FIELD=VALUE: the new value of a field of the task; may be repeated.
        epochs: Passes over the data of the whole new run, those of RUN included.
        max_steps: Steps of the whole new run, instead of epochs.
        global_batch_size: Samples of a step; needs a checkpoint at an epoch's end.
        microbatches: Micro-batches of a step; needs a checkpoint at an epoch's end.
        step: The step of a checkpoint of RUN. Default: the newest one.
        run_dir: The new run's directory. Default: runs/TASK-TIME.
        json: Print the new run's directory and what differs as JSON.
    """
    given = zip(OF_FORKS, (epochs, max_steps, global_batch_size, microbatches), strict=True)
    options = {name: value for name, value in given if value is not None}
    with open_run(run, None if step is None else str(step)) as source:
        target = run_dir or Path(default_run_path(recorded_spec(source.read_complete_manifest()["task"])))
        name = run if is_address(run) else str(source.path.absolute())
        made = fork_run(source, RunDirectory(target), parse_assignments(set), options=options, step=step, name=name)
    if json:
        print(json_module.dumps({"run_dir": str(target), **dataclasses.asdict(made)}))
        return 0
    manifest = RunDirectory(target).read_complete_manifest()
    now = {**manifest["config"], **manifest["task"]["fields"]}
    changed = {**made.changed, **(made.options or {})}
    changes = ", ".join(f"{name} {before} -> {now.get(name)}" for name, before in changed.items())
    print(f"{target} continues {run} from step {made.step:,}, with {changes or 'the same hyperparameters'}.")
    print(f"Start it with: paceline resume {target}")
    return 0
