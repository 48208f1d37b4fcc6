"""The option of the profiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.options import Changes, OptionGroup, option

if TYPE_CHECKING:
    from paceline.core.config import RunConfig


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ProfileOptions(OptionGroup):
    """Whether a run is profiled."""

    profile: int = option(
        0,
        "Profile this many steps with torch.profiler.",
        group="Run directory and checkpoints",
        resume="fresh",
        bits="never",
        scope="records",
        needs="lockstep",
        minimum=0,
    )

    def changes(self, config: RunConfig) -> Changes:
        """Profile, if steps are given."""
        return Changes(hooks=("paceline_planning.profiler:Profiling",) if self.profile else ())
