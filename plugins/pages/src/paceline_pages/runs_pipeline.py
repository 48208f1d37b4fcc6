"""``paceline runs pipeline RUN``: how long each rank waited in a step of a pipeline."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from paceline.core.errors import RunDirectoryError
from paceline.runs.directory import RunDirectory


def pipeline(run: Path, *, svg: Path | None = None, json: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Show a pipeline's bubble: the share of its ranks' time in which they wait.

    Uses the last recorded step (the processes record the 2nd, 4th, 8th, ...). Also shows the bubble that each
    schedule would have with the same stage times if communication took no time.

    Parameters
    ----------
    run
        The run's directory.
    svg
        Draw the step into this file: a row per rank, a box per forward and backward.
    json
        Print one JSON object.
    """
    from paceline.parallel.pipeline import schedules as traces

    directory = RunDirectory(run)
    trace = traces.read(directory.path / traces.FILE)
    if svg is not None:
        try:
            svg.write_text(traces.draw(trace))
        except OSError as error:
            raise RunDirectoryError(f"--svg {svg} cannot be written: {error.strerror}.") from error
    counted, times = trace.counted(), trace.stages_s()
    if json:
        print(
            json_module.dumps(
                {
                    "schedule": trace.schedule,
                    "step": trace.step,
                    "microbatches": trace.microbatches,
                    "idle": trace.idle,
                    "counted": counted,
                    "stages": [{"forward_s": f, "backward_s": b} for f, b in times],
                }
            )
        )
        return 0
    print(f"{trace.schedule}, {len(trace.ranks)} ranks, {trace.microbatches} micro-batches, step {trace.step}")
    for stage, (forward_s, backward_s) in enumerate(times):
        print(f"  stage {stage}: forward {forward_s * 1e3:.2f} ms, backward {backward_s * 1e3:.2f} ms")
    print(f"idle: {trace.idle:.1%} measured, {counted[trace.schedule]:.1%} computed from these times")
    for name, share in counted.items():
        if name != trace.schedule:
            print(f"  with {name}: {share:.1%} computed")
    if svg is not None:
        print(f"drawing: {svg}")
    return 0
