"""What is exported computes what was trained, in every format, or is refused."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from huggingface_hub import ModelCard
from tests.export.conftest import TASKS
from tests.export.tasks import Shapes
from tests.processes import Processes
from torch import nn

from paceline.cli import app, main
from paceline.core.config import RunConfig
from paceline.core.errors import ExportError, PackageError, UntrustedError, UserError
from paceline.core.inference import InferenceSignature, TensorSpec
from paceline.export.export import ExportRequest, export
from paceline.export.formats import load_program, load_with_task
from paceline.export.trained_source import TrainedSource, open_source
from paceline.runs.checkpoint_state import model_sha256
from paceline.runs.checkpoint_store import scan
from paceline.runs.checkpointer import load
from paceline.runs.package import Package, open_package
from paceline.runs.package_registry import Registry
from paceline_serving.encodings import Categories, Vocabulary
from paceline_serving.model import read_inputs
from paceline_serving.observed_inputs import _limit_indices, observe_inputs


@pytest.fixture(scope="module")
def trained(run_directory: Path) -> Iterator[TrainedSource]:
    with open_source(run_directory, None) as source:
        yield source


def images(samples: int) -> torch.Tensor:
    return torch.rand(samples, 1, 6, 6, generator=torch.Generator().manual_seed(samples))


def test_the_manifest_tells_of_the_run(package: Package, trained: TrainedSource, run_directory: Path) -> None:
    manifest = package.manifest
    assert manifest.inputs == trained.inference.inputs
    assert manifest.outputs == trained.inference.outputs
    assert manifest.labels == ("top", "middle", "bottom")
    assert set(manifest.differences) == {"safetensors", "pt2", "onnx"}
    assert manifest.programs == {"pt2": "program.pt2", "onnx": "model.onnx"}
    for difference in manifest.differences.values():
        assert difference.samples == 70
        assert difference.equal_labels == 1
        assert difference.largest < 1e-5
    assert manifest.differences["safetensors"].largest == 0
    origin = manifest.provenance
    steps = {origin.step} & {3, 6}
    assert steps
    saved = [p for p in scan(run_directory / "checkpoints") if f"-v{origin.state_version:08d}" in p.name]
    assert model_sha256(load(saved[0]).state["model"]) == origin.model_sha256
    assert origin.fields == {"lr": 0.1}
    result = json.loads((run_directory / "result.json").read_text())
    assert manifest.metrics == result["metrics"]["test"], "the run's own evaluation, of its best model"


def test_a_package_tells_callbacks_of_the_run_what_the_run_told_them(package: Package, trained: TrainedSource) -> None:
    options = package.manifest.provenance.data["evaluation"]
    assert options["eval_every"] == "3steps"
    assert RunConfig(**options).evaluation.eval_every == trained.trained.run.config.evaluation.eval_every


def test_the_model_card_says_what_the_manifest_says(package: Package) -> None:
    card = package.read("README.md").decode()
    assert "---\n\n# shapes\n\nWhich third of a picture is brightest.\n" in card
    for word in ("top, 1 middle", "image", "(batch, 1, 6, 6)", package.manifest.provenance.run, "lr = 0.1"):
        assert word in card
    # As Hugging Face's own library reads it.
    results = ModelCard(card).data.eval_results
    assert results is not None
    assert {each.metric_type: each.metric_value for each in results} == package.manifest.metrics
    low, high = (package.manifest.provenance.data["intervals"]["accuracy"][end] for end in ("low", "high"))
    assert low < package.manifest.metrics["accuracy"] < high
    assert f"{low:.4g} to {high:.4g} (Wilson score)" in card


@pytest.mark.parametrize("kind", ["pt2", "onnx"])
@pytest.mark.parametrize("samples", range(1, 8))
def test_a_program_takes_any_batch(package: Package, trained: TrainedSource, kind: str, samples: int) -> None:
    expected = trained.inference.module(images(samples))
    given = load_program(package, kind)([images(samples)])
    assert list(given) == ["probabilities", "label"]
    torch.testing.assert_close(given["probabilities"], expected["probabilities"])
    assert torch.equal(given["label"], expected["label"])


def test_the_weights_serve_with_the_tasks_code(package: Package, trained: TrainedSource) -> None:
    for task in (f"{TASKS}:Shapes", trained.task):
        inference = load_with_task(package, task)
        given = inference.module(images(5))
        assert torch.equal(given["probabilities"], trained.inference.module(images(5))["probabilities"])


def test_weights_of_another_task_are_refused(package: Package) -> None:
    with pytest.raises(PackageError, match="do not fit the task"):
        load_with_task(dataclasses.replace(package), _mlp())


def _mlp() -> Any:
    from paceline_tasks.fashion_mnist import FashionMNISTMLP

    return FashionMNISTMLP()


def test_another_user_must_trust_the_program_and_not_the_weights(
    package: Package, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert load_program(package, "pt2"), "what this user exported just works"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(UntrustedError, match=package.digest):
        load_program(package, "pt2")
    assert load_program(package, "onnx")
    with pytest.raises(PackageError, match="Name the task with --task"):
        load_with_task(package)
    assert load_with_task(package, f"{TASKS}:Shapes")


ONNX_WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = None  # an import of it fails
import numpy, onnxruntime
from paceline.runs.package import open_package
package = open_package(sys.argv[1])
session = onnxruntime.InferenceSession(package.read_program("onnx"), providers=["CPUExecutionProvider"])
image = numpy.array(json.loads(sys.argv[2]), dtype=package.manifest.inputs["image"].dtype)
outputs = dict(zip(package.manifest.outputs, session.run(None, {"image": image})))
print(json.dumps([package.manifest.labels[number] for number in outputs[package.manifest.label]]))
"""


