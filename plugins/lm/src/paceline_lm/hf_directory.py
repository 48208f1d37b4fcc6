"""``paceline export --format hf``: a directory that transformers, vLLM, TRL and lm_eval load by its path."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path

import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.utils import logging

from paceline.core.errors import ExportError
from paceline.export.formats import Quantization
from paceline_lm.directories import ModelToWrite, export_directory
from paceline_lm.transformers import TransformersTask


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def write_hf(trained: ModelToWrite, directory: Path, quantization: Quantization | None) -> nn.Module:
    """Write a model, and its tokenizer where the task has one.

    Args:
        trained: its module is a ``PreTrainedModel``; adapters are merged into it.

    Returns:
        The model that transformers loads from the directory.

    Raises:
        ExportError: transformers does not have the model's class, or the quantization is another.
    """
    model, task = trained.module, trained.task
    if not isinstance(model, PreTrainedModel):
        raise ExportError(f"--format hf is for models of transformers; the task's is a {type(model).__name__}.")
    name = type(model).__name__
    if model.config.model_type not in CONFIG_MAPPING or getattr(transformers, name, None) is not type(model):
        raise ExportError(
            f"--format hf: transformers has no {name}, so it would load this directory as another model, or not at "
            "all. Build the model of a class of transformers' own."
        )
    if quantization == "int8":
        raise ExportError("--format hf writes no int8 weights. Use --quantize bf16, or leave it out.")
    written = model if quantization is None else deepcopy(model).bfloat16()
    with _without_progress_bars():
        written.save_pretrained(directory)
        tokenizer = task.build_tokenizer() if isinstance(task, TransformersTask) else None
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)
        loaded: nn.Module = getattr(transformers, name).from_pretrained(
            directory,
            local_files_only=True,
            trust_remote_code=False,
            attn_implementation=model.config._attn_implementation,
        )
    return loaded if quantization is None else loaded.float()


export_hf = partial(export_directory, "hf", write_hf)
