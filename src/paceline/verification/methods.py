"""Every way to train, and what it promises: the one table to which a new strategy is added. No torch."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from paceline.config.values import parse_mesh
from paceline.errors import ConfigError

Class = Literal["bits", "tolerance", "reference", "convergence"]
"""What a method promises.

- bits: the losses, gradients and weights of one process, bit for bit.
- tolerance: as near to a run in float64 as one process in float32 is, times a factor.
- reference: the weights of a simulation of its own schedule in one process, bit for bit.
- convergence: no bits, as the machine decides who comes first, but a loss that falls about as one process's.
"""


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to train.

    Attributes:
        name: what ``--strategies`` takes.
        options: of ``paceline train``; a ``*`` in a mesh is what remains of the processes.
        promises: how its results are judged.
        least: the fewest processes.
        most: the most.
        needs: a package that it imports and that not everybody has.
        simulation: ``module:function`` of a method that promises its own reference; called as
            :class:`paceline.verification.simulation.Simulation` says.
        takes_callbacks: where not, its steps are not noted: only its weights and recorded losses are judged.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    promises: Class = "bits"
    least: int = 2
    most: int | None = None
    needs: str | None = None
    simulation: str | None = None
    takes_callbacks: bool = True

    def beside(self, options: Mapping[str, Any]) -> Method:
        """The method, with what it promises where all runs have these options."""
        sharded = self.options.get("strategy") == "fsdp" or "fsdp" in self.options.get("mesh", "")
        if self.promises == "bits" and sharded and options.get("clip_norm") is not None:
            return replace(self, promises="tolerance")  # the norm is added up from the ranks' parts
        return self

    def options_on(self, world_size: int) -> dict[str, Any] | None:
        """The options for so many processes; None where it is not for so many."""
        if world_size < self.least or (self.most is not None and world_size > self.most):
            return None
        mesh = self.options.get("mesh")
        if mesh is None:
            return dict(self.options)
        fixed = math.prod(size for size in _axes(mesh.replace("*", "1")).values())
        if world_size % fixed:
            return None
        return {**self.options, "mesh": mesh.replace("*", str(world_size // fixed))}


METHODS = (
    Method(name="single", options={"strategy": "single"}, least=1, most=1),
    Method(name="dp", options={"strategy": "dp", "dp_devices": 2}, least=1, most=1),
    Method(name="ddp", options={"strategy": "ddp"}),
    Method(name="ddp-fast", options={"strategy": "ddp", "reduction": "fast"}, promises="tolerance"),
    Method(name="ddp-torch", options={"strategy": "ddp", "reduction": "torch"}, promises="tolerance"),
    Method(
        name="fp16-hook",
        options={"comm_hook": "fp16"},
        promises="reference",
        most=2,
        simulation="paceline.training.simulation:simulated_compression",
    ),
    Method(
        name="bf16-hook",
        options={"comm_hook": "bf16"},
        promises="reference",
        most=2,
        simulation="paceline.training.simulation:simulated_compression",
    ),
    Method(
        name="local-sgd",
        options={"sync_every": 2},
        promises="reference",
        simulation="paceline.training.simulation:simulated_model",
    ),
    Method(
        name="diloco",
        options={"sync_every": 2, "outer_optimizer": "nesterov"},
        promises="reference",
        simulation="paceline.training.simulation:simulated_model",
    ),
    Method(name="powersgd-hook", options={"comm_hook": "powersgd"}, promises="convergence"),
    Method(name="zero1", options={"strategy": "zero1"}),
    Method(name="fsdp", options={"strategy": "fsdp"}),
    Method(name="dp-fsdp", options={"mesh": "dp=*,fsdp=2"}, least=4),
    Method(name="fsdp-fast", options={"strategy": "fsdp", "reduction": "fast"}, promises="tolerance"),
    Method(name="tp", options={"strategy": "tp"}, promises="tolerance"),
    Method(name="tp-sequence", options={"strategy": "tp", "sequence_parallel": True}, promises="tolerance"),
    Method(name="dp-tp", options={"mesh": "dp=*,tp=2"}, promises="tolerance", least=4),
    Method(name="fsdp-tp", options={"mesh": "fsdp=*,tp=2"}, promises="tolerance", least=4),
    Method(name="mp", options={"strategy": "mp"}),
    Method(name="pp-gpipe", options={"strategy": "pp", "pp_schedule": "gpipe"}),
    Method(name="pp-1f1b", options={"strategy": "pp", "pp_schedule": "1f1b"}),
    Method(name="pp-interleaved", options={"strategy": "pp", "pp_schedule": "interleaved"}),
    Method(name="pp-zero-bubble", options={"strategy": "pp", "pp_schedule": "zero-bubble"}),
    Method(
        name="pipedream",
        options={"strategy": "pp", "pp_schedule": "pipedream", "pp_split": "equal"},
        promises="reference",
        simulation="paceline.training.pipedream_simulation:simulated_pipedream",
    ),
    Method(name="pp-dp", options={"mesh": "pp=2,dp=*"}, least=4),
    Method(name="pp-tp", options={"mesh": "pp=2,tp=*"}, promises="tolerance", least=4, most=4),
    Method(name="pp-dp-tp", options={"mesh": "pp=2,dp=*,tp=2"}, promises="tolerance", least=8),
    Method(name="ps", options={"strategy": "ps"}, takes_callbacks=False),
    Method(
        name="ps-async",
        options={"strategy": "ps", "ps_mode": "async"},
        promises="convergence",
        takes_callbacks=False,
    ),
    Method(
        name="ps-ssp",
        options={"strategy": "ps", "ps_mode": "ssp", "staleness": 2},
        promises="convergence",
        takes_callbacks=False,
    ),
    Method(name="hogwild", options={"strategy": "hogwild"}, promises="convergence", takes_callbacks=False),
    *(
        Method(
            name=f"deepspeed-{stage}",
            options={"strategy": "deepspeed", "zero_stage": stage},
            promises="tolerance",
            needs="deepspeed",
        )
        for stage in (1, 2, 3)
    ),
    Method(name="horovod", options={"strategy": "horovod"}, promises="tolerance", needs="horovod"),
)
"""All methods, in the order of the report."""


def chosen(text: str | None) -> tuple[Method, ...]:
    """The methods that ``--strategies`` names; all where it names none.

    Raises:
        ConfigError: there is none of that name; says which is nearest.
    """
    if text is None:
        return METHODS
    known = {method.name: method for method in METHODS}
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Choose from {', '.join(known)}."
            raise ConfigError(f"--strategies: there is no strategy {name!r}. {hint}")
    if not names:
        raise ConfigError(f"--strategies names none. Choose from {', '.join(known)}.")
    return tuple(known[name] for name in names)


def parse_worlds(text: str) -> tuple[int, ...]:
    """The numbers of processes that ``--worlds`` names, ascending.

    Raises:
        ConfigError: one is no number, or below 1.
    """
    worlds = set()
    for word in text.split(","):
        if not word.strip().isdecimal() or int(word) < 1:
            raise ConfigError(f"--worlds must be numbers of processes such as 1,2,4, but is {text!r}.")
        worlds.add(int(word))
    return tuple(sorted(worlds))


def _axes(mesh: str) -> dict[str, int]:
    names = tuple(part.partition("=")[0].strip() for part in mesh.split(","))
    return parse_mesh(mesh, names)
