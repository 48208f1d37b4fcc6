"""A state whose tensors lie on several stages' ranks, as one process would have it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import distributed as dist

from paceline.distributed.world import World, lost_peers_reported

_Path = tuple[str | int, ...]


def gathered(state: Any, part: World) -> Any:
    """The whole state on the first rank of ``part``; its own on the others. All of them call it together.

    What the first rank lacks (a tensor on the ``meta`` device, or an optimizer's state that is not there) it
    gets from the first one that has it; one tensor at a time is on the way.

    Args:
        state: mappings, lists and tuples of tensors and other values.
        part: the ranks that hold one copy of the model.
    """
    leaves = dict(_leaves(state, ()))
    known = {_text(path) for path, leaf in leaves.items() if not _is_meta(leaf)} if part.rank == 0 else set()
    known = set(part.broadcast_json(sorted(known)))
    mine = (
        {}
        if part.rank == 0
        else {p: v for p, v in leaves.items() if not _is_meta(v) and _text(p) not in known}
    )
    offers = part.all_gather_json([_offer(path, leaf) for path, leaf in mine.items()])
    taken: dict[_Path, Any] = {}
    for source in range(1, part.world_size):
        for path_list, value, dtype, shape in offers[source]:
            path = tuple(path_list)
            if path in taken:
                continue
            taken[path] = value
            if dtype is None:
                continue
            if part.rank == 0:
                taken[path] = torch.empty(shape, dtype=getattr(torch, dtype))
                _exchange(part, taken[path], source=source)
            elif part.rank == source:
                _exchange(part, leaves[path].detach().cpu().contiguous(), source=None)
    return _with(state, _tree(taken)) if part.rank == 0 else state


def _exchange(part: World, tensor: torch.Tensor, *, source: int | None) -> None:
    if not tensor.numel():
        return
    with lost_peers_reported():
        if source is None:
            dist.send(tensor, group=part.group, group_dst=0)
        else:
            dist.recv(tensor, group=part.group, group_src=source)


def _offer(path: _Path, leaf: Any) -> list[Any]:
    if isinstance(leaf, torch.Tensor):
        return [list(path), None, str(leaf.dtype).removeprefix("torch."), list(leaf.shape)]
    return [list(path), leaf, None, None]


def _leaves(state: Any, path: _Path) -> Iterator[tuple[_Path, Any]]:
    if isinstance(state, Mapping):
        for name, value in state.items():
            yield from _leaves(value, (*path, name))
    elif isinstance(state, list | tuple):
        for number, value in enumerate(state):
            yield from _leaves(value, (*path, number))
    else:
        yield path, state


def _with(state: Any, taken: Any) -> Any:
    """The state with what was taken, a tree of the same form, in its places."""
    if isinstance(state, Mapping):
        names = [*state, *(name for name in taken if name not in state)]
        if all(isinstance(name, int) for name in names):
            names.sort()  # an optimizer's states are by the number of the parameter
        return {name: _merged(state, taken, name) for name in names}
    return type(state)(_merged(dict(enumerate(state)), taken, number) for number in range(len(state)))


def _merged(state: Mapping[Any, Any], taken: Mapping[Any, Any], name: Any) -> Any:
    if name not in taken:
        return state[name]
    if name in state and isinstance(state[name], Mapping | list | tuple):
        return _with(state[name], taken[name])
    return taken[name]


def _tree(taken: Mapping[_Path, Any]) -> dict[Any, Any]:
    tree: dict[Any, Any] = {}
    for path, value in taken.items():
        branch = tree
        for name in path[:-1]:
            branch = branch.setdefault(name, {})
        branch[path[-1]] = value
    return tree


def _is_meta(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_meta


def _text(path: _Path) -> str:
    return repr(path)
