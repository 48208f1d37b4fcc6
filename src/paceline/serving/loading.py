"""Models as replicas load them. Torch and onnxruntime are imported here, and only when one is loaded."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, PackageError
from paceline.packages.package import Package, read_manifest
from paceline.serving.servable import Array, Arrays, ModelSpec, Servable, Source


def load(source: Source, spec: ModelSpec, device: str) -> Servable:
    """Load a model onto a device.

    Raises:
        PackageError: the package is not the one that was verified, or is not trusted.
        ConfigError: the device is not there, or a library is not.
    """
    package = _package(source)
    if source.kind == "onnx":
        return OnnxServable(package.read_program("onnx"), spec, device)
    return TorchServable(_module(package, source, device), spec, device)


def _package(source: Source) -> Package:
    path = Path(source.package)
    manifest, digest = read_manifest(path)
    if digest != source.digest:
        raise PackageError(f"package {path} was exchanged: its digest is {digest}, not {source.digest}.")
    return Package(path, manifest, digest)


def _module(package: Package, source: Source, device: str) -> Any:
    """What computes a batch of tensors, on its device; without gradients."""
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--devices {device}: torch finds no GPU here.")
    torch.set_grad_enabled(False)
    if source.kind == "task":
        from paceline.exporting.loading import load_with_task

        return load_with_task(package, source.task).module.eval().to(device)
    from torch.export.passes import move_to_device_pass

    program = torch.export.load(io.BytesIO(package.read_program("pt2")))
    if device != "cpu":
        program = move_to_device_pass(program, device)
    return program.module()


class TorchServable:
    """A program of torch.export, or a task's own module, on a CPU thread or a GPU."""

    def __init__(self, module: Any, spec: ModelSpec, device: str) -> None:
        self._module = module
        self._device = device
        self._inputs = tuple(spec.inputs)
        self._outputs = tuple(spec.outputs)

    def predict(self, inputs: Arrays) -> dict[str, Array]:
        """Compute a batch."""
        import torch

        tensors = [torch.from_numpy(inputs[name]).to(self._device) for name in self._inputs]
        answer = self._module(*tensors)
        return {name: answer[name].cpu().numpy() for name in self._outputs}


class OnnxServable:
    """A model under onnxruntime, without torch."""

    def __init__(self, model: bytes, spec: ModelSpec, device: str) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise ConfigError(
                f"Serving ONNX takes onnxruntime: pip install 'paceline[onnx]' ({error})"
            ) from error
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
        self._session = onnxruntime.InferenceSession(model, options, providers=providers)
        self._outputs = tuple(spec.outputs)

    def predict(self, inputs: Arrays) -> dict[str, Array]:
        """Compute a batch."""
        answers = self._session.run(list(self._outputs), dict(inputs))
        return dict(zip(self._outputs, answers, strict=True))
