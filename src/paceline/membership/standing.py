"""What a rank tells of itself when a hang is suspected: from any thread but its main one. No torch."""

from __future__ import annotations

from time import monotonic

from paceline.distributed.activity import Activity
from paceline.distributed.process_state import describe_silence
from paceline.membership.channel import Standing
from paceline.stacks import all_stacks, frames_of, parse_frames, stacks_of, whereabouts

_LONGEST_STACKS = 24_000  # characters; a packet holds six times as many bytes


def standing_of(activity: Activity, generation: int, rank: int) -> Standing:
    """Where this process stands."""
    place = whereabouts(frames_of(activity.thread))
    stacks = all_stacks(first=activity.thread)
    helper = ""
    if activity.phase in ("data", "evaluation"):
        helper, theirs = _helper_at_work(activity)
        stacks += theirs
    now = monotonic()
    return Standing(
        generation=generation,
        rank=rank,
        step=activity.step,
        stage=activity.stage,
        phase=activity.phase,
        exchange=activity.exchange,
        entered=activity.entered,
        left=activity.left,
        stage_s=round(now - activity.since, 3),
        overdue=activity.overdue,
        still_s=round(now - activity.moved_at, 3),
        where=place.where,
        inside=place.inside,
        collective=place.collective,
        helper="" if place.is_users else helper,
        stacks=stacks[:_LONGEST_STACKS],
    )


def _helper_at_work(activity: Activity) -> tuple[str, str]:
    """Where the first helper is that is in the user's code, or cannot tell; and all helpers' stacks."""
    found, texts = "", []
    for pid in activity.helpers():
        stacks = stacks_of(pid)
        place = whereabouts(parse_frames(stacks))
        if place.is_users:
            at = f"which is in {place.where}"
        else:
            at = "" if stacks else f"which {describe_silence(pid) or 'has ended'}"
        found = found or (f"data worker {pid}, {at}" if at else "")
        texts.append(f"\nData worker {pid}:\n{stacks}")
    return found, "".join(texts)