def test_onnx_predicts_where_torch_cannot_be_imported(
    package: Package, trained: TrainedSource, run_processes: Processes
) -> None:
    done = run_processes.run([sys.executable, "-c", ONNX_WITHOUT_TORCH, "shapes@prod", json.dumps(images(4).tolist())])
    assert done.returncode == 0, done.stderr
    labels = trained.inference.module(images(4))["label"]
    assert json.loads(done.stdout) == [trained.inference.labels[number] for number in labels]


@pytest.mark.parametrize(("quantization", "smaller"), [("int8", 0.6), ("bf16", 0.8)])
def test_quantized_weights_are_smaller_and_say_the_same(
    package: Package, trained: TrainedSource, run_directory: Path, quantization: Any, smaller: float
) -> None:
    formats = ("pt2", "onnx") if quantization == "int8" else ("safetensors",)
    request = ExportRequest(
        run=run_directory, formats=formats, quantization=quantization, tag=quantization, tolerance=0.05
    )
    quantized, _ = export(request, Registry.of_user())
    sizes = [each.manifest.files["weights.safetensors"].size for each in (quantized, package)]
    assert sizes[0] < smaller * sizes[1]
    assert quantized.manifest.quantization == quantization
    assert quantized.manifest.quantized_size == f"{sizes[0]:,} bytes of weights instead of {sizes[1]:,}"
    larger = {**quantized.manifest.provenance.data, "float_weights_bytes": sizes[0]}
    provenance = dataclasses.replace(quantized.manifest.provenance, data=larger)
    told = dataclasses.replace(quantized.manifest, provenance=provenance).quantized_size
    assert "it saves nothing here. Export without --quantize" in told
    expected = trained.inference.module(images(7))["probabilities"]
    given = [load_with_task(quantized).module(images(7))["probabilities"]]
    given += [load_program(quantized, kind)([images(7)])["probabilities"] for kind in quantized.manifest.programs]
    assert len(given) == (3 if quantization == "int8" else 1)
    for probabilities in given:
        assert 0 < (probabilities - expected).abs().max() < 0.05
        torch.testing.assert_close(probabilities, given[0], rtol=0, atol=1e-5)


def test_of_a_run_with_a_moving_average_that_is_exported(
    module_processes: Processes, tmp_path: Path, home: Path
) -> None:
    run = tmp_path / "averaged"
    done = module_processes.paceline(
        *("train", f"{TASKS}:Shapes", "--max-steps", "4", "--ema", "0.5", "--threads", "1", "--run-dir", run)
    )
    assert done.returncode == 0, done.stderr
    state = load(scan(run / "checkpoints")[0]).state
    with open_source(run, "last") as source:
        weights = source.model.state_dict()
    assert any(not torch.equal(weights[name], value) for name, value in state["model"].items())
    for name, value in weights.items():
        assert torch.equal(value, state["ema"][f"module.{name}"]), name


