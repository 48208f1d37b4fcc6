"""The cases of DeepSpeed and Horovod in ``paceline verify``. No torch."""

from __future__ import annotations

from paceline_checks.verify.cases import StrategyCase

CASES = (
    *(
        StrategyCase(
            name=f"deepspeed-{stage}",
            options={"strategy": "deepspeed", "zero_stage": stage},
            guarantee="tolerance",
            needs="deepspeed",
        )
        for stage in (1, 2, 3)
    ),
    StrategyCase(name="horovod", options={"strategy": "horovod"}, guarantee="tolerance", needs="horovod"),
)
