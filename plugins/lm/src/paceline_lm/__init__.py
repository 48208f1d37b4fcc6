"""Language models: a model of transformers as a task, and ``hf:MODEL``, a pretrained one with a file of texts."""

from __future__ import annotations

from paceline_lm.language_model import LanguageModel
from paceline_lm.transformers import TransformersTask

__all__ = ["LanguageModel", "TransformersTask"]
