"""Which fault comes when: a pure function of the seed, so that a run under faults can be had again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from paceline.errors import ConfigError

Kind = Literal["kill", "stop", "slow", "leave", "join", "enospc", "eio", "bitflip", "truncate", "partition"]
KINDS: tuple[Kind, ...] = get_args(Kind)

IN_WORDS: dict[Kind, str] = {
    "kill": "a worker is killed (SIGKILL)",
    "stop": "a worker is stopped (SIGSTOP), and never goes on",
    "slow": "a worker gets a third of the time for a second, and must not be taken for dead",
    "leave": "workers are sent home (paceline scale)",
    "join": "workers are added (paceline scale)",
    "enospc": "the disk is full until a save has failed",
    "eio": "the disk fails until a save has failed",
    "bitflip": "a bit of the newest checkpoint flips, and all workers are killed",
    "truncate": "a file of the newest checkpoint is cut, and all workers are killed",
    "partition": "machines do not reach each other",
}

_FIRST, _LAST = 0.04, 0.85  # of the steps; what is left at the end is for the last recovery
LEAST_STEPS = 4  # a fault, and what must be trained before the next


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        number: from 0, in the order in which they come.
        kind: what happens.
        step: it comes once so many steps are done.
        choice: a large number that picks who or what is hit, among what is there then.
        target: for leave and join, how many workers there are to be.
    """

    number: int
    kind: Kind
    step: int
    choice: int
    target: int | None = None


def plan_faults(
    kinds: Sequence[Kind], *, faults: int, seed: int, nproc: int, steps: int
) -> tuple[Fault, ...]:
    """Spread faults evenly over a run's steps, and the kinds evenly over the faults.

    Each run of as many faults as there are kinds has each kind once, in a shuffled order. Two things are not
    left to chance: who joins has left before, and a stop comes right after a join, where there are both,
    because all others wait meanwhile and the one that joins loses no step.

    Args:
        kinds: what may happen.
        faults: how often.
        seed: decides the order, the steps and the choices.
        nproc: workers at the start, and at most.
        steps: of the whole run.

    Raises:
        ConfigError: such faults cannot be, or not so many.
    """
    check_kinds(kinds, nproc)
    if steps < LEAST_STEPS * faults:
        raise ConfigError(
            f"--faults {faults} do not fit into {steps} steps: at most {steps // LEAST_STEPS} do. "
            f"Ask for fewer, or for a longer run: --max-steps {LEAST_STEPS * faults}."
        )
    order = _order(kinds, faults, random.Random(f"{seed} kinds"))
    targets = _targets(order, nproc, random.Random(f"{seed} targets"))
    chance = random.Random(f"{seed} steps")
    width = (_LAST - _FIRST) * steps / faults
    return tuple(
        Fault(
            number=number,
            kind=kind,
            step=max(1, round(_FIRST * steps + (number + chance.random()) * width)),
            choice=chance.getrandbits(32),
            target=targets[number],
        )
        for number, kind in enumerate(order)
    )


def check_kinds(kinds: Sequence[Kind], nproc: int) -> None:
    """Refuse what cannot be done with so many processes on one machine.

    Raises:
        ConfigError: says why.
    """
    if not kinds:
        raise ConfigError(f"--kinds must name at least one of {', '.join(KINDS)}.")
    if len(set(kinds)) < len(kinds):
        raise ConfigError(f"--kinds must name each kind once, but is {','.join(kinds)}.")
    if "partition" in kinds:
        raise ConfigError("--kinds partition needs several machines; these workers are all on one.")
    if ("leave" in kinds) != ("join" in kinds):
        raise ConfigError(
            "--kinds leave and join belong together: who has left can join, and the other way round."
        )
    if "leave" in kinds and nproc < 2:
        raise ConfigError(f"--kinds leave needs somebody who stays: --nproc 2 or more, not {nproc}.")


def _order(kinds: Sequence[Kind], faults: int, chance: random.Random) -> list[Kind]:
    order: list[Kind] = []
    while len(order) < faults:
        block = list(kinds[: faults - len(order)])
        if "join" in block and "leave" not in block:
            block[block.index("join")] = "leave"
        chance.shuffle(block)
        if "join" in block:
            leave, join = sorted((block.index("leave"), block.index("join")))
            block[leave], block[join] = "leave", "join"
            if "stop" in block:
                block.remove("stop")
                block.insert(block.index("join") + 1, "stop")
        order += block
    return order


def _targets(order: Sequence[Kind], nproc: int, chance: random.Random) -> list[int | None]:
    """The number of workers that each leave and join brings about."""
    targets: list[int | None] = []
    now = nproc
    for kind, following in zip(order, (*order[1:], None), strict=True):
        if kind == "leave":
            # One worker alone has no survivor: it is left alone only until somebody joins.
            now = chance.randrange(1 if following == "join" else min(2, now - 1), now)
        elif kind == "join":
            now = chance.randrange(now + 1, nproc + 1)
        targets.append(now if kind in ("leave", "join") else None)
    return targets
