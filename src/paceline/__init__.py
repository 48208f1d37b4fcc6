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

    # Those of plug-ins: a type checker exports what is imported "as" itself, and ``*`` imports none of them.
    from paceline.core.built_in import Categories as Categories
    from paceline.core.built_in import Dates as Dates
    from paceline.core.built_in import FunctionJob as FunctionJob
    from paceline.core.built_in import LightningTask as LightningTask
    from paceline.core.built_in import LoopStep as LoopStep
    from paceline.core.built_in import Run as Run
    from paceline.core.built_in import TaskJob as TaskJob
    from paceline.core.built_in import Tokenizer as Tokenizer
    from paceline.core.built_in import TransformersTask as TransformersTask
    from paceline.core.built_in import Vocabulary as Vocabulary
    from paceline.core.built_in import log_histogram as log_histogram
    from paceline.core.built_in import log_image as log_image
    from paceline.core.built_in import log_text as log_text
    from paceline.core.built_in import submit as submit
    from paceline.core.built_in import submit_array as submit_array
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
    "Loss",
    "NonFiniteLossError",
    "NondeterminismError",
    "PacelineError",
    "PackageError",
    "PeerLostError",
    "PurityError",
    "RankInfo",
    "Result",
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
