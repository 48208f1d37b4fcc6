"""The options of a run."""

from paceline.config.documents import checked_keys, config_from_mapping, non_defaults, read_config_file
from paceline.config.options import flag
from paceline.config.run_config import RunConfig
from paceline.config.values import (
    Interval,
    Shuffle,
    parse_best,
    parse_duration_s,
    parse_early_stop,
    parse_hang_timeout,
    parse_interval,
    parse_nodes,
    parse_nproc,
    parse_shuffle,
)

__all__ = [
    "Interval",
    "RunConfig",
    "Shuffle",
    "checked_keys",
    "config_from_mapping",
    "flag",
    "non_defaults",
    "parse_best",
    "parse_duration_s",
    "parse_early_stop",
    "parse_hang_timeout",
    "parse_interval",
    "parse_nodes",
    "parse_nproc",
    "parse_shuffle",
    "read_config_file",
]
