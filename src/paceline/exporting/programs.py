"""What runs without the task's code: written by torch.export and torch.onnx, and read back."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from paceline.errors import ExportError
from paceline.inference import Inference
from paceline.monitoring.hushed import hushed

Compute = Callable[[Sequence[Tensor]], Mapping[str, Tensor]]
"""A format of the model: inputs in their order -> outputs by name."""

PROGRAM_FILES = {"pt2": "program.pt2", "onnx": "model.onnx"}
_TORCHS_EXPORTERS = "torch.onnx"
_EXAMPLE_SAMPLES = 2  # torch.export takes a size of 1 for a constant


def capture(inference: Inference, inputs: Sequence[Tensor]) -> ExportedProgram:
    """Trace the function for any batch size, and any size where a shape says None.

    Args:
        inference: what is traced.
        inputs: a batch of at least two samples; its values do not get into the program.

    Raises:
        ExportError: torch.export cannot trace it; says where.
    """
    example, dynamic = [], []
    batch = Dim("batch")
    for spec, tensor in zip(inference.inputs.values(), inputs, strict=True):
        example.append(torch.zeros_like(tensor[:_EXAMPLE_SAMPLES]))
        # DYNAMIC, and not a name of its own: the lengths of tokens and of their mask may have to be equal.
        open_sizes = {d: Dim.DYNAMIC for d, size in enumerate(spec.shape, 1) if size is None}
        dynamic.append({0: batch, **open_sizes})
    return trace(inference.module, tuple(example), tuple(dynamic))


def trace(module: nn.Module, example: tuple[Any, ...], dynamic: Any = None) -> ExportedProgram:
    """``torch.export.export``, whose errors say what to do.

    Raises:
        ExportError: it cannot trace the module.
    """
    try:
        with hushed(_TORCHS_EXPORTERS), torch.no_grad():
            return torch.export.export(module, example, dynamic_shapes=dynamic)
    except Exception as error:
        raise ExportError(
            f"torch.export cannot trace {type(module).__name__}: {_first_lines(error)}\n"
            "A program takes tensor operations only: no branches on values, and no sizes fixed by the batch. "
            "--format safetensors exports the weights alone, which run with the task's code."
        ) from error


def save_pt2(program: ExportedProgram, path: Path) -> None:
    """Write a program as torch does."""
    with hushed(_TORCHS_EXPORTERS):
        torch.export.save(program, path)


def load_pt2(content: bytes) -> Compute:
    """The function in a pt2 file; loading it may run any code, so its origin must be trusted."""
    with hushed(_TORCHS_EXPORTERS):
        module = torch.export.load(io.BytesIO(content)).module()

    def compute(inputs: Sequence[Tensor]) -> Mapping[str, Tensor]:
        with torch.no_grad():
            outputs: Mapping[str, Tensor] = module(*inputs)
        return outputs

    return compute


def require_onnx() -> None:
    """Before hours are spent.

    Raises:
        ExportError: a package is missing; says how to install it.
    """
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ExportError(
            f"--format onnx needs {error.name}, which is not installed. Run: pip install 'paceline[onnx]'"
        ) from error


def save_onnx(program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str], path: Path) -> None:
    """Write a program as ONNX; weights of more than 2 GB go into a file beside it.

    Raises:
        ExportError: an operation has no ONNX form; names it.
    """
    try:
        with hushed(_TORCHS_EXPORTERS):
            converted = torch.onnx.export(
                program, dynamo=True, input_names=list(inputs), output_names=list(outputs), verbose=False
            )
            assert converted is not None
            converted.save(str(path))
    except Exception as error:
        raise ExportError(
            f"--format onnx: torch.onnx cannot write this model: {_first_lines(error)}\n"
            "Leave onnx out of --format; pt2 takes every torch operation."
        ) from error


def load_onnx(
    content: bytes, outputs: Sequence[str], beside: Mapping[str, bytes] = MappingProxyType({})
) -> Compute:
    """The function of an ONNX model, by onnxruntime on the CPU.

    Args:
        content: the model.
        outputs: their names, in their order.
        beside: file name -> content of the weights that the model does not hold itself.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    if beside:
        contents = list(beside.values())
        options.add_external_initializers_from_files_in_memory(
            list(beside), contents, [len(each) for each in contents]
        )
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    held = (session, beside)  # it may look into these for as long as it lives

    def compute(inputs: Sequence[Tensor]) -> Mapping[str, Tensor]:
        arrays = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
        return dict(zip(outputs, map(torch.from_numpy, held[0].run(None, arrays)), strict=True))

    return compute


def layer_alone(layer: nn.Module, kind: str, given: tuple[Any, ...]) -> Tensor:
    """One layer's output in a format.

    Raises:
        ExportError: it cannot be written in that format by itself.
    """
    if kind == "safetensors":
        with torch.no_grad():
            return cast(Tensor, layer(*given))
    program = trace(_Named(layer), given)
    with tempfile.TemporaryDirectory(prefix="paceline-layer-") as directory:
        path = Path(directory) / PROGRAM_FILES[kind]
        if kind == "pt2":
            save_pt2(program, path)
            return load_pt2(path.read_bytes())(given)["output"]
        save_onnx(program, [f"input_{number}" for number in range(len(given))], ["output"], path)
        return load_onnx(path.read_bytes(), ["output"])(given)["output"]


class _Named(nn.Module):
    """A layer whose output has a name."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *values: Tensor) -> dict[str, Tensor]:
        return {"output": self.layer(*values)}


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:500] or type(error).__name__
