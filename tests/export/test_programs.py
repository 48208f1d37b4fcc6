"""Programs of models whose inputs have more than one open size, and states with ties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from plugins.serving.tests.packages import put_files
from safetensors.torch import load as safetensors_load
from safetensors.torch import save
from torch import nn

from paceline.core.errors import ExportError, PackageError
from paceline.core.inference import InferenceSignature, TensorSpec
from paceline.export.formats import (
    capture,
    load_onnx,
    load_pt2,
    load_weights,
    quantize,
    save_onnx,
    save_pt2,
    weights_bytes,
    without_compile,
)
from paceline.export.trained_source import inference_of
from paceline.runs.package import verify_package
from paceline_serving.model import ModelSpec
from paceline_serving.replica import OnnxServable
from paceline_tasks.transformer import Transformer

TASK = Transformer(layers=1, width=16, heads=2, context=12, tied=True)


def tokens(samples: int, length: int) -> torch.Tensor:
    return torch.randint(0, 256, (samples, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.integration
def test_a_transformer_takes_texts_of_any_length(tmp_path: Path) -> None:
    inference = inference_of(TASK, TASK.build_model(), lambda task, model: pytest.fail("the task declares one"))
    program = capture(inference, [tokens(4, 12) + 1])
    save_pt2(program, tmp_path / "program.pt2")
    save_onnx(program, list(inference.inputs), list(inference.outputs), tmp_path / "model.onnx")
    computes = {
        "pt2": load_pt2((tmp_path / "program.pt2").read_bytes()),
        "onnx": load_onnx((tmp_path / "model.onnx").read_bytes(), list(inference.outputs), {}.__getitem__),
    }
    # As it is written where there are more than 2 GB of weights; no directory is looked at.
    apart, beside = tmp_path / "apart.onnx", tmp_path / "apart.onnx.data"
    whole = onnx.load(tmp_path / "model.onnx")
    onnx.save_model(whole, apart, save_as_external_data=True, location=beside.name, size_threshold=1024)
    content, weights = apart.read_bytes(), beside.read_bytes()
    beside.unlink()
    computes["onnx, weights apart"] = load_onnx(content, list(inference.outputs), {beside.name: weights}.__getitem__)
    for samples, length in ((1, 1), (1, 12), (3, 5), (7, 2)):
        expected = inference.module(tokens(samples, length))["probabilities"]
        for compute in computes.values():
            given = compute([tokens(samples, length)])["probabilities"]
            torch.testing.assert_close(given, expected, rtol=0, atol=1e-6)
    assert program.example_inputs is not None
    (example,) = program.example_inputs[0]
    assert not example.any(), "no sample gets into a program"


class Masked(nn.Module):
    """The mean of numbers where a mask is 1, and their count."""

    def forward(self, numbers: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        count = mask.sum(dim=1)
        return {"mean": (numbers * mask).sum(dim=1) / count, "count": count}


def test_two_open_sizes_that_must_be_equal() -> None:
    inference = InferenceSignature(
        module=Masked(),
        inputs={
            "odd-name": TensorSpec(dtype="float32", shape=(None,)),
            "mask": TensorSpec(dtype="float32", shape=(None,)),
        },
        outputs={"mean": TensorSpec(dtype="float32"), "count": TensorSpec(dtype="float32")},
    )
    program = capture(inference, [torch.rand(3, 8), torch.ones(3, 8)]).module()
    for samples, length in ((1, 1), (4, 8), (2, 30)):
        inputs = torch.rand(samples, length), torch.ones(samples, length)
        torch.testing.assert_close(program(*inputs), inference.module(*inputs))


class Variadic(nn.Module):
    """A module that passes on what it is given."""

    def forward(self, first: torch.Tensor, *others: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sum": torch.stack([first, *others]).sum(dim=0)}


def test_a_forward_of_any_number_of_inputs() -> None:
    spec = TensorSpec(dtype="float32", shape=(2,))
    inference = InferenceSignature(
        module=Variadic(), inputs=dict.fromkeys("abc", spec), outputs={"sum": TensorSpec(dtype="float32", shape=(2,))}
    )
    program = capture(inference, [torch.rand(3, 2) for _ in range(3)]).module()
    for samples in (1, 5):
        inputs = [torch.rand(samples, 2) for _ in range(3)]
        torch.testing.assert_close(program(*inputs), inference.module(*inputs))


def test_an_onnx_export_is_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(7, 3, padding_idx=0)

        def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"mean": self.bag(ids)}

    spec = TensorSpec(dtype="int64", shape=(4,))
    inference = InferenceSignature(module=Bag(), inputs={"ids": spec}, outputs={"mean": TensorSpec(dtype="float32")})
    save_onnx(capture(inference, [torch.ones(3, 4, dtype=torch.int64)]), ["ids"], ["mean"], tmp_path / "model.onnx")
    assert [record.getMessage() for record in caplog.records if record.name.startswith("onnx")] == []


def test_an_error_of_the_trace_is_without_torchs_advice() -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"y": x if x.sum() > 0 else -x}

    inference = InferenceSignature(
        module=Branch(), inputs={"x": TensorSpec(dtype="float32")}, outputs={"y": TensorSpec(dtype="float32")}
    )
    with pytest.raises(ExportError, match="cannot trace Branch") as raised:
        capture(inference, [torch.rand(3)])
    assert "For more information" not in str(raised.value)
    assert "export()" not in str(raised.value)


def test_what_is_tied_is_kept_once_and_comes_back_tied() -> None:
    model = TASK.build_model()
    content = weights_bytes(model)
    embedding = 256 * 16 * 4
    assert len(content) < sum(t.numel() * 4 for t in model.state_dict().values()) - embedding // 2
    fresh = TASK.build_model()
    load_weights(fresh, content, None)
    for name, value in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value), name
    assert fresh.head.weight is fresh.token_embedding.weight


@pytest.mark.parametrize(("quantization", "step"), [("int8", 1 / 254), ("bf16", 1 / 256)])
def test_rounding_is_to_the_nearest(quantization: str, step: float) -> None:
    layers = {"linear": nn.Linear(8, 5), "conv": nn.Conv2d(3, 4, 3), "up": nn.ConvTranspose2d(3, 4, 2)}
    model = nn.ModuleDict(layers).requires_grad_(False)
    before = {name: layer.weight.clone() for name, layer in layers.items()}
    assert quantize(model, quantization) == 3  # type: ignore[arg-type]
    for name, weight in before.items():
        channel = 1 if name == "up" else 0
        others = [dim for dim in range(weight.dim()) if dim != channel]
        largest = weight.abs().amax(dim=others, keepdim=True)
        error = (layers[name].weight - weight).abs()
        assert bool((error <= largest * step * 1.001).all()), name
        assert bool((error > 0).any()), name


def test_a_channel_of_zeros_stays_zero() -> None:
    layer = nn.Linear(4, 2).requires_grad_(False)
    layer.weight[0] = 0
    quantize(layer, "int8")
    assert not layer.weight[0].any()
    assert bool(layer.weight.isfinite().all())


@pytest.mark.parametrize("content", [b"", b"no model", b"\x08\x07\x12\x04", b"\x08\x07\x12\x00"])
def test_a_malformed_onnx_program_gets_one_line(content: bytes) -> None:
    spec = ModelSpec(name="m", version="1", inputs={"x": TensorSpec(dtype="float32")}, outputs={})
    read = {}.__getitem__
    for load in (lambda: load_onnx(content, ["y"], read), lambda: OnnxServable(content, read, spec, "cpu")):
        with pytest.raises(
            PackageError, match=r"onnxruntime cannot load the ONNX program|program is damaged"
        ) as caught:
            load()
        assert len(str(caught.value).splitlines()) == 1


# --- An ONNX program needs no trust, so it may read nothing but the files of its package ---


OWN, SECRET = 7.0, 99.0
TENSOR = TensorSpec(dtype="float32", shape=(4,))
SPEC = ModelSpec(name="m", version="1", inputs={"x": TENSOR}, outputs={"y": TENSOR})


def external(name: str, file: str, **entries: int) -> onnx.TensorProto:
    """A tensor whose values are in a file."""
    tensor = onnx.TensorProto(name=name, data_type=onnx.TensorProto.FLOAT, dims=[4], data_location=1)
    for key, value in {"location": file, **entries}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def weight(file: str, **entries: int) -> onnx.GraphProto:
    return onnx.helper.make_graph(
        [onnx.helper.make_node("Add", ["x", "w"], ["y"])], "g", [], [], initializer=[external("w", file, **entries)]
    )


def constant(file: str) -> onnx.GraphProto:
    node = onnx.helper.make_node("Constant", [], ["w"], value=external("w", file))
    return onnx.helper.make_graph([node, onnx.helper.make_node("Add", ["x", "w"], ["y"])], "g", [], [])


def branch(file: str) -> onnx.GraphProto:
    inner = [
        onnx.helper.make_graph(
            [onnx.helper.make_node("Identity", [f"w{side}"], [f"o{side}"])],
            side,
            [],
            [onnx.helper.make_tensor_value_info(f"o{side}", onnx.TensorProto.FLOAT, [4])],
            initializer=[external(f"w{side}", file)],
        )
        for side in ("then", "else")
    ]
    nodes = [
        onnx.helper.make_node("If", ["c"], ["w"], then_branch=inner[0], else_branch=inner[1]),
        onnx.helper.make_node("Add", ["x", "w"], ["y"]),
    ]
    condition = onnx.helper.make_tensor("c", onnx.TensorProto.BOOL, [], [True])
    return onnx.helper.make_graph(nodes, "g", [], [], initializer=[condition])


def program_of(graph: onnx.GraphProto) -> bytes:
    for name, values in (("x", graph.input), ("y", graph.output)):
        values.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", 4]))
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
    return bytes(model.SerializeToString())


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with files of the names that the programs here name."""
    monkeypatch.chdir(tmp_path)
    for name in ("w.data", "secret"):
        (tmp_path / name).write_bytes(np.full(4, SECRET, np.float32).tobytes())
    return tmp_path


