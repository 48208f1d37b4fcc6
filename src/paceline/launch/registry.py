"""Launchers by name: their classes, and the options that each has of its own; it imports none of them."""

from __future__ import annotations

import dataclasses
import importlib
import types
import typing
from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal

from paceline.core.errors import ConfigError
from paceline.core.options import flag
from paceline.core.process_config import EnvStyle as EnvStyle

if TYPE_CHECKING:
    from paceline.launch.launcher import Launcher


# --- The launchers' names, and where their classes and options are: ``--help`` needs these and no launcher


RankLauncher = Literal["agent", "torchrun", "spawn", "srun", "mpi", "horovod", "ray"]
"""What starts the ranks, where a job's machines are there."""

LAUNCHERS = {
    "inprocess": "paceline.launch.local:InProcess",
    "spawn": "paceline.launch.local:Spawn",
    "torchrun": "paceline.launch.local:Torchrun",
    "slurm": "paceline.launch.slurm:Slurm",
    "submitit": "paceline.launch.submitit:Submitit",
    "ray": "paceline.launch.ray:Ray",
    "mpi": "paceline.launch.mpi:MpiLauncher",
    "horovod": "paceline.launch.horovod:HorovodLauncher",
    "ssh": "paceline.launch.ssh:Ssh",
    "kubernetes": "paceline.launch.kubernetes:Kubernetes",
    "sagemaker": "paceline.launch.sagemaker:SageMaker",
    "azureml": "paceline.launch.clouds:AzureML",
    "google": "paceline.launch.clouds:Google",
}
"""The class of each launcher, by what ``--on`` calls it."""

LAUNCHER_NAMES = tuple(LAUNCHERS)

_OPTIONS = {
    "spawn": "paceline.launch.options:MeetingOptions",
    "torchrun": "paceline.launch.options:TorchrunOptions",
    "slurm": "paceline.launch.options:SlurmOptions",
    "submitit": "paceline.launch.submitit:SubmititOptions",
    "ray": "paceline.launch.ray:RayOptions",
    "mpi": "paceline.launch.mpi:MpiOptions",
    "horovod": "paceline.launch.horovod:HorovodOptions",
    "ssh": "paceline.launch.ssh:SshOptions",
    "kubernetes": "paceline.launch.options:KubernetesOptions",
    "sagemaker": "paceline.launch.options:SageMakerOptions",
    "azureml": "paceline.launch.clouds:AzureMLOptions",
    "google": "paceline.launch.clouds:GoogleOptions",
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


# --- The options that a launcher has of its own: which there are, and of which types ---


def make_options(launcher: Launcher, given: Mapping[str, Any]) -> Any:
    """The launcher's options, of those that were given.

    Raises:
        ConfigError: one is not this launcher's; the message names those that are.
    """
    known = option_names(launcher.name)
    for name in given:
        if name not in known:
            raise ConfigError(
                f"--on {launcher.name} knows no {flag(name)}. {owners_of(flag(name))}--on {launcher.name} takes: "
                f"{own_flags(launcher.name)}."
            )
    return launcher.options_type(**given) if launcher.options_type else None


def owners_of(text: str) -> str:
    """A sentence that says which launchers have a flag, with a space after it; empty where none has."""
    owners = [name for name in LAUNCHER_NAMES if text in map(flag, option_names(name))]
    return f"{text} is an option of --on {' and '.join(owners)}. " if owners else ""


def option_names(name: str) -> tuple[str, ...]:
    """The names of a launcher's own options."""
    options = options_type(name)
    return tuple(f.name for f in dataclasses.fields(options)) if options else ()


def own_flags(name: str) -> str:
    """A launcher's own options as they are written, with commas."""
    return ", ".join(map(flag, option_names(name))) or "no options of its own"


def option_types(options_type: type) -> dict[str, Any]:
    """The type of each option, without None."""
    hints = typing.get_type_hints(options_type)
    plain = {}
    for name, hint in hints.items():
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            [hint] = [choice for choice in typing.get_args(hint) if choice is not type(None)]
        plain[name] = hint
    return plain