def as_task(run_directory: Path, target: Path, name: str) -> Path:
    """The same run, of another task in the same file."""
    shutil.copytree(run_directory, target)
    text = (target / "run.toml").read_text()
    (target / "run.toml").write_text(text.replace(":Shapes", f":{name}").replace('"Shapes"', f'"{name}"'))
    return target


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("Drifting", (), r"does not compute the same .* the first layer that differs is model\.1 \(Drift\)"),
        ("Branching", (), "cannot trace Classifier"),
        (
            "Scaling",
            (),
            r"Scaling has no inference signature, and none can be inferred: loss\(\) calls the model with something "
            r"else than the first tensor of the batch\. Define inference_signature\(self, model\) and inference_batch",
        ),
        ("Misnamed", (), r"'image' must be float32 \(64, 1, 6, 6\), .* is float64 \(64, 1, 6, 6\)"),
        ("Untested", (), "neither a test nor a val split"),
        ("WrongExample", (), "the example of inference_signature does not fit its inputs: c1 must be a number, but is"),
        (
            "Shapes",
            ("--quantize", "int8", "--tolerance", "1e-9"),
            "more than 1e-09; the layer that differs most is",
        ),
        ("Shapes", ("--checkpoint", "4"), r"no checkpoint of step 4\. The nearest: 3, 6\."),
        (
            "Shapes",
            ("--checkpoint", "newest"),
            "best, last or a number of steps such as 500, but is 'newest'",
        ),
        ("Shapes", ("--tolerance", "-1"), "--tolerance must be"),
        ("Shapes", ("--name", "../up"), "--name must be"),
        ("Shapes", ("--tag", "A b"), "--tag must be"),
        ("Shapes", ("--format", "h5"), "h5"),
    ],
)
def test_what_is_refused_leaves_nothing(
    run_directory: Path,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    words: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setenv("PACELINE_REGISTRY", str(tmp_path / "registry"))
    run = as_task(run_directory, tmp_path / "run", name)
    monkeypatch.setattr(sys, "argv", ["paceline", "export", str(run), *words])
    assert main() == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("paceline: ") == 1
    assert re.search(message, said.err), said.err
    assert not (tmp_path / "registry" / "tags").exists()
    assert not list((tmp_path / "registry").glob("packages/*"))


def test_each_checkpoint_can_be_exported(
    run_directory: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for wanted, step in (("3", 3), ("last", 6)):
        words = ["export", str(run_directory), "--checkpoint", wanted, "--format", "safetensors", "--json"]
        monkeypatch.setattr(sys, "argv", ["paceline", *words])
        assert main() == 0
        said = json.loads(capsys.readouterr().out)
        assert said["reference"] == "shapes@latest"
        assert said["manifest"]["provenance"]["step"] == step
        assert open_package(Path(said["package"])).digest == said["digest"]
    monkeypatch.setattr(sys, "argv", ["paceline", "registry", "rollback", "shapes", "--json"])
    assert main() == 0
    assert open_package("shapes").manifest.provenance.step == 3


def test_a_signature_is_inferred_where_the_model_takes_the_first_of_a_pair(
    run_directory: Path,
    home: Path,
    tmp_path: Path,
    trained: TrainedSource,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PACELINE_REGISTRY", str(tmp_path / "registry"))
    run = as_task(run_directory, tmp_path / "run", "Silent")
    monkeypatch.setattr(sys, "argv", ["paceline", "export", str(run)])
    assert main() == 0
    inferred = "input float32 (batch, 1, 6, 6) -> output float32 (batch, 3), label int64 (batch)"
    assert f"signature inferred: {inferred}" in capsys.readouterr().out
    silent = open_package("silent")
    assert inferred in silent.read("README.md").decode()
    assert silent.manifest.label == "label"
    assert silent.manifest.differences["pt2"].equal_labels == 1
    expected = trained.inference.module(images(5))
    for outputs in (load_program(silent, "pt2")([images(5)]), load_with_task(silent).module(images(5))):
        assert torch.equal(outputs["label"], expected["label"])
        torch.testing.assert_close(outputs["output"].softmax(dim=1), expected["probabilities"])
    rows = tmp_path / "rows.npy"
    numpy.save(rows, images(3).numpy())
    monkeypatch.setattr(sys, "argv", ["paceline", "predict", "silent", str(rows), "--json"])
    assert main() == 0
    predicted = json.loads(capsys.readouterr().out)
    assert [row["label"] for row in predicted["predictions"]] == trained.inference.module(images(3))["label"].tolist()


class Bags(nn.Module):
    """Indices (B, 3), others (B, 2) and a number (B,) -> their sum (B,)."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Embedding(100, 1), nn.Embedding(7, 1)

    def forward(self, words: torch.Tensor, kinds: torch.Tensor, year: torch.Tensor) -> dict[str, torch.Tensor]:
        found = (
            self.large(words).sum(dim=(1, 2)) + self.small(words).sum(dim=(1, 2)) + self.large(kinds).sum(dim=(1, 2))
        )
        return {"sum": found + year}


def test_a_range_is_that_of_the_embeddings_unless_the_task_declares_one() -> None:
    inputs = {
        "words": TensorSpec(dtype="int64", shape=(3,)),
        "kinds": TensorSpec(dtype="int64", shape=(2,), minimum=1, maximum=50),
        "year": TensorSpec(dtype="int64"),
    }
    outputs = {"sum": TensorSpec(dtype="float32")}
    observed = _limit_indices(InferenceSignature(module=Bags().eval(), inputs=inputs, outputs=outputs))
    assert (observed["words"].minimum, observed["words"].maximum) == (0, 6)
    assert observed["kinds"] == inputs["kinds"]
    assert observed["year"] == inputs["year"]
    other = {"words": inputs["words"]}  # for which the module fails
    assert _limit_indices(InferenceSignature(module=Bags().eval(), inputs=other, outputs=outputs)) == other


def test_an_encoding_with_more_numbers_than_its_embedding_is_refused() -> None:
    encoding = Vocabulary(ids={"a": 7}, max_length=3)
    inputs = {
        "words": TensorSpec(dtype="int64", shape=(3,), encoding=encoding),
        "kinds": TensorSpec(dtype="int64", shape=(2,)),
        "year": TensorSpec(dtype="int64"),
    }
    inference = InferenceSignature(module=Bags().eval(), inputs=inputs, outputs={"sum": TensorSpec(dtype="float32")})
    with pytest.raises(ExportError, match="'words' is encoded as numbers up to 7, but the model has an embedding of 7"):
        _limit_indices(inference)


def test_a_package_shows_a_real_sample_by_names_and_texts(
    package: Package, run_directory: Path, tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = Shapes().build_dataset("test").tensors[0][0]
    about = read_inputs(package)
    assert torch.equal(torch.tensor(about.example["image"]), first)
    assert about.ranges == {}, "a client does not set a picture's elements one by one"

    request = ExportRequest(run=as_task(run_directory, tmp_path / "named", "Named"), formats=("pt2",), name="named")
    named, _ = export(request, Registry.of_user())
    about = read_inputs(named)
    assert torch.equal(torch.tensor(about.example["row"]), first[0, 0])
    assert about.example["tone"] in ("dark", "light")
    assert about.ranges.keys() == {f"c{i}" for i in range(6)}
    rows = Shapes().build_dataset("test").tensors[0][:, 0, 0]
    assert about.ranges["c2"] == pytest.approx((rows[:, 2].min().item(), rows[:, 2].max().item()), rel=1e-4)
    assert about.specs["tone"].encoding == Categories({"dark": 0, "light": 1}, unknown=2)
    card = named.read("README.md").decode()
    assert "| c2 | number | lux | seen: " in card
    assert "probabilities is in of 1." in card
    assert "| tone | category |  | dark, light or any other | `" in card

    assert app(["predict", "named", "--describe"], exit_on_error=False) == 0
    told = capsys.readouterr().out
    assert re.search(r"c2 +number +lux +seen: 0\.", told)
    assert re.search(r"probabilities +fp32, \d+ +of 1", told)
    heading, row = told.strip().splitlines()[-2:]
    (tmp_path / "row.csv").write_text(f"{heading}\n{row}\n")
    assert heading == "c0,c1,c2,c3,c4,c5,tone"
    assert app(["predict", "named", str(tmp_path / "row.csv"), "--json"], exit_on_error=False) == 0
    module = load_program(named, "pt2")
    tone = torch.tensor([["dark", "light"].index(about.example["tone"])])
    expected = module([first[:1, 0], tone])["probabilities"][0]
    [record] = json.loads(capsys.readouterr().out)["predictions"]
    torch.testing.assert_close(torch.tensor(record["outputs"]["probabilities"]), expected)

    with open_source(as_task(run_directory, tmp_path / "synthetic", "Synthetic"), None) as source:
        assert observe_inputs(source).example == {"row": [0, 0.5, 1, 1.5, 2, 2.5], "tone": "light"}


def test_a_run_is_exported_and_reported_from_any_directory(
    module_processes: Processes, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    shutil.copy(TASKS, project / "local.py")
    words = ("train", "local.py:Shapes", "--max-steps", "1", "--threads", "1", "--run-dir", "run", "--quiet")
    done = module_processes.run([sys.executable, "-m", "paceline", *words], cwd=project)
    assert done.returncode == 0, done.stderr
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with open_source(Path("../project/run"), None) as source:
        assert inspect.getfile(type(source.task)) == str(project / "local.py")
        assert source.spec == "local.py:Shapes", "no package tells of this machine's directories"
    (project / "local.py").rename(tmp_path / "moved.py")
    with pytest.raises(UserError, match=r"there is no file .*elsewhere/local\.py"), open_source(project / "run", None):
        pass
    with open_source(project / "run", None, "../moved.py:Shapes") as source:
        assert source.step == 1


def test_a_task_that_has_moved(run_directory: Path, tmp_path: Path) -> None:
    moved = shutil.copy(TASKS, tmp_path / "moved_tasks.py")
    with open_source(run_directory, None, f"{moved}:Shapes") as source:
        assert inspect.getfile(type(source.task)) == str(moved)
    other = open_source(run_directory, None, f"{moved}:Silent")
    with pytest.raises(UserError, match=r"is a run of .*Shapes, not of "), other:
        pass
