"""Language models: a model of transformers as a task, and ``hf:MODEL``, a pretrained one with a file of texts."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline_lm.language_model import LanguageModel as LanguageModel
    from paceline_lm.transformers import TransformersTask as TransformersTask

_MODULES = {"LanguageModel": "language_model", "TransformersTask": "transformers"}

__all__ = ["LanguageModel", "TransformersTask"]


def __getattr__(name: str) -> Any:
    # The help of commands needs neither torch nor transformers.
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
