"""Language models: a model of transformers as a Paceline task, :class:`TransformersTask`."""

from __future__ import annotations

from paceline_lm.transformers import TransformersTask

__all__ = ["TransformersTask"]
