"""Silent data corruption (SDC): every Nth step, two ranks compute one micro-batch's gradient, and compare it."""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from paceline.core.errors import ConfigError, NondeterminismError, PeerLostError, SilentDataCorruptionError
from paceline.data.samples import Loader, MicroBatch
from paceline.parallel.strategy import ReducerStrategy, Strategy
from paceline.parallel.world import World
from paceline.runs.monitor import PhaseTimer
from paceline.training import control
from paceline.training.control import ControlFlags
from paceline.training.group_context import GroupContext
from paceline.training.hooks import RunHook, StepHook
from paceline.training.reproducibility import verification_key
from paceline.training.run_context import RunContext
from paceline.training.state import TrainingState
from paceline.training.state_manager import StateManager
from paceline.training.step import microbatch_loss
from paceline_checks.options import CheckOptions

_log = logging.getLogger(__name__)

Vote = tuple[int, int]
"""A rank, and the fingerprint that it computed."""


class SilentCorruptionGuard(RunHook):
    """The check of ``--sdc-check-every``, which must be set."""

    def validate(self) -> None:
        """Reject runs in which two right computations may differ."""
        run = self.run
        if run.data.stream is not None:
            raise ConfigError(
                "--sdc-check-every needs a map-style dataset: a stream's samples cannot be fetched once more, "
                "by another process. Leave it out."
            )
        if run.device.type != "cpu" and not torch.are_deterministic_algorithms_enabled():
            raise ConfigError(
                f"--sdc-check-every compares bits, and --reduction {run.config.parallel.reduction} does not make a "
                "GPU's operations deterministic. Use --reduction exact, or leave --sdc-check-every out."
            )

    def step_hook(self, group: GroupContext, states: StateManager) -> SDCChecker:
        return SDCChecker(self.run, group.world, states.state, group.monitor.timer)


