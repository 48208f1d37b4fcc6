"""The options of ``paceline.submit`` as types, which tests/core/test_interface.py writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from paceline.core.option_groups import RankLauncher
from paceline.core.run_options import TaskOptions, Texts

class SubmitOptions(TypedDict, total=False):
    """Those of :func:`paceline.submit` and :func:`paceline.submit_array` for all work."""

    name: str | None
    cpus_per_task: int | None
    gpus_per_node: int | None
    partition: str | None
    account: str | None
    qos: str | None
    comment: str | None
    constraint: str | None
    exclude: str | None
    gres: str | None
    mem: str | None
    setup: Texts
    slurm: Texts
    srun_args: Texts
    signal_delay_s: int
    array_parallelism: int | None
    stderr_to_stdout: bool
    max_requeues: int

class FunctionJobOptions(SubmitOptions, total=False):
    """Those of functions."""

    nodes: int
    nproc: int
    walltime: str | None

class TaskJobOptions(SubmitOptions, TaskOptions, total=False):
    """Those of tasks."""

    rank_launcher: RankLauncher
    env: Mapping[str, str]
