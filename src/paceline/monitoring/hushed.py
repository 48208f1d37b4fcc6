"""Other libraries' notes on their own inside, which are not for Paceline's users."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loggers_hushed(*names: str) -> Iterator[None]:
    """Without what these loggers say below an error."""
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


@contextmanager
def hushed(logger_name: str) -> Iterator[None]:
    """Without warnings, and without what a logger says below an error."""
    with loggers_hushed(logger_name), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
