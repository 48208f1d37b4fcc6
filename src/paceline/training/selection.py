"""The trainers by strategy."""

from __future__ import annotations

from paceline.membership.member import Member
from paceline.training.run import Run
from paceline.training.trainer import Trainer


def build_trainer(run: Run, member: Member | None = None) -> Trainer:
    """The trainer that the run's strategy needs; arguments are a trainer's.

    Raises:
        UserError: the task's model, optimizers or data cannot be built, or do not work with the strategy.
    """
    if "hogwild" in run.config.methods:
        from paceline.training.hogwild import HogwildTrainer

        return HogwildTrainer(run, member)
    if "ps" in run.config.methods and run.config.asynchronous:
        from paceline.training.arrivals import ArrivalTrainer

        return ArrivalTrainer(run, member)
    if "ps" in run.config.methods:
        from paceline.training.servers import ServerTrainer

        return ServerTrainer(run, member)
    return Trainer(run, member)
