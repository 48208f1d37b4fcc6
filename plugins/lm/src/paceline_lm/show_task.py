"""``paceline show-task hf:MODEL ...``: the task as a Python class, to edit and to train."""

from __future__ import annotations

import inspect
import json
import textwrap
from typing import Annotated, Any

from cyclopts import Parameter

from paceline.core.errors import ConfigError
from paceline.core.task_loading import TaskReference, parse_assignments

_FILE = '''\
"""Train it by: paceline train FILE.py:MyTask"""

import math
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from paceline_lm import LanguageModel


@dataclass
class MyTask(LanguageModel):
{fields}

    def build_model(self):
        # A transformers.PreTrainedModel, in float32, which is what is trained: change its config, freeze or add parts.
        return super().build_model()

    def build_dataset(self, split):
        # "train" or "val". Samples are mappings with "input_ids" and "labels", of which -100 does not count.
        return super().build_dataset(split)

{methods}

    def loss(self, model, batch):
        # The sum over a batch and its weight: paceline.Loss(sum, weight), or a mean.
        return super().loss(model, batch)
'''


def show_task(
    task: str,
    *,
    set: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
) -> int:
    """Print TASK as a Python class with its flags as fields, to be changed and trained: the same bits.

    Args:
        task: hf:MODEL, with the flags of paceline train hf:MODEL, such as --data FILE and --pack.
        set: A hyperparameter as field=value; may be repeated.
    """
    from paceline_lm.language_model import LanguageModel
    from paceline_lm.transformers import TransformersTask

    given = parse_assignments(set)
    loaded = TaskReference(task, given).load()
    if type(loaded) is not LanguageModel:
        raise ConfigError(f"show-task writes tasks of hf:MODEL as a class; {task} is one already.")
    kinds = {
        name: hint for kind in reversed(LanguageModel.__mro__) for name, hint in inspect.get_annotations(kind).items()
    }
    values = {name: getattr(loaded, name) for name in given}
    literals = {name: json.dumps(each) if isinstance(each, str) else repr(each) for name, each in values.items()}
    fields = [f"    {name}: {kinds[name]} = {literal}" for name, literal in literals.items()]
    methods: list[Any] = [TransformersTask.build_optimizer, TransformersTask.build_scheduler]
    sources = [textwrap.indent(textwrap.dedent(inspect.getsource(method)), "    ") for method in methods]
    print(_FILE.format(fields="\n".join(fields), methods="\n".join(sources).rstrip()), end="")
    return 0
