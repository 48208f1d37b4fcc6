"""What the :class:`~paceline.membership.leadership.Leadership` of one agent tells that of another. No torch.

Every message carries the last roster that its sender knows to be committed, so that whoever hears from
anybody is up to date. As JSON objects they travel over :class:`~paceline.agent.link.Link`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from paceline.errors import PacelineError
from paceline.membership.roster import Roster, Term, Vote


@dataclass(frozen=True)
class Claim:
    """The sender asks to lead in this term; there is no answer from who has a leader that it can reach."""

    kind: ClassVar[str] = "claim"
    term: Term
    committed: Roster


@dataclass(frozen=True)
class Promise:
    """The sender follows nobody of a lower term any more.

    Attributes:
        accepted: what it has accepted to follow ``committed``; it may be committed without its knowing.
    """

    kind: ClassVar[str] = "promise"
    term: Term
    committed: Roster
    accepted: Vote | None


@dataclass(frozen=True)
class Refuse:
    """The sender does not do what was asked of it.

    Attributes:
        term: of what was asked.
        promised: the sender's own.
    """

    kind: ClassVar[str] = "refuse"
    term: Term
    committed: Roster
    promised: Term


@dataclass(frozen=True)
class Propose:
    """The sender proposes the roster that is to follow ``committed``."""

    kind: ClassVar[str] = "propose"
    term: Term
    committed: Roster
    roster: Roster


@dataclass(frozen=True)
class Accept:
    """The sender has accepted the proposal of this term for this generation."""

    kind: ClassVar[str] = "accept"
    term: Term
    committed: Roster
    generation: int


@dataclass(frozen=True)
class Announce:
    """The term's node leads, or has led if it is in ``committed`` no more."""

    kind: ClassVar[str] = "announce"
    term: Term
    committed: Roster


@dataclass(frozen=True)
class Resign:
    """The term's node leads no more: too few of the roster can be reached from it."""

    kind: ClassVar[str] = "resign"
    term: Term
    committed: Roster


Message = Claim | Promise | Refuse | Propose | Accept | Announce | Resign

_KINDS: dict[str, type[Any]] = {
    kind.kind: kind for kind in (Claim, Promise, Refuse, Propose, Accept, Announce, Resign)
}
KINDS = frozenset(_KINDS)


class VoteError(PacelineError):
    """What came from another agent is no message of this protocol."""


def encode(message: Message) -> dict[str, Any]:
    """A message as a JSON object; its ``kind`` is one of ``KINDS``."""
    return {"kind": message.kind, **{f.name: _plain(getattr(message, f.name)) for f in fields(message)}}


def decode(document: Mapping[str, Any]) -> Message:
    """The message of a JSON object.

    Raises:
        VoteError: it is none.
    """
    try:
        values = dict(document)
        kind = _KINDS[values.pop("kind")]
        message: Message = kind(**{name: _READERS[name](value) for name, value in values.items()})
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise VoteError(f"an agent's message cannot be read: {str(document)[:200]}") from error
    return message


def _plain(value: Any) -> Any:
    match value:
        case Term(number, node):
            return [number, node]
        case Roster(generation, nodes):
            return [generation, list(nodes)]
        case Vote(term, roster):
            return [_plain(term), _plain(roster)]
    return value


def _int(value: Any) -> int:
    if type(value) is not int:
        raise TypeError
    return value


def _str(value: Any) -> str:
    if type(value) is not str:
        raise TypeError
    return value


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError
    return value


def _term(value: Any) -> Term:
    number, node = _list(value)
    return Term(_int(number), _str(node))


def _roster(value: Any) -> Roster:
    generation, nodes = _list(value)
    return Roster(_int(generation), tuple(_str(node) for node in _list(nodes)))


def _vote(value: Any) -> Vote | None:
    if value is None:
        return None
    term, roster = _list(value)
    return Vote(_term(term), _roster(roster))


_READERS = {
    "term": _term,
    "promised": _term,
    "committed": _roster,
    "roster": _roster,
    "accepted": _vote,
    "generation": _int,
}