class SDCChecker(StepHook):
    """Recomputes one micro-batch of every Nth step on a rank that does not have it.

    The micro-batch and the rank are a function of seed and step. Two numbers travel with the step's sums, so equal
    gradients cost no message. If they differ, every rank recomputes the micro-batch before the sums are used, and the
    majority identifies the wrong ranks.
    """

    def __init__(self, run: RunContext, world: World, state: TrainingState, timer: PhaseTimer) -> None:
        self._run = run
        self._world = world
        self._state = state
        self._timer = timer
        self._strategy: ReducerStrategy | None = None
        self._loader: Loader | None = None
        self._microbatch = 0
        self._owner = 0
        self._second = 0
        self._recomputed = 0

    def report(self, flags: ControlFlags) -> ControlFlags:
        """Add what this rank computed of the micro-batch that is verified."""
        computed = 0 if self._strategy is None else self._strategy.reducer.watched
        return replace(flags, computed=computed, recomputed=self._recomputed)

    def before_microbatches(self, strategy: Strategy, microbatches: Sequence[MicroBatch]) -> None:
        """Choose this step's micro-batch, if it is the step's turn, and compute it if that is this rank's part."""
        self._begin_step(strategy)
        self._timer.mark("other")

    def _begin_step(self, strategy: Strategy) -> None:
        assert isinstance(strategy, ReducerStrategy), "the options allow no other"
        self._strategy = strategy
        run, progress, ranks = self._run, self._state.progress, self._world.world_size
        self._recomputed = 0
        if (progress.step + 1) % run.config[CheckOptions].sdc_check_every:
            return
        assert run.data.order is not None
        key = verification_key(run.config.training.seed, progress.step)
        self._microbatch = key % len(run.data.order.microbatch_bounds(progress.step_in_epoch))
        plan = strategy.plan
        self._owner = next(rank for rank in range(ranks) if self._microbatch in plan.microbatches_of(rank))
        self._second = (self._owner + 1 + (key >> 32) % max(1, ranks - 1)) % ranks
        strategy.reducer.watch(self._microbatch, self._check)
        if self._world.rank == self._second:
            self._recomputed = self._recompute(strategy)

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()

    def _recompute(self, strategy: ReducerStrategy) -> int:
        run, progress = self._run, self._state.progress
        if self._loader is None:
            self._loader = run.build_loader(workers=0)
        self._world.progress_tracker.move("data")
        microbatches = range(self._microbatch, self._microbatch + 1)
        (microbatch,) = self._loader.fetch(progress.epoch, progress.step_in_epoch, microbatches)

        self._world.progress_tracker.move("forward")

        def forward_backward() -> tuple[torch.Tensor, torch.Tensor | float]:
            loss = microbatch_loss(run, strategy.model, progress.step, microbatch)
            strategy.backward(self._state.scale_loss(loss.sum))
            return loss.sum, loss.weight

        return strategy.reducer.recompute(forward_backward, microbatch.checksum)

    def _check(self, rows: Sequence[Sequence[float]]) -> None:
        """Compare; all ranks call this together, with the same rows.

        Raises:
            SilentDataCorruptionError: this rank is wrong.
            NondeterminismError: there is no majority.
            PeerLostError: another rank is wrong, and leaves.
        """
        word = control.merge(rows)
        if word.computed == word.recomputed:
            return
        assert self._strategy is not None
        mine = [self._recompute(self._strategy), socket.gethostname()]
        answers: list[Any] = self._world.all_gather_object(mine)
        votes = [(self._owner, word.computed), (self._second, word.recomputed)]
        votes += [(rank, answer[0]) for rank, answer in enumerate(answers)]
        hosts = [str(answer[1]) for answer in answers]
        culprits = find_minority(votes, self._world.world_size)
        step = self._state.progress.step + 1
        sentence = describe(culprits, votes, hosts, microbatch=self._microbatch, step=step)
        if self._world.rank == 0:
            self._run.directory.append_event(
                "corruption", step=step, microbatch=self._microbatch, ranks=culprits, sentence=sentence
            )
            _log.warning("%s", sentence)
        # The state before the step is complete on all ranks; rank 0 records it before any rank leaves.
        self._world.barrier()
        if not culprits:
            raise NondeterminismError(
                f"{sentence} The step was not applied. If it is the task, leave --sdc-check-every out; if not, "
                "continue on another node, or on three processes or more, which can identify the wrong rank: "
                f"paceline resume {self._run.directory.path}"
            )
        if self._world.rank in culprits:
            raise SilentDataCorruptionError(
                f"{sentence} The step was not applied. Continue without that node: "
                f"paceline resume {self._run.directory.path}"
            )
        raise PeerLostError(sentence)


def find_minority(votes: Sequence[Vote], world_size: int) -> list[int]:
    """Return the ranks whose result differs from the majority's; empty if there is no majority.

    A rank alone is wrong if it contradicts itself. Among several, one at least must never have
    differed, and more than half of all computations must agree.
    """
    (winner, times), *_ = Counter(value for _, value in votes).most_common()
    wrong = sorted({rank for rank, value in votes if value != winner})
    if world_size == 1:
        return wrong
    return wrong if 2 * times > len(votes) and len(wrong) < world_size else []


def describe(
    culprits: Sequence[int], votes: Sequence[Vote], hosts: Sequence[str], *, microbatch: int, step: int
) -> str:
    """Describe in one sentence which ranks differ, and which node is suspect."""
    what = f"micro-batch {microbatch} of step {step}"
    if len(hosts) == 1:
        return (
            f"rank 0 computed different gradients for {what}, one after another: its machine ({hosts[0]}) is "
            "not to be trusted, unless the task uses operations that are not deterministic."
        )
    if not culprits:
        return (
            f"the ranks computed {len({value for _, value in votes})} different gradients for {what}, and "
            "there is no majority: a machine is not to be trusted, or the task is not deterministic."
        )
    others = [rank for rank in range(len(hosts)) if rank not in culprits]
    names = ", ".join(sorted({hosts[rank] for rank in culprits}))
    verdict = f"its machine ({names}) is" if len(culprits) == 1 else f"the machines ({names}) are"
    return (
        f"{_listed(culprits)} computed another gradient for {what} than {_listed(others)}: {verdict} not to be trusted."
    )


def _listed(ranks: Sequence[int]) -> str:
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"
