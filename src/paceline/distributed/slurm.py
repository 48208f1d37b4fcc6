"""The short forms in which Slurm writes lists."""

from __future__ import annotations

import re

from paceline.errors import ConfigError


def first_host(node_list: str) -> str:
    """The first host of a Slurm node list: ``gpu[03-07,12],login1`` -> ``gpu03``.

    Raises:
        ConfigError: the text holds no host.
    """
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", node_list)
    if match is None:
        raise ConfigError(f"SLURM_STEP_NODELIST has no host in it: {node_list!r}.")
    return f"{match[1]}{match[2] or ''}{match[3]}"


def tasks_per_node(text: str) -> list[int]:
    """Tasks on each node, of Slurm's short form: ``2(x3),1`` -> [2, 2, 2, 1].

    Raises:
        ConfigError: the text has another form.
    """
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE is malformed: {text!r}.")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks
