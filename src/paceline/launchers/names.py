"""The launchers' names, and where their classes and options are: ``--help`` needs these and no launcher."""

from __future__ import annotations

import importlib
from dataclasses import field
from typing import Any, Literal

Contract = Literal["torch", "tensorflow", "horovod", "mpi", "none"]
"""Which variables tell a process its place; see :mod:`paceline.launchers.contracts`."""

Inner = Literal["agent", "torchrun", "spawn", "srun", "mpi", "horovod", "ray"]
"""What starts the ranks, where a job's machines are there."""

LAUNCHERS = {
    "inprocess": "paceline.launchers.here:InProcess",
    "spawn": "paceline.launchers.here:Spawn",
    "torchrun": "paceline.launchers.here:Torchrun",
    "slurm": "paceline.launchers.slurm.launcher:Slurm",
    "submitit": "paceline.launchers.submitit.launcher:Submitit",
    "ray": "paceline.launchers.ray.launcher:Ray",
    "mpi": "paceline.launchers.mpi:MpiLauncher",
    "horovod": "paceline.launchers.horovod:HorovodLauncher",
    "ssh": "paceline.launchers.ssh.launcher:Ssh",
    "kubernetes": "paceline.launchers.kubernetes.launcher:Kubernetes",
    "sagemaker": "paceline.launchers.sagemaker.launcher:SageMaker",
    "azureml": "paceline.launchers.azureml:AzureML",
    "google": "paceline.launchers.google:Google",
}
"""The class of each launcher, by what ``--on`` calls it."""

LAUNCHER_NAMES = tuple(LAUNCHERS)

_OPTIONS = {
    "spawn": "paceline.launchers.local.options:MeetingOptions",
    "torchrun": "paceline.launchers.local.options:TorchrunOptions",
    "slurm": "paceline.launchers.slurm.options:SlurmOptions",
    "submitit": "paceline.launchers.submitit.parameters:SubmititOptions",
    "ray": "paceline.launchers.ray.launcher:RayOptions",
    "mpi": "paceline.launchers.mpi:MpiOptions",
    "horovod": "paceline.launchers.horovod:HorovodOptions",
    "ssh": "paceline.launchers.ssh.launcher:SshOptions",
    "kubernetes": "paceline.launchers.kubernetes.options:KubernetesOptions",
    "sagemaker": "paceline.launchers.sagemaker.options:SageMakerOptions",
    "azureml": "paceline.launchers.azureml:AzureMLOptions",
    "google": "paceline.launchers.google:GoogleOptions",
}


def options_type(name: str) -> type | None:
    """A launcher's own options, a frozen dataclass made of :func:`option`; None where it has none."""
    if name not in _OPTIONS:
        return None
    module, _, attribute = _OPTIONS[name].partition(":")
    found: type = getattr(importlib.import_module(module), attribute)
    return found


def option(help: str, default: Any = None) -> Any:
    """A field of a launcher's options; its type may be str, int, float, bool or tuple[str, ...]."""
    return field(default=default, metadata={"help": help})
