"""Which modules of a model are a block: what is gathered, or computed again, as one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from torch import nn

from paceline.errors import ConfigError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)


def blocks(module: nn.Module, wrap: str, option: str = "--fsdp-wrap") -> list[nn.Module]:
    """The modules below ``module`` that are one block each, inner ones first.

    Args:
        module: the model.
        wrap: "whole", class names with commas, or a number of parameters such as 1M: the smallest modules
            that hold so many.
        option: where ``wrap`` was given.

    Raises:
        ConfigError: ``wrap`` is none of its forms, or names a class that the model does not have.
    """
    if wrap == "whole":
        return []
    size = re.fullmatch(r"(\d+)([KMG]?)", wrap)
    if size:
        return _by_size(module, int(size[1]) * _UNITS[size[2]])
    names = [name.strip() for name in wrap.split(",")]
    there = {type(child).__name__ for child in module.modules()}
    missing = [name for name in names if name not in there]
    if missing:
        raise ConfigError(
            f"{option} {wrap}: the model has no module of class {missing[0]}. It has: "
            f"{', '.join(sorted(there))}. Give a class, a number of parameters such as 1M, or whole."
        )
    found = [child for child in module.modules() if type(child).__name__ in names and child is not module]
    return list(reversed(found))


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """The members of the model's lists that are made of modules themselves, such as a transformer's blocks.

    A list within a list is looked into; what is inside of a block is not.
    """
    found: list[nn.Module] = []
    for child in module.children():
        inside = repeated_blocks(child)
        composite = any(True for _ in child.children()) and any(True for _ in child.parameters())
        listed = isinstance(module, _LISTS) and composite and not isinstance(child, _NEVER_CALLED)
        if listed and not (isinstance(child, _LISTS) and inside):
            found.append(child)
        else:
            found += inside
    return found


def untied(module: nn.Module, found: Iterable[nn.Module]) -> list[nn.Module]:
    """Those of the modules that share no parameter with what lies outside of them.

    A parameter that two modules share, each sharded by itself, would become two. What is dropped here is
    gathered with the smallest module around it that is not: its parameters are all there.

    Args:
        module: the model.
        found: modules below it, inner ones first.
    """
    everywhere = _places(module)
    times = Counter(id(child) for _, child in module.named_modules(remove_duplicate=False))
    kept: list[nn.Module] = []
    taken: set[int] = set()
    for child in found:
        own = {key: number for key, number in _places(child).items() if key not in taken}
        if all(times[id(child)] * number == everywhere[key] for key, number in own.items()):
            kept.append(child)
            taken |= own.keys()
    return kept


def _places(module: nn.Module) -> Counter[int]:
    """How often each parameter, by its identity, is in the tree of modules."""
    return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))


def _by_size(module: nn.Module, least: int) -> list[nn.Module]:
    """The smallest modules with at least so many parameters that no block inside has."""
    found: list[nn.Module] = []

    def visit(parent: nn.Module, is_root: bool) -> int:
        left = sum(parameter.numel() for parameter in parent.parameters(recurse=False))
        left += sum(visit(child, False) for child in parent.children())
        # What has no forward of its own is never called.
        if is_root or left < least or isinstance(parent, _NEVER_CALLED):
            return left
        found.append(parent)
        return 0

    visit(module, True)
    return found
