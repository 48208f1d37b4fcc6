"""Import torch and the task: ``python -m paceline.launch.preflight.imports TASK``.

Prints a line of JSON for torch, and one for the task, if any, as soon as each is known, since an import may
crash the process.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any


def torch_facts() -> dict[str, Any]:
    """Return the versions that torch was built with, the GPUs that it sees and should, or the error of its import."""
    from paceline.core.gpus import visible_gpus

    try:
        import torch

        facts: dict[str, Any] = {
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "gpus": torch.cuda.device_count(),
            "visible": visible_gpus(),
            "cudnn": None,
            "nccl": None,
        }
        if torch.version.cuda is not None:
            facts["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
            with contextlib.suppress(Exception):
                facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        return facts
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".strip().partition("\n")[0]}


def task_facts(spec: str) -> dict[str, Any]:
    """Return the bytes of the task's model, or the error of its import."""
    from paceline.core.errors import PacelineError

    try:
        from paceline.core.task_loading import load_task_class

        task_class = load_task_class(spec)
    except PacelineError as error:
        return {"error": str(error).partition("\n")[0]}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
    facts: dict[str, Any] = {"model_bytes": None}
    # The meta device needs no computation or memory; a model that cannot be built on it is still valid.
    with contextlib.suppress(Exception):
        import torch

        with torch.device("meta"):
            model = task_class().build_model()
        tensors = [*model.parameters(), *model.buffers()]
        facts["model_bytes"] = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return facts


def main(task: str) -> None:
    """Print the facts; redirect the task's own output to stderr."""
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        print(json.dumps({"torch": torch_facts()}), file=out, flush=True)
        if task:
            print(json.dumps({"task": task_facts(task)}), file=out, flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
