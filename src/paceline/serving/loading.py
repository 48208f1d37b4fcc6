"""Models as replicas load them. Torch and onnxruntime are imported here, and only when one is loaded."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.errors import ConfigError, UserError
from paceline.serving.servable import Array, Arrays, ModelSpec, Servable, Source

if TYPE_CHECKING:
    import torch


def load(source: Source, spec: ModelSpec, device: str) -> Servable:
    """Load a model onto a device.

    A ``pt2`` program can run code when it is loaded: whoever calls this has made sure that it is trusted.

    Raises:
        UserError: its file is not the one that was verified, or the device cannot compute it.
    """
    if source.path:
        _check_unchanged(Path(source.path), source.sha256)
    if source.kind == "onnx":
        return OnnxServable(source, spec, device)
    return TorchServable(source, spec, device)


def _check_unchanged(path: Path, sha256: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise UserError(f"{path} has changed since it was verified: its SHA-256 is {found}, not {sha256}.")


class TorchServable:
    """A program of torch.export, or a task's own module, on a CPU thread or a GPU."""

    def __init__(self, source: Source, spec: ModelSpec, device: str) -> None:
        import torch

        self._device = torch.device(device)
        if self._device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"--devices {device}: torch finds no GPU here.")
        torch.set_grad_enabled(False)
        self._inputs = tuple(spec.inputs)
        self._outputs = tuple(spec.outputs)
        if source.kind == "pt2":
            from torch.export.passes import move_to_device_pass

            program = torch.export.load(source.path)
            if self._device.type != "cpu":
                program = move_to_device_pass(program, self._device)
            self._module: Any = program.module()
        else:
            self._module = _task_module(source).to(self._device)

    def predict(self, inputs: Arrays) -> dict[str, Array]:
        """Compute a batch."""
        tensors = [self._tensor(inputs[name]) for name in self._inputs]
        answer = self._module(*tensors)
        return {name: np.asarray(answer[name].cpu().numpy()) for name in self._outputs}

    def _tensor(self, array: Array) -> torch.Tensor:
        import torch

        # torch warns of arrays that it might write to, and it does not.
        writable = array if array.flags.writeable else array.copy()
        return torch.from_numpy(writable).to(self._device)


def _task_module(source: Source) -> torch.nn.Module:
    """The module of a task's ``build_inference``, with the weights of a file."""
    import torch
    from safetensors.torch import load_file

    from paceline.task import load_task

    task = load_task(source.task, dict(source.fields or {}))
    torch.manual_seed(0)
    model = task.build_model()
    if source.path:
        weights = load_file(source.path)
        _, unexpected = model.load_state_dict(weights, strict=False)
        if unexpected:
            raise UserError(f"{source.path} holds {', '.join(unexpected)}, which the task's model does not have.")
    inference = task.build_inference(model.eval())
    if inference is None:
        raise UserError(f"{source.task} does not define build_inference, so it cannot be served.")
    return inference.module.eval()


class OnnxServable:
    """A model under onnxruntime, without torch."""

    def __init__(self, source: Source, spec: ModelSpec, device: str) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise ConfigError(f"Serving ONNX takes onnxruntime: pip install 'paceline[onnx]' ({error})") from error
        providers = ["CPUExecutionProvider"]
        if device.startswith("cuda"):
            available = onnxruntime.get_available_providers()
            if "CUDAExecutionProvider" not in available:
                raise ConfigError(f"--devices {device}: this onnxruntime computes on {', '.join(available)}.")
            _, _, index = device.partition(":")
            providers = [("CUDAExecutionProvider", {"device_id": int(index or 0)})]  # type: ignore[list-item]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(source.path, options, providers=providers)
        self._outputs = tuple(spec.outputs)

    def predict(self, inputs: Arrays) -> dict[str, Array]:
        """Compute a batch."""
        answers = self._session.run(list(self._outputs), dict(inputs))
        return dict(zip(self._outputs, answers, strict=True))
