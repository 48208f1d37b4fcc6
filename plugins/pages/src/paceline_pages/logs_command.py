"""``paceline logs``: print or follow the output of a run's or a job's ranks."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from paceline.core.errors import ConfigError, RunDirectoryError
from paceline.core.standard_streams import printable_output
from paceline.launch.job_logs import Tail
from paceline.launch.job_records import JobRecord, find_record, read_records
from paceline.launch.status_poller import StatusPoller
from paceline.runs.directory import RunDirectory
from paceline.runs.failures import describe, read_failure
from paceline_pages.run_status import last_deciding

_TAB = "\t"
_POLL_S = 0.2
_RESTART_S = 5.0
"""How long a run without a lock and without a final event may be restarting."""

_FIRST_QUESTION_S, _LAST_QUESTION_S = 0.5, 10.0
"""First and longest interval between two queries of a job's state."""

_COLOURS = (36, 33, 32, 35, 34, 31)


def logs(
    run: Annotated[str, Parameter(help="The run's directory, or a job of paceline jobs.")],
    *,
    rank: Annotated[
        int | None, Parameter(help="Show only this rank. Default: all, with the rank numbers before each line.")
    ] = None,
    grep: Annotated[str | None, Parameter(help="Show only lines that match this regular expression.")] = None,
    follow: Annotated[
        bool,
        Parameter(name=["--follow", "-f"], negative="", help="Follow the output until the run ends or Ctrl-C."),
    ] = False,
    lines: Annotated[int, Parameter(name=["--lines", "-n"], help="Number of last lines of each rank.")] = 50,
) -> int:
    """Print the ranks' output: the last lines of each and, with -f, new lines as they come.

    A line of several ranks is printed once, and a repeated line with its count. If the run failed, the first
    error is printed first.
    """
    if lines < 0:
        raise ConfigError(f"--lines must be 0 or more, but is {lines}.")
    pattern = _compile_pattern(grep)
    directory = RunDirectory(Path(run))
    record = None if directory.exists() else _find_job(run)
    if record is not None and record.run is not None:
        directory = RunDirectory(Path(record.run))
    try:
        if record is not None and not ranks_with_logs(directory):
            return _print_job(record, pattern, rank, follow)
        if not directory.exists() and record is None:
            raise RunDirectoryError(
                f"{run} is not a run directory: it has no run.toml. `paceline runs` lists runs, `paceline jobs` jobs."
            )
        ranks = ranks_with_logs(directory)
        if rank is not None and rank not in ranks:
            raise RunDirectoryError(f"{run} has no log of rank {rank}. {_list_ranks(ranks)}")
        if not ranks and not follow:
            raise RunDirectoryError(f"{run} has no logs: it has not started yet. Use -f to wait for it.")
        if rank is None and grep is None and not follow:
            _print_first_error(directory)
        _print_logs(directory, rank, pattern, lines, _until_ended(directory, record) if follow else ())
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def _compile_pattern(grep: str | None) -> re.Pattern[str]:
    try:
        return re.compile(grep or "")
    except re.error as error:
        raise ConfigError(f"--grep {grep!r} is not a regular expression: {error}.") from error


def _find_job(text: str) -> JobRecord | None:
    """Return the job of that name; None if there is none, or if ``text`` looks like a path."""
    looks_like_a_path = os.sep in text or Path(text).exists()
    return find_record(text) if read_records() and not looks_like_a_path else None


def _print_job(record: JobRecord, pattern: re.Pattern[str], rank: int | None, follow: bool) -> int:
    if rank is not None:
        raise ConfigError(f"{record.id} keeps no log per rank. Leave out --rank.")
    printed = False
    for line in record.handle().logs(follow=follow):
        printed = True
        if pattern.search(line):
            print(line, flush=follow)
    if not printed:
        status = record.status()
        state = f"{status.state}, {status.detail}" if status.detail else status.state
        print(
            f"paceline: {record.id} has no recorded output. Its state is {state}.\n"
            f"  Its script and files: {record.directory}",
            file=sys.stderr,
        )
    return 0


def _print_first_error(directory: RunDirectory) -> None:
    """Print the first error of a run that did not end well.

    Records of ranks that only an earlier attempt had may exist too.
    """
    if last_deciding(directory.read_events()).get("event") in ("finished", "stopped"):
        return
    recorded = [read_failure(path) for path in directory.logs.glob("rank-*.error.json")]
    failures = [failure for failure in recorded if failure is not None]
    if failures:
        first = min(failures, key=lambda failure: (failure.victim, failure.time, failure.rank))
        print(f"first error: {describe(first, directory)}\n")


def ranks_with_logs(directory: RunDirectory) -> list[int]:
    """Return the ranks that have a log, in order."""
    files = (path for path in directory.logs.glob("rank-*.log") if path.is_file())
    names = (re.fullmatch(r"rank-(\d+)\.log", path.name) for path in files)
    return sorted(int(match[1]) for match in names if match)


def _list_ranks(ranks: list[int]) -> str:
    return f"Ranks with logs: {', '.join(map(str, ranks))}." if ranks else "There are no logs yet."


