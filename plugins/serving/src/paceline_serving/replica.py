"""The program of a replica, the only part of the server that imports torch."""

from __future__ import annotations

import io
import os
import re
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from paceline.core.errors import ConfigError, PacelineError, PackageError
from paceline.export.onnx_program import OnnxProgram, require_onnxruntime
from paceline.runs.package import Package, read_manifest
from paceline_serving import frames
from paceline_serving.exact import ExactServable
from paceline_serving.model import Array, Arrays, ModelLocation, ModelSpec, Servable, example

# --- Loading of models. Torch and onnxruntime are imported only when a model needs them ---


def load(source: ModelLocation, spec: ModelSpec, device: str) -> Servable:
    """Load a model onto a device.

    Raises:
        PackageError: the package is not the one that was verified, or is not trusted.
        ConfigError: the device or a library is missing.
    """
    path = Path(source.package)
    manifest, digest = read_manifest(path)
    if digest != source.digest:
        raise PackageError(f"package {path} was replaced: its digest is {digest}, not {source.digest}.")
    package = Package(path, manifest, digest)
    if source.kind == "onnx":
        return OnnxServable(package.read_program("onnx"), package.read, spec, device)
    return TorchServable(_module(package, source, device), spec, device)


def _module(package: Package, source: ModelLocation, device: str) -> Any:
    """Load the module that computes a batch of tensors on its device, without gradients."""
    import torch

    if device != "cpu":
        index, gpus = torch.device(device).index or 0, torch.cuda.device_count()
        if index >= gpus:
            raise ConfigError(f"--devices {device}: torch finds {gpus or 'no'} GPU{'s' * (gpus > 1)} on this node.")
        # A model's own code may allocate on "cuda", which is the current one.
        torch.cuda.set_device(index)
    torch.set_grad_enabled(False)
    if source.kind == "task":
        from paceline.export.formats import load_with_task

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
        import torch

        tensors = [torch.from_numpy(inputs[name]).to(self._device) for name in self._inputs]
        answer = self._module(*tensors)
        return {name: answer[name].cpu().numpy() for name in self._outputs}


class OnnxServable:
    """A model under onnxruntime, without torch; ``read`` returns a file of its package."""

    def __init__(self, model: bytes, read: Callable[[str], bytes], spec: ModelSpec, device: str) -> None:
        onnxruntime = require_onnxruntime()
        providers = ["CPUExecutionProvider"]
        if device.startswith("cuda"):
            available = onnxruntime.get_available_providers()
            if "CUDAExecutionProvider" not in available:
                raise ConfigError(f"--devices {device}: this onnxruntime supports only {', '.join(available)}.")
            _, _, index = device.partition(":")
            providers = [("CUDAExecutionProvider", {"device_id": int(index or 0)})]  # type: ignore[list-item]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        self._program = OnnxProgram(model, read, options, providers)
        self._outputs = tuple(spec.outputs)
        for side, expected, names in (
            ("inputs", spec.inputs, self._program.inputs),
            ("outputs", spec.outputs, self._program.outputs),
        ):
            if set(expected) - set(names) or (side == "inputs" and set(names) - set(expected)):
                raise PackageError(
                    f"the ONNX program has the {side} {', '.join(names)}, but the package says {', '.join(expected)}. "
                    "Export the run again."
                )

    def predict(self, inputs: Arrays) -> dict[str, Array]:
        return dict(zip(self._outputs, self._program.run(self._outputs, inputs), strict=True))


_WRONG_INDEX = re.compile(
    r"index out of range in self"  # torch's embedding
    r"|index -?\d+ is out of bounds"  # its other lookups
    r"|Class values must be (smaller than num_classes|non-negative)"  # its one_hot
    r"|out of data bounds"  # onnxruntime's Gather
)


# --- The program: ``python -m paceline_serving.replica FD`` ---
#
# It loads one model, reports that it is ready, and answers one batch after another over the socket pair ``FD``
# until the peer closes it. One thread computes on a CPU; more replicas use more cores.


def main(descriptor: int) -> int:
    """Serve the process at the other end of ``descriptor``."""
    # The server drains and then closes the channel; a Ctrl-C in its terminal reaches this process too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # The server may end at any time.
    with socket.socket(fileno=descriptor) as channel, suppress(BrokenPipeError, ConnectionResetError):
        return _load_and_serve(channel)
    return 0


def _load_and_serve(channel: socket.socket) -> int:
    message = frames.receive(channel)
    if message is None:
        return 0
    try:
        servable = load_warm(message[0])
    except PacelineError as error:
        frames.send(channel, frames.encode({"failed": str(error)}))
        return error.exit_code
    except Exception as error:
        traceback.print_exc()
        frames.send(channel, frames.encode({"failed": f"{type(error).__name__}: {error}"}))
        return 1
    sizes = servable.example_sizes if isinstance(servable, ExactServable) else ()
    frames.send(channel, frames.encode({"ready": os.getpid(), "exact_sizes": sizes}))
    while True:
        request = frames.receive(channel)
        if request is None:
            return 0
        header, inputs = request
        try:
            outputs = servable.predict(inputs)
            answer = frames.encode({"id": header["id"]}, outputs)
        except Exception as error:
            end_if_gpu_is_lost()
            answer = frames.encode({"id": header["id"], **describe_failure(error)})
        frames.send(channel, answer)


def describe_failure(error: Exception) -> dict[str, Any]:
    """Return what a model raised on a batch, and whether the batch is the cause: an index that the model does not have.

    The text decides, since torch raises errors of several types, and so does a mistake in a task's own code.
    """
    text = f"{type(error).__name__}: {error}"
    return {"error": text, "is_invalid": _WRONG_INDEX.search(text) is not None}


def end_if_gpu_is_lost() -> None:
    """End this process, while an exception is handled, if CUDA refuses everything from now on.

    An index that a lookup on a GPU does not have has that effect, unlike full memory. The batch counts as one of which
    a replica died: the server starts another one and repeats the batch once.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        traceback.print_exc()
        print("paceline: the GPU refuses this process from now on; it ends.", file=sys.stderr, flush=True)
        os._exit(1)


def load_warm(header: Mapping[str, Any]) -> Servable:
    """Load the model that a header describes for this thread, and compute a first batch.

    Raises:
        PackageError, ConfigError: the model cannot be loaded.
    """
    spec = msgspec.convert(header["spec"], ModelSpec)
    if ModelLocation(**header["source"]).kind != "onnx":
        import torch

        torch.set_num_threads(header["threads"])
    servable = load(ModelLocation(**header["source"]), spec, header["device"])
    if header["exact"]:
        servable = ExactServable(servable, spec)
    # The first calls allocate memory and choose kernels, which clients should not wait for.
    for rows in (1, header["max_batch"]):
        servable.predict({name: example(tensor, rows) for name, tensor in spec.inputs.items()})
    return servable


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
