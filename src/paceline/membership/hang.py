"""Who keeps the others waiting: from what each rank says of itself to one sentence. Pure.

All ranks of a world take part in the same exchanges in the same order, and count them. So a rank that is
outside any, while others wait inside the next one, is the culprit, and they are its victims. A rank that
does not answer is a culprit whatever it did last. Where all of them wait, but not in the same exchange,
there is no one culprit: the program lets them disagree, and would do so again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.membership.channel import Standing


@dataclass(frozen=True)
class Silence:
    """A rank that does not answer.

    Attributes:
        rank: its rank.
        why: what is known of its process, as the end of a sentence; "" for nothing.
        stacks: of its threads, as far as they can be had.
    """

    rank: int
    why: str = ""
    stacks: str = ""


@dataclass(frozen=True)
class Finished:
    """A rank whose process has ended in good order.

    Attributes:
        rank: its rank.
    """

    rank: int


@dataclass(frozen=True)
class Verdict:
    """Who is to blame.

    Attributes:
        reasons: of each rank that keeps others waiting, what it does; none where all wait for each other.
        victims: ranks that wait.
        sentence: says so.
        certain: False where somebody still moves or may take its time: then they are only slow.
    """

    reasons: Mapping[int, str]
    victims: tuple[int, ...]
    sentence: str
    certain: bool

    @property
    def culprits(self) -> tuple[int, ...]:
        """The ranks that keep others waiting."""
        return tuple(sorted(self.reasons))

    @property
    def is_deadlock(self) -> bool:
        """Whether the ranks wait for each other, as they would again."""
        return not self.reasons


Told = Standing | Silence | Finished
"""What is known of a rank."""


def verdict(reports: Sequence[Told], nodes: Mapping[int, str] | None = None) -> Verdict:
    """Who keeps whom waiting.

    Args:
        reports: one a rank.
        nodes: the node of each rank; named where there are several.

    Returns:
        The verdict. It is certain where each culprit is silent, or is overdue and has not moved for half
        of the time that it has been at its stage.
    """
    standings = sorted((r for r in reports if isinstance(r, Standing)), key=lambda s: s.rank)
    silences = sorted((r for r in reports if isinstance(r, Silence)), key=lambda s: s.rank)
    names = _Names(nodes or {})
    inside = [s for s in standings if s.entered > s.left]
    # Who waits in a collective of the user's own waits too, and nobody else may know of it.
    in_users = [s for s in standings if s.entered == s.left and s.collective]
    at_work = [s for s in standings if s.entered == s.left and not s.collective]
    last = max((s.entered for s in inside), default=0)
    behind = [s for s in at_work if s.entered < last or not inside]
    waiting = [*inside, *in_users]
    victims = tuple(sorted(s.rank for s in waiting))
    if silences or behind:
        reasons = {s.rank: s.why or "does not answer" for s in silences}
        reasons |= {s.rank: _reason(s, inside) for s in behind}
        clauses = [f"{names((rank,))} {reason}" for rank, reason in reasons.items()]
        clauses += _of_victims(names, inside, in_users, told=bool(behind and inside))
        return Verdict(reasons, victims, "; ".join(clauses), all(map(_is_stuck, behind)))
    ahead = [s for s in at_work if s not in behind]
    finished = sorted(r.rank for r in reports if isinstance(r, Finished))
    sentence = _of_deadlock(names, inside, in_users, ahead, finished)
    return Verdict({}, victims, sentence, all(map(_is_stuck, standings)))


def _is_stuck(standing: Standing) -> bool:
    return standing.overdue and standing.still_s >= standing.stage_s / 2


def _reason(culprit: Standing, inside: Sequence[Standing]) -> str:
    """What it has not done, and where it is."""
    awaited = next((s for s in inside if s.entered == culprit.entered + 1), None)
    what = (
        f"has not entered {_exchange(awaited)}"
        if awaited is not None
        else f"has been at {_stage(culprit)} for {culprit.stage_s:.0f} s"
    )
    return f"{what}: {_place(culprit)}"


def _place(standing: Standing) -> str:
    if standing.helper:
        return f"it waits for its {standing.helper}"
    text = f"it is in {standing.where}" if standing.where else f"it is at {standing.phase}"
    return text + (f", inside {standing.inside}" if standing.inside else "")


def _of_victims(
    names: _Names, inside: Sequence[Standing], in_users: Sequence[Standing], told: bool
) -> list[str]:
    """Who waits; ``told``: the exchange was named already."""
    clauses = []
    groups = _by_exchange(inside)
    for exchange, ranks in groups.items():
        where = "" if told and len(groups) == 1 else f" in {exchange}"
        clauses.append(f"{names(ranks)} {_wait(ranks)}{where}")
    clauses += [f"{names((s.rank,))} waits in {s.collective}, called by {s.where}" for s in in_users]
    return clauses


def _of_deadlock(
    names: _Names,
    inside: Sequence[Standing],
    in_users: Sequence[Standing],
    ahead: Sequence[Standing],
    finished: Sequence[int],
) -> str:
    clauses = [f"{names(ranks)} {_are(ranks)} in {where}" for where, ranks in _by_exchange(inside).items()]
    clauses += [f"{names((s.rank,))} is in {s.collective}, called by {s.where}" for s in in_users]
    clauses += [f"{names((s.rank,))} has left it, and: {_place(s)}" for s in ahead]
    clauses += [f"{names((rank,))} has finished" for rank in finished]
    if len(clauses) == 1:
        return f"{clauses[0]}, and none of them gets any further: what they send each other does not arrive"
    return (
        f"the ranks wait for each other: {'; '.join(clauses)}. "
        "All of them must do the same exchanges in the same order, whatever their rank and data"
    )


def _by_exchange(inside: Sequence[Standing]) -> dict[str, tuple[int, ...]]:
    ranks: dict[str, tuple[int, ...]] = {}
    for standing in inside:
        name = _exchange(standing)
        ranks[name] = (*ranks.get(name, ()), standing.rank)
    return ranks


def _exchange(standing: Standing) -> str:
    return f"{standing.exchange} {standing.entered} of {_stage(standing)}"


def _stage(standing: Standing) -> str:
    if standing.stage in ("step", "first step"):
        return f"step {standing.step + 1}"
    if standing.stage in ("evaluation", "checkpoint"):
        return f"the {standing.stage} after step {standing.step}"
    return standing.stage


def _wait(ranks: Sequence[int]) -> str:
    return "waits for it" if len(ranks) == 1 else "wait for it"


def _are(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


class _Names:
    """Ranks in words: "rank 3 on node b", "ranks 0-2 and 5"."""

    def __init__(self, nodes: Mapping[int, str]) -> None:
        self._nodes = nodes if len(set(nodes.values())) > 1 else {}

    def __call__(self, ranks: Sequence[int]) -> str:
        if len(ranks) == 1:
            node = self._nodes.get(ranks[0])
            return f"rank {ranks[0]}" + (f" on node {node}" if node else "")
        runs: list[list[int]] = []
        for rank in sorted(ranks):
            if runs and rank == runs[-1][-1] + 1:
                runs[-1].append(rank)
            else:
                runs.append([rank])
        words = [f"{r[0]}-{r[-1]}" if len(r) > 2 else " and ".join(map(str, r)) for r in runs]
        return "ranks " + (", ".join(words) if len(words) != 2 else " and ".join(words))
