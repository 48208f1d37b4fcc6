"""Where in the user's own code something happens."""

from __future__ import annotations

import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import paceline

_PACELINE = str(Path(paceline.__file__).parent) + "/"
_LIBRARIES = (
    "<",
    str(Path(torch.__file__).parent) + "/",
    sysconfig.get_path("stdlib") + "/",
    sysconfig.get_path("purelib") + "/",
    sysconfig.get_path("platlib") + "/",
)


def is_own(path: str) -> bool:
    """Whether a file is the user's, or a recipe's, rather than a library's."""
    if path.startswith(_PACELINE):
        return path.startswith(_PACELINE + "recipes/")
    return not path.startswith(_LIBRARIES)


def own_caller(frame: FrameType | None) -> str | None:
    """FILE:LINE of the innermost frame that is the user's; None where there is none."""
    while frame is not None:
        if is_own(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def definition(method: Callable[..., Any]) -> str | None:
    """FILE:LINE of a method's definition, where it is the user's."""
    code = inspect.unwrap(getattr(method, "__func__", method)).__code__
    return f"{code.co_filename}:{code.co_firstlineno}" if is_own(code.co_filename) else None


class LastMean(TorchFunctionMode):
    """Notes where many numbers were last made into one: in a loss, that is its mean.

    Attributes:
        place: FILE:LINE.
    """

    place: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dim() == 0:
            tensors = [value for value in args if isinstance(value, torch.Tensor)]
            if any(value.numel() > 1 for value in tensors):
                self.place = own_caller(sys._getframe(1)) or self.place
        return result


@contextmanager
def calls_watched(is_meant: Callable[[FrameType, str, Any], bool]) -> Iterator[list[str]]:
    """Collect FILE:LINE of the user's code whenever it comes to a call that is meant.

    Args:
        is_meant: of a profiler's event (see :func:`sys.setprofile`).
    """
    places: list[str] = []

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call") and is_meant(frame, event, argument):
            place = own_caller(frame if event == "c_call" else frame.f_back)
            if place is not None and place not in places:
                places.append(place)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield places
    finally:
        sys.setprofile(before)