def test_weights_in_another_file_of_the_package_are_its_own(elsewhere: Path) -> None:
    own = {"w.data": np.full(5, OWN, np.float32).tobytes()}
    program = program_of(weight("w.data", offset=4, length=16))
    given = OnnxServable(program, own.__getitem__, SPEC, "cpu").predict({"x": np.zeros((2, 4), np.float32)})
    np.testing.assert_array_equal(given["y"], np.full((2, 4), OWN))


@pytest.mark.parametrize("graph", [constant, branch])
def test_only_weights_may_be_in_another_file(elsewhere: Path, graph: Callable[[str], onnx.GraphProto]) -> None:
    """onnxruntime would read these from the current directory, also if the package has a file of that name."""
    own = {"w.data": np.full(4, OWN, np.float32).tobytes()}
    with pytest.raises(PackageError, match=r"takes a constant from the file 'w\.data'"):
        OnnxServable(program_of(graph("w.data")), own.__getitem__, SPEC, "cpu")


@pytest.mark.parametrize("file", ["secret", "./w.data", "../secret", "/etc/hostname", "*/_ORT_MEM_ADDR_/*", ""])
def test_a_package_whose_program_names_other_files_is_refused(elsewhere: Path, file: str) -> None:
    inference = InferenceSignature(module=nn.Identity(), inputs={"x": TENSOR}, outputs={"y": TENSOR})
    programs = {"model.onnx": program_of(weight(file))}
    package = verify_package(put_files(elsewhere / "registry", inference, save({}), programs, name="spy"))
    with pytest.raises(PackageError, match="which is not in the package"):
        package.read_program("onnx")


