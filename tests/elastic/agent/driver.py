"""Runs an agent over scripted workers: ``driver.py NPROC MAX_RESTARTS RECOVER [PORT]``, in the run's directory.

With a port, it is the first of two nodes, which waits one second for the other one.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from paceline.core.job import Placement, RecoveryPolicy
from paceline.elastic.agent import Agent
from paceline.launch.launcher import LaunchSpec, get_launcher
from paceline.runs.directory import RunDirectory

nproc, max_restarts = (int(word) for word in sys.argv[1:3])
faults = json.loads(Path("job.json").read_text())["faults"].values()
spec = LaunchSpec(
    command=(sys.executable, "-m", "paceline.training.worker"),
    job_file=Path("job.json").resolve(),
    nproc=(nproc,),
    threads=1,
    nodes=(2, 2) if sys.argv[4:] else (1, 1),
    placement=Placement(
        log_directory=RunDirectory(Path.cwd()), rdzv_endpoint=f"127.0.0.1:{sys.argv[4]}" if sys.argv[4:] else None
    ),
    recovery=RecoveryPolicy(
        grace_s=5,
        recover=sys.argv[3],
        init_timeout_s=1.0,
        max_restarts=max_restarts,
        heartbeat_s=1.5 if any(kind in ("stop", "grip") for _, kind in faults) else 60.0,
    ),
)
[forkserver] = get_launcher("spawn").render(spec).commands
scripted = replace(forkserver, argv=(sys.executable, str(Path(__file__).with_name("scripted.py"))))
sys.exit(Agent(spec, scripted).wait())
