"""Which rank failed first, and what to tell the user about it: one message, not one a rank. No torch."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.distributed.process import Failure, describe, read_failure
from paceline.run_directory import RunDirectory

STOPPED = (75, 130)
"""Exit codes of a worker that saved its state because a signal asked it to stop."""


@dataclass(frozen=True)
class Exit:
    """A process that ended.

    Attributes:
        rank: None for an agent that has ranks below it.
        code: its exit code; minus the signal's number where one killed it.
        time: seconds since the epoch.
        stopped: it ended after its launcher told it to.
        starter: its name where it is no rank, but has started some.
    """

    rank: int | None
    code: int
    time: float
    stopped: bool = False
    starter: str = ""


def conclude(
    directory: RunDirectory | None,
    exits: Sequence[Exit],
    asked: int | None,
    verdict: str = "",
    *,
    said_why: bool = False,
) -> int:
    """Print one message if a job failed; return its exit code.

    Args:
        directory: the run's.
        exits: of the job's processes.
        asked: the signal that asked the launcher to stop, if one did.
        verdict: what else to say about a failure, or why the launcher itself ended the job.
        said_why: a process that ended by itself has told of the ranks that it had started.
    """
    failure = first_failure(directory, exits)
    if failure is not None and failure.type == "Exited" and said_why:
        return failure.exit_code
    # While the ranks still join, a signal ends one at once, and the others lose it.
    if failure is not None and not (failure.victim and asked is not None):
        print(f"paceline: {describe(failure, directory)}", file=sys.stderr)
        if verdict:
            print(f"  {verdict}", file=sys.stderr)
        return failure.exit_code
    if verdict and asked is None:
        print(f"paceline: {verdict}", file=sys.stderr)
        return 1
    codes = {end.code for end in exits}
    if codes == {0}:
        return 0
    for code in STOPPED:
        if code in codes:
            return code
    # Stopped as asked, by processes that know no better than to die of the signal.
    return 128 + (asked or signal.SIGTERM)


def first_failure(directory: RunDirectory | None, exits: Sequence[Exit]) -> Failure | None:
    """The failure that brought the job down, or None where there was none.

    A recorded error is believed, unless it only says that a peer was lost. A process killed by a
    signal that its launcher did not send is a culprit. Among culprits the earliest wins; victims
    only count where there are no culprits.
    """
    failures = []
    for end in exits:
        if end.code == 0 or end.code in STOPPED:
            continue
        recorded = None
        if directory is not None and end.rank is not None:
            recorded = read_failure(directory.error_of(end.rank))
        if recorded is not None:
            if recorded.exit_code not in STOPPED:  # else it was done, and was killed on its way out
                failures.append(recorded)
        elif not end.stopped:
            failures.append(_unrecorded(directory, end))
    return min(failures, key=lambda failure: (failure.victim, failure.time, failure.rank), default=None)


def expand(end: Exit, directory: RunDirectory | None) -> list[Exit]:
    """The exits of the ranks below an agent, as they recorded them; its own code, always 1, says nothing."""
    if end.rank is not None or end.code == 0 or directory is None:
        return [end]
    recorded = [read_failure(path) for path in sorted(directory.logs.glob("rank-*.error.json"))]
    ranks = [Exit(f.rank, f.exit_code, f.time, end.stopped) for f in recorded if f is not None]
    # A worker that was killed records nothing: then the agent's own exit stands for it.
    return ranks if any(f is not None and not f.victim for f in recorded) else [*ranks, end]


def _unrecorded(directory: RunDirectory | None, end: Exit) -> Failure:
    if end.rank is None and end.code > 0:
        message = f"{end.starter} ended with exit code {end.code}; what is printed above says why"
        kind = "Exited"
    elif end.code < 0:
        name = (
            signal.Signals(-end.code).name if -end.code in signal.valid_signals() else f"signal {-end.code}"
        )
        hint = " (out of memory?)" if end.code == -signal.SIGKILL else ""
        kind, message = "Killed", f"was killed by {name}{hint}"
        if end.rank is None:
            message = f"{end.starter} {message}"
    else:
        kind, message = "Exited", f"exited with status {end.code}"
        # What rank 0 said is on the terminal; its log may be an earlier run's.
        last = _last_line(directory, end.rank) if end.rank else ""
        message += f": {last.rstrip('.')}" if last else ""
    return Failure(
        rank=-1 if end.rank is None else end.rank,
        time=end.time,
        type=kind,
        message=message,
        traceback="",
        victim=False,
        user_error=False,
        exit_code=end.code if end.code > 0 else 1,
    )


def _last_line(directory: RunDirectory | None, rank: int | None) -> str:
    """The last line that a rank printed: of an uncaught exception, its message."""
    if directory is None or rank is None:
        return ""
    try:
        with directory.log_of(rank).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - 4096))
            lines = [
                line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()
            ]
    except OSError:
        return ""
    return lines[-1] if lines else ""
