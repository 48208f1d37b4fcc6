"""What a run's directory keeps of a hang: an event, and where each rank was."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from paceline.membership.channel import Standing
from paceline.membership.hang import Finished, Silence, Told, Verdict
from paceline.run_directory import RunDirectory


def record_hang(directory: RunDirectory, verdict: Verdict, reports: Sequence[Told]) -> Path:
    """Add an event, and write ``hangs/TIME/rank-N.txt``; return that folder, whether or not that worked."""
    folder = directory.hangs / time.strftime("%Y%m%d-%H%M%S")
    step = max((r.step for r in reports if isinstance(r, Standing)), default=-1)
    # A full disk is no reason to let the ranks hang.
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        for report in reports:
            (folder / f"rank-{report.rank}.txt").write_text(_page(report), encoding="utf-8")
    with suppress(OSError):
        directory.append_event(
            "hang",
            step=step,
            culprits=list(verdict.culprits),
            victims=list(verdict.victims),
            sentence=verdict.sentence,
            stacks=str(folder.relative_to(directory.path)),
        )
    return folder


def record_slow(directory: RunDirectory, verdict: Verdict) -> None:
    """Add an event: these ranks hold the others up, but they do move."""
    with suppress(OSError):
        directory.append_event("slow", ranks=list(verdict.culprits), sentence=verdict.sentence)


def _page(report: Told) -> str:
    if isinstance(report, Finished):
        return f"rank {report.rank} has finished\n"
    if isinstance(report, Silence):
        return f"rank {report.rank} {report.why or 'does not answer'}\n\n{report.stacks}"
    position = "inside" if report.entered > report.left else "after"
    return (
        f"rank {report.rank}: {report.step} steps done, at {report.stage} for {report.stage_s:.1f} s, "
        f"the last {report.still_s:.1f} s of it in {report.phase}; {position} exchange {report.entered}"
        f"{f' ({report.exchange})' if report.exchange else ''}\n"
        f"where: {report.where}\ninside: {report.inside}\n\n{report.stacks}"
    )
