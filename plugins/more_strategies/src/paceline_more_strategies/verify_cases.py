"""The cases of these strategies in ``paceline verify``. No torch."""

from __future__ import annotations

from paceline_checks.verify.cases import StrategyCase

CASES = (
    StrategyCase(name="dp", options={"strategy": "dp", "dp_devices": 2}, least=1, most=1),
    StrategyCase(
        name="fp16-hook",
        options={"comm_hook": "fp16"},
        guarantee="reference",
        most=2,
        simulation="paceline_more_strategies.reference:simulated_compression",
    ),
    StrategyCase(
        name="bf16-hook",
        options={"comm_hook": "bf16"},
        guarantee="reference",
        most=2,
        simulation="paceline_more_strategies.reference:simulated_compression",
    ),
    StrategyCase(
        name="local-sgd",
        options={"local_sgd_steps": 2},
        guarantee="reference",
        simulation="paceline_more_strategies.reference:simulated_model",
    ),
    StrategyCase(
        name="diloco",
        options={"local_sgd_steps": 2, "outer_optimizer": "nesterov"},
        guarantee="reference",
        simulation="paceline_more_strategies.reference:simulated_model",
    ),
    StrategyCase(name="powersgd-hook", options={"comm_hook": "powersgd"}, guarantee="convergence"),
    StrategyCase(
        name="pipedream",
        options={"strategy": "pp", "pp_schedule": "pipedream", "pp_split": "equal"},
        guarantee="reference",
        simulation="paceline_more_strategies.reference:simulated_pipedream",
    ),
    StrategyCase(name="ps", options={"strategy": "ps"}, takes_callbacks=False),
    StrategyCase(
        name="ps-async",
        options={"strategy": "ps", "ps_mode": "async"},
        guarantee="convergence",
        takes_callbacks=False,
    ),
    StrategyCase(
        name="ps-ssp",
        options={"strategy": "ps", "ps_mode": "ssp", "ps_staleness": 2},
        guarantee="convergence",
        takes_callbacks=False,
    ),
    StrategyCase(name="hogwild", options={"strategy": "hogwild"}, guarantee="convergence", takes_callbacks=False),
)
"""All cases, in the order of the report."""
