"""The short forms in which Slurm writes lists, and the allocation that a command is typed in."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

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


def expand_hosts(node_list: str) -> tuple[str, ...]:
    """Every host of a Slurm node list: ``gpu[03-04,12],login1`` -> gpu03, gpu04, gpu12, login1.

    Raises:
        ConfigError: the text is no node list.
    """
    hosts: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", node_list):
        expanded = [""]
        for text, numbers in re.findall(r"([^\[]+)|\[([^\]]*)\]", part):
            choices = [text] if text else _numbers(numbers, node_list)
            expanded = [before + choice for before in expanded for choice in choices]
        hosts += expanded
    if not hosts or not all(hosts):
        raise ConfigError(f"a node list of Slurm's has no host in it: {node_list!r}.")
    return tuple(hosts)


def allocation_nodes(environ: Mapping[str, str] = os.environ) -> int | None:
    """How many nodes the allocation has that this process is in, as under ``salloc``; None outside of one."""
    if "SLURM_JOB_ID" not in environ:
        return None
    text = environ.get("SLURM_JOB_NUM_NODES", "1")
    if not text.isdigit():
        raise ConfigError(f"SLURM_JOB_NUM_NODES must be a number, but is {text!r}.")
    return int(text)


def _numbers(text: str, node_list: str) -> list[str]:
    """``03-05,9`` -> 03, 04, 05, 9."""
    numbers: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise ConfigError(f"a node list of Slurm's is malformed: {node_list!r}.")
        first, last = match[1], match[2] or match[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers
