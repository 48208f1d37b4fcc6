"""How ranks are laid out: sizes of a mesh's axes, and what goes with them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from paceline.config import config_from_mapping
from paceline.errors import ConfigError

Schedule = Literal["gpipe", "1f1b"]
AXES = ("pp", "dp", "fsdp", "tp")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A grid of ranks.

    Attributes:
        pp: stages of the pipeline.
        dp: copies of the model.
        fsdp: ranks that a copy's parameters are sharded over.
        tp: ranks that its tensors are split over.
        zero1: copies share the optimizer's state.
        zero_stage: what copies share under DeepSpeed, 1 to 3; 0: it is not used.
        schedule: of the pipeline.
        checkpointing: a block's activations are computed again in backward.
    """

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    zero1: bool = False
    zero_stage: int = 0
    schedule: Schedule = "1f1b"
    checkpointing: bool = False

    @property
    def axes(self) -> dict[str, int]:
        """The axes with several ranks, outermost first."""
        return {axis: size for axis in AXES if (size := getattr(self, axis)) > 1}

    @property
    def world_size(self) -> int:
        """All ranks."""
        return math.prod(self.axes.values())

    @property
    def data_ranks(self) -> int:
        """Ranks with data of their own."""
        return self.dp * self.fsdp

    @property
    def family(self) -> str:
        """The strategy's name, or the axes' with a cross between: "fsdp", "dp x tp"."""
        if len(self.axes) > 1:
            return " x ".join(self.axes)
        (axis,) = self.axes or ("single",)
        if self.zero_stage:
            return "deepspeed"
        return "zero1" if self.zero1 else "ddp" if axis == "dp" else axis

    @property
    def name(self) -> str:
        """The family, with its stage, or its sizes where there are several: "dp=2,tp=4"."""
        if self.zero_stage:
            return f"deepspeed {self.zero_stage}"
        return ",".join(f"{a}={n}" for a, n in self.axes.items()) if len(self.axes) > 1 else self.family

    @property
    def options(self) -> list[str]:
        """Words of a command that ask for it; ``ddp`` and ``single`` are what nobody needs to ask for."""
        words = [] if self.family in ("single", "ddp") else ["--strategy", self.family]
        if len(self.axes) > 1:
            words = ["--mesh", self.name]
        if self.zero_stage > 1:
            words += ["--zero-stage", str(self.zero_stage)]
        if self.checkpointing:
            words += ["--checkpoint-activations", "block"]
        return words

    @property
    def in_paceline(self) -> bool:
        """Whether this version can train so."""
        options: dict[str, object] = {"strategy": self.family}
        if len(self.axes) > 1:
            options = {"mesh": self.name}
        if self.zero_stage:
            options["zero_stage"] = self.zero_stage
        if self.checkpointing:
            options["checkpoint_activations"] = "block"
        try:
            config = config_from_mapping(options, "the plan")
        except ConfigError:
            return False
        return len(self.axes) <= 1 or config.axes(self.world_size) == self.axes


def layouts(world_size: int, *, most_stages: int, splits: Collection[int]) -> Iterator[Layout]:
    """The grids that so many ranks may form, without activation checkpointing.

    Args:
        world_size: ranks.
        most_stages: the most that the model can be cut into.
        splits: the numbers of ranks that can share its tensors.
    """
    if world_size == 1:
        yield Layout()
        return
    for pp in _divisors(world_size):
        if pp > most_stages:
            break
        for tp in _divisors(world_size // pp):
            if tp > 1 and tp not in splits:
                continue
            rest = world_size // pp // tp
            yield Layout(pp=pp, dp=rest, tp=tp)
            if pp == tp == 1:
                yield Layout(dp=rest, zero1=True)
                yield from (Layout(dp=rest, zero_stage=stage) for stage in (1, 2, 3))
            if pp == 1:
                for fsdp in _divisors(rest):
                    # All axes at once is more than anybody has asked for.
                    if fsdp > 1 and (tp == 1 or fsdp == rest):
                        yield Layout(dp=rest // fsdp, fsdp=fsdp, tp=tp)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