def test_a_program_in_the_format_of_onnxruntime_is_refused(elsewhere: Path) -> None:
    """Its files are not the ones that were checked."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = "m.ort"
    options.add_session_config_entry("session.save_model_format", "ORT")
    own = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "g", [], [])
    onnxruntime.InferenceSession(program_of(own), options, providers=["CPUExecutionProvider"])
    content = Path("m.ort").read_bytes()
    assert onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"]).get_outputs()[0].name == "y"
    with pytest.raises(PackageError):
        OnnxServable(content, {}.__getitem__, SPEC, "cpu")


def test_an_onnx_program_of_other_inputs_is_refused() -> None:
    node = onnx.helper.make_node("Identity", ["a"], ["y"])
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch"]) for name in ("a", "y")]
    graph = onnx.helper.make_graph([node], "g", values[:1], values[1:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
    tensor = TensorSpec(dtype="float32")
    spec = ModelSpec(name="m", version="1", inputs={"x": tensor}, outputs={"y": tensor})
    with pytest.raises(PackageError, match="has the inputs a, but the package says x"):
        OnnxServable(model.SerializeToString(), {}.__getitem__, spec, "cpu")
    OnnxServable(model.SerializeToString(), {}.__getitem__, replace(spec, inputs={"a": tensor}), "cpu")


class Compiled(nn.Module):
    """A model with a compiled part."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.compile(nn.Linear(3, 3))
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.head(self.body(x))}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler
def test_a_compiled_part_leaves_no_trace_in_the_names() -> None:
    model = Compiled().requires_grad_(False)
    names = {"body.weight", "body.bias", "head.weight", "head.bias"}
    content = weights_bytes(model)
    assert set(safetensors_load(content)) == names
    again, plain = Compiled().requires_grad_(False), without_compile(Compiled().requires_grad_(False))
    for other in (again, plain):
        load_weights(other, content, None)
        assert torch.equal(other.head.weight, model.head.weight)
        assert torch.equal(other.body.weight, model.body.weight)
    # An earlier package has the names of the compiled model.
    earlier = save({name: tensor.clone() for name, tensor in model.state_dict().items()})
    assert set(safetensors_load(earlier)) > names - {"body.weight", "body.bias"}
    fresh = without_compile(Compiled().requires_grad_(False))
    load_weights(fresh, earlier, None)
    assert torch.equal(fresh.body.weight, model.body.weight)

    spec = InferenceSignature(
        module=torch.compile(model),
        inputs={"x": TensorSpec(dtype="float32", shape=(3,))},
        outputs={"y": TensorSpec(dtype="float32", shape=(2,))},
    )
    program = capture(spec, [torch.zeros(2, 3)])
    assert set(program.state_dict) == names
    x = torch.rand(5, 3)
    torch.testing.assert_close(program.module()(x)["y"], model.head(model.body(x)))
