"""Slurm's own commands, and what their refusals mean for our options."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from typing import Any

from paceline.errors import LaunchError
from paceline.launchers.base import Command, JobSpec

_LIMIT_S = 60

# What sbatch says, and which of our options may be the reason.
_CAUSES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("invalid partition", ("partition",)),
    ("invalid account", ("account", "partition")),
    ("invalid qos", ("qos",)),
    ("invalid feature", ("constraint",)),
    ("invalid node name", ("exclude", "slurm")),
    ("invalid generic resource|gres", ("gpus_per_node",)),
    ("memory", ("mem",)),
    ("time limit|time specification", ("walltime",)),
    ("job array", ("array",)),
    ("dependency|unrecognized option|invalid .* specification", ("slurm",)),
    ("node count", ("nodes",)),
    (
        "node configuration|more processors|cpu count|too many",
        ("nodes", "nproc", "cpus_per_task", "gpus_per_node", "mem", "constraint", "exclude", "partition"),
    ),
    ("violates accounting|limit", ("walltime", "nodes", "account", "qos", "partition")),
)


def run_slurm(*argv: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands to its end, whatever its exit code; ``env`` is added to our variables.

    Raises:
        LaunchError: Slurm is not installed here, or does not answer.
    """
    try:
        done = subprocess.run(
            argv,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except FileNotFoundError:
        raise LaunchError(
            f"there is no {argv[0]} here: give the command on a login node of the cluster. "
            "(--dry-run shows the job anywhere.)"
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"{argv[0]} has not answered within {_LIMIT_S} s. Is Slurm up? Try: sinfo"
        ) from None
    if done.returncode != 0 and re.search(
        "unable to contact|connection refused|could not load|timed out|zero bytes", done.stderr, re.I
    ):
        raise LaunchError(f"the cluster is not reachable: {_words(done.stderr)} Try: sinfo")
    return done


def submit_script(spec: JobSpec, options: Any, command: Command) -> str:
    """Have sbatch take a script; return the job's number.

    Raises:
        LaunchError: it was refused, with sbatch's words and our options that may be the reason.
    """
    done = run_slurm(*command.argv, env=command.env)
    if done.returncode != 0:
        raise refusal(done.stderr, spec, options)
    return done.stdout.strip().partition(";")[0]


def refusal(stderr: str, spec: JobSpec, options: Any) -> LaunchError:
    """What sbatch said, with our options that may be the reason.

    Args:
        stderr: its words.
        spec: the job.
        options: the launcher's, with names as ``--on slurm`` has them; some may be missing.
    """
    given = _given(spec, options)
    causes = [given[name] for name in _causes(stderr) if name in given]
    advice = f" Look at {', '.join(causes)}." if causes else ""
    return LaunchError(f"sbatch refused the job: {_words(stderr)}{advice}")


def _words(stderr: str) -> str:
    """What a command said, as one sentence."""
    lines = [re.sub(r"^\w+: (error: |fatal: )?", "", line.strip()) for line in stderr.splitlines()]
    text = "; ".join(line.rstrip(".") for line in lines if line and not line.startswith("Try "))
    return f"{text or 'it said nothing'}."


def _causes(stderr: str) -> tuple[str, ...]:
    for pattern, names in _CAUSES:
        if re.search(pattern, stderr, re.I):
            return names
    return ()


def _given(spec: JobSpec, options: Any) -> dict[str, str]:
    """Our options as they were given, by name."""
    least, most = spec.nodes
    words = {
        "nodes": str(least) if least == most else f"{least}:{most}",
        "nproc": ",".join(map(str, spec.nproc)),
        "cpus_per_task": spec.cpus_per_task,
        "gpus_per_node": spec.gpus_per_node,
        "walltime": None if spec.walltime_s is None else f"{spec.walltime_s:g}s",
        **{
            name: getattr(options, name, None)
            for name in ("partition", "account", "qos", "constraint", "exclude", "mem", "array")
        },
        "slurm": " --slurm ".join(options.slurm) or None,
    }
    return {name: f"--{name.replace('_', '-')} {value}" for name, value in words.items() if value is not None}
