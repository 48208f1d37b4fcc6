"""Paceline: exact, reproducible distributed training on PyTorch.

A task is written once and runs on one process or on many, under any launcher; the model that
comes out is the same, bit for bit. Everything here is loaded when it is first used, so that
``import paceline`` costs nothing and imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.api import Result, fit, load
    from paceline.core.errors import (
        CheckpointError,
        CheckpointWriteError,
        ConfigError,
        DataError,
        ExportError,
        HangError,
        LaunchError,
        NondeterminismError,
        NonFiniteLossError,
        PacelineError,
        PackageError,
        PeerLostError,
        PurityError,
        RunDirectoryError,
        RunDirectoryWriteError,
        RunInUseError,
        ServingError,
        SilentDataCorruptionError,
        StopRequested,
        TaskError,
        UntrustedError,
        UserError,
    )
    from paceline.core.inference import InferenceSignature, TensorSpec
    from paceline.core.task import BatchInfo, Callback, Defaults, Loss, RankInfo, RunSchedule, Task, TrainStep
    from paceline.own_loop import LoopStep, Run

    # Those of plug-ins, which ``built_in.NAMES`` finds; a type checker exports what is imported "as" itself.
    from paceline_frameworks.submit import FunctionJob as FunctionJob
    from paceline_frameworks.submit import TaskJob as TaskJob
    from paceline_frameworks.submit import submit as submit
    from paceline_frameworks.submit import submit_array as submit_array
    from paceline_lightning import LightningTask as LightningTask
    from paceline_lm import TransformersTask as TransformersTask
    from paceline_serving.encodings import Categories as Categories
    from paceline_serving.encodings import Dates as Dates
    from paceline_serving.texts import Tokenizer as Tokenizer
    from paceline_serving.texts import Vocabulary as Vocabulary
    from paceline_trackers.media import log_histogram as log_histogram
    from paceline_trackers.media import log_image as log_image
    from paceline_trackers.media import log_text as log_text

__version__ = "0.1.0"

__all__ = [
    "BatchInfo",
    "Callback",
    "CheckpointError",
    "CheckpointWriteError",
    "ConfigError",
    "DataError",
    "Defaults",
    "ExportError",
    "HangError",
    "InferenceSignature",
    "LaunchError",
    "LoopStep",
    "Loss",
    "NonFiniteLossError",
    "NondeterminismError",
    "PacelineError",
    "PackageError",
    "PeerLostError",
    "PurityError",
    "RankInfo",
    "Result",
    "Run",
    "RunDirectoryError",
    "RunDirectoryWriteError",
    "RunInUseError",
    "RunSchedule",
    "ServingError",
    "SilentDataCorruptionError",
    "StopRequested",
    "Task",
    "TaskError",
    "TensorSpec",
    "TrainStep",
    "UntrustedError",
    "UserError",
    "__version__",
    "fit",
    "load",
]

_HOME = {
    "paceline.api": ("Result", "fit", "load"),
    "paceline.core.errors": tuple(name for name in __all__ if name.endswith("Error") or name == "StopRequested"),
    "paceline.core.inference": ("InferenceSignature", "TensorSpec"),
    "paceline.core.task": (
        *("BatchInfo", "Callback", "Defaults", "Loss"),
        *("RankInfo", "RunSchedule", "Task", "TrainStep"),
    ),
    "paceline.own_loop": ("LoopStep", "Run"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import an exported name when it is first used."""
    if name not in _MODULE_OF:
        from paceline.core.built_in import NAMES

        if name not in NAMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        _MODULE_OF[name] = NAMES[name].partition(":")[0]
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the exported names, loaded or not."""
    return sorted({*globals(), *__all__})
