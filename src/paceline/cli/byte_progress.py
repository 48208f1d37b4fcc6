"""A bar for what is read or copied, by bytes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def byte_progress(doing: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, and none elsewhere.

    Args:
        doing: what is done, as one word.
        quiet: show none there either.

    Yields:
        What to call with the bytes done and those in all.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(doing), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("")
        yield lambda done, total: progress.update(task, completed=done, total=total)