def _print_logs(
    directory: RunDirectory, rank: int | None, pattern: re.Pattern[str], lines: int, ticks: Iterable[None]
) -> None:
    """Print the last lines, and at each tick the new ones."""
    with ExitStack() as stack:
        tails: dict[int, Tail] = {}

        def open_new(last_lines: int | None) -> None:
            for number in ranks_with_logs(directory):
                if number not in tails and rank in (None, number):
                    tails[number] = stack.enter_context(Tail(directory.log_of(number), last_lines))

        def show(printed: Mapping[int, Sequence[str]]) -> None:
            found = {number: [line for line in own if pattern.search(line)] for number, own in printed.items()}
            # Written past the stream that main() sets up, which would escape the colours of the ranks.
            stdout = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
            if rank is not None:
                for line in found.get(rank, ()):
                    stdout.write(f"{printable_output(line, keep=_TAB)}\n")
            else:
                for ranks, line, times in merge_rank_lines(found):
                    count = f"  ({times} times)" if times > 1 else ""
                    stdout.write(f"{_prefix(ranks)}{printable_output(line, keep=_TAB)}{count}\n")
            stdout.flush()

        def show_new() -> None:
            show({number: list(tail.new_lines()) for number, tail in tails.items()})

        open_new(lines)
        show_new()
        for _ in ticks:
            # A rank whose log appears now is shown from its first line.
            open_new(None)
            show_new()
        unfinished = {number: tail.unfinished_line() for number, tail in tails.items()}
        show({number: [line] for number, line in unfinished.items() if line})


def _until_ended(directory: RunDirectory, record: JobRecord | None) -> Iterator[None]:
    """Yield regularly, and once more after the run has ended; a job's run has ended if the job has."""
    last_alive = time.monotonic()
    next_question, interval_s = 0.0, _FIRST_QUESTION_S
    poller: StatusPoller | None = None
    while True:
        now = time.monotonic()
        if directory.is_running():
            last_alive = now
            interval_s = _FIRST_QUESTION_S
            poller = None
        elif (_has_ended(directory) or now - last_alive > _RESTART_S) and now >= next_question:
            # A preempted job's run is stopped, and waits in the queue for its next start.
            if record is None:
                yield
                return
            poller = poller or StatusPoller(record.status)
            status = poller.answer(record.status)
            if status is not None and status.state not in ("pending", "running"):
                yield
                return
            next_question = now + interval_s
            interval_s = min(_LAST_QUESTION_S, 1.3 * interval_s)
        yield
        time.sleep(_POLL_S)


def _has_ended(directory: RunDirectory) -> bool:
    return last_deciding(directory.read_events()).get("event") in ("finished", "stopped", "failed")


def _prefix(ranks: Sequence[int]) -> str:
    text = f"{'rank' if len(ranks) == 1 else 'ranks'} {_compress_ranks(ranks)} | "
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return text
    return f"\x1b[{_COLOURS[ranks[0] % len(_COLOURS)]}m{text}\x1b[0m"


def _compress_ranks(ranks: Sequence[int]) -> str:
    """Return 0, 1, 2, 5 as 0-2,5."""
    parts: list[list[int]] = []
    for number in ranks:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def merge_rank_lines(lines: Mapping[int, Sequence[str]]) -> Iterator[tuple[tuple[int, ...], str, int]]:
    """Merge lines of several ranks: yield a line's ranks, the line, and its number of repetitions.

    The lines of each rank keep their order. A line that other ranks print later is delayed while something else
    can be printed first, so that a line of all ranks is yielded once.
    """
    pending = {rank: deque(_repeats(own)) for rank, own in sorted(lines.items()) if own}
    counts = {rank: Counter(own) for rank, own in pending.items()}
    num_ranks_with = Counter(line for own in counts.values() for line in own)
    ranks_at: dict[tuple[str, int], list[int]] = {}
    for rank, own in pending.items():
        ranks_at.setdefault(own[0], []).append(rank)
    # Order by how many ranks print a line later, then by the lowest rank that prints it now. Entries with outdated
    # numbers are skipped.
    order = [(num_ranks_with[line] - len(ranks), ranks[0], line) for line, ranks in ranks_at.items()]
    heapify(order)
    while order:
        later, lowest, chosen = heappop(order)
        ranks = ranks_at.get(chosen, [])
        if not ranks or (later, lowest) != (num_ranks_with[chosen] - len(ranks), ranks[0]):
            continue
        yield tuple(ranks), *chosen
        changed = {chosen}
        for rank in ranks_at.pop(chosen):
            own = pending[rank]
            counts[rank][own.popleft()] -= 1
            num_ranks_with[chosen] -= counts[rank][chosen] == 0
            if own:
                insort(ranks_at.setdefault(own[0], []), rank)
                changed.add(own[0])
        for line in changed:
            if ranks := ranks_at.get(line, []):
                heappush(order, (num_ranks_with[line] - len(ranks), ranks[0], line))


def _repeats(lines: Sequence[str]) -> Iterator[tuple[str, int]]:
    last, count = lines[0], 0
    for line in lines:
        if line == last:
            count += 1
        else:
            yield last, count
            last, count = line, 1
    yield last, count
