"""Analysis of a run for a report: its record, its model's layers and its results."""

from __future__ import annotations

import inspect
import math
import shlex
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.core.config import config_from_mapping, configuration, incomparable_options, to_flags
from paceline.core.errors import RunDirectoryError, UserError
from paceline.core.files import read_json_lines
from paceline.core.inference import TensorSpec, name_with_unit
from paceline.core.stats import Estimate, Floats
from paceline.data.samples import MicroBatch
from paceline.runs.directory import RunDirectory
from paceline.runs.timeline import Timeline, timeline
from paceline.torch_internals import tree_leaves
from paceline.training.loaded_model import LoadedModel, load_trained_model, make_evaluator
from paceline_pages.evaluation_recorder import EvaluationRecorder
from paceline_pages.evaluation_results import ClassificationResult, RegressionResult, classify, regress
from paceline_serving.encodings import Categories, Dates

# --- A run's directory, read without trusting its contents ---


Curve = list[tuple[int, float]]
"""Steps, each with a value."""


@dataclass(frozen=True)
class Record:
    """The contents of a run's directory, whose ``name`` this is.

    Attributes:
        manifest: ``run.toml``.
        train, evaluations: the records of ``metrics.jsonl``.
        result: ``result.json``; None if the run has not finished.
        timeline: of ``events.jsonl``.
        state: "finished", "running", or the last known state.
    """

    name: str
    path: Path
    manifest: Mapping[str, Any]
    train: tuple[Mapping[str, Any], ...]
    evaluations: tuple[Mapping[str, Any], ...]
    result: Mapping[str, Any] | None
    timeline: Timeline
    state: str

    def curve(self, name: str) -> Curve:
        """Return a value that the training recorded: "loss", "lr" (of the first parameter group), "samples_per_s"."""
        return _curve((record.get("step"), record.get(name)) for record in self.train)

    def memory(self) -> Curve:
        """Return the MiB of the largest rank."""
        points = []
        for record in self.train:
            ranks = record.get("ranks")
            used = [_finite(rank.get("memory_mib")) for rank in ranks] if isinstance(ranks, list) else []
            points.append((record.get("step"), max((mib for mib in used if mib is not None), default=None)))
        return _curve(points)

    def metric(self, split: str, name: str) -> Curve:
        return _curve((step, values.get(name)) for step, values in self._metrics(split))

    def metrics_of(self, split: str) -> list[str]:
        """Return the names of the metrics that a split's evaluations had, in their order."""
        return list(dict.fromkeys(str(name) for _, values in self._metrics(split) for name in values))

    def _metrics(self, split: str) -> list[tuple[Any, Mapping[str, Any]]]:
        of_split = ((r.get("step"), r.get("metrics")) for r in self.evaluations if r.get("split") == split)
        return [(step, values) for step, values in of_split if isinstance(values, Mapping)]

    @property
    def fields(self) -> Mapping[str, Any]:
        return dict(self.manifest["task"]["fields"])

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that decides what the run computes: the task, its fields and all options."""
        return configuration(self.manifest)

    @property
    def phases_s(self) -> dict[str, float]:
        """Return the seconds of each phase, of the last start."""
        phases = (self.result or {}).get("phases_s")
        if not isinstance(phases, Mapping):
            return {}
        return {str(name): s for name, value in phases.items() if (s := _finite(value)) is not None}

    @property
    def recorded_metrics(self) -> dict[str, dict[str, float | None]]:
        """Return the metrics of ``result.json``: split -> name -> value."""
        splits = (self.result or {}).get("metrics")
        return {
            str(split): {str(name): _finite(value) for name, value in metrics.items()}
            for split, metrics in (splits.items() if isinstance(splits, Mapping) else ())
            if isinstance(metrics, Mapping)
        }

    @property
    def command(self) -> str | None:
        """Return the command that trains the same model again; None if the options cannot be parsed any more."""
        try:
            config = config_from_mapping(self.manifest["config"], "run.toml")
        except UserError:
            return None
        words = ["paceline", "train", str(self.manifest["task"]["spec"])]
        for name, value in self.fields.items():
            words += ["--set", f"{name}={value}"]
        words += to_flags(config.non_defaults(), leave_out=incomparable_options())
        return shlex.join(words)


def read_record(directory: RunDirectory) -> Record:
    """Read a run's directory; missing parts are empty.

    Raises:
        RunDirectoryError: the directory holds no run, or its files are damaged.
    """
    manifest = directory.read_complete_manifest()
    events = directory.read_events()
    records = read_json_lines(directory.metrics)
    result = directory.read_result()
    try:
        until = directory.metrics.stat().st_mtime if directory.metrics.exists() else None
        history = timeline(events, until=until)
    except (KeyError, TypeError, ValueError) as error:
        raise RunDirectoryError(
            f"{directory.events} is damaged: {error!r}. Restore it from a copy, or remove it."
        ) from error
    return Record(
        name=directory.path.resolve().name,
        path=directory.path,
        manifest=manifest,
        train=tuple(r for r in records if r.get("kind") == "train"),
        evaluations=tuple(r for r in records if r.get("kind") == "eval"),
        result=result,
        timeline=history,
        state=_state(directory, result, history),
    )


def _state(directory: RunDirectory, result: Mapping[str, Any] | None, history: Timeline) -> str:
    if result is not None:
        return "finished"
    if directory.is_running():
        return "running"
    last = history.entries[-1].event if history.entries else ""
    return last if last in ("stopped", "failed") else "not finished"


def _curve(points: Iterable[tuple[Any, Any]]) -> Curve:
    return [(step, s) for step, value in points if isinstance(step, int) and (s := _finite(value)) is not None]


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


# --- A model as a table: its layers in the order in which they compute ---


@dataclass(frozen=True)
class Layer:
    """A module without children, or with parameters of its own.

    Attributes:
        shape: of its output for one sample, without the batch; None if it did not run.
        parameters: number of elements, not counting parameters shared with an earlier layer.
    """

    name: str
    kind: str
    shape: tuple[int, ...] | None
    parameters: int
    trained: int


@dataclass(frozen=True)
class Architecture:
    """The structure of a model.

    Attributes:
        layers: in the order of their first forward, followed by those that did not run.
        parameters: number of elements, each counted once.
        bytes: of parameters and buffers.
    """

    kind: str
    layers: tuple[Layer, ...]
    parameters: int
    trained: int
    bytes: int


class LayerShapes:
    """A recorder of the layers' output shapes in their first forward, of those inside the context."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers = [
            (name, module)
            for name, module in model.named_modules()
            if not any(True for _ in module.children()) or any(True for _ in module.parameters(recurse=False))
        ]
        self._shapes: dict[str, tuple[int, ...]] = {}

    def __enter__(self) -> None:
        self._handles = [module.register_forward_hook(partial(self._record, name)) for name, module in self._layers]

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _record(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        self._shapes.setdefault(name, tuple(tensors[0].shape[1:]) if tensors else ())

    def architecture(self) -> Architecture:
        seen: set[int] = set()
        layers = {}
        for name, module in self._layers:
            own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
            seen |= {id(p) for p in own}
            layers[name] = Layer(
                name=name,
                kind=type(module).__name__,
                shape=self._shapes.get(name),
                parameters=sum(p.numel() for p in own),
                trained=sum(p.numel() for p in own if p.requires_grad),
            )
        order = [*self._shapes, *(name for name in layers if name not in self._shapes)]
        tensors = [*self._model.parameters(), *self._model.buffers()]
        return Architecture(
            kind=type(self._model).__name__,
            layers=tuple(layers[name] for name in order),
            parameters=sum(layer.parameters for layer in layers.values()),
            trained=sum(layer.trained for layer in layers.values()),
            bytes=sum(t.numel() * t.element_size() for t in tensors),
        )


# --- Analyse a run: read its record, and evaluate its model again on a split ---


OnProgress = Callable[[int, int], None]
"""Called with the number of evaluated samples and the total."""

_SOURCE_LINES = 60


@dataclass(frozen=True, kw_only=True)
class Data:
    """The data that the model was evaluated on.

    Attributes:
        sha256: of its tensors, independent of the size of blocks.
        train_samples, val_samples: of the run's own splits, if they have a length.
        inputs: name -> "uint8, 1 x 28 x 28" and so on, from the model's :class:`InferenceSignature`.
        preprocessing: the source of the exported model's code between inputs and outputs; None if it has none.
    """

    samples: int
    sha256: str
    train_samples: int | None
    val_samples: int | None
    inputs: Mapping[str, str]
    preprocessing: str | None


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """A run and its model's results on a split.

    Attributes:
        step: of the checkpoint.
        is_best: whether that is the best model so far.
        metrics: by name, with intervals.
        recorded: the run's own metrics of this split and model, by name; empty if there are none.
        changed_numerics: differences between this process and the run on which bits depend.
        per_sample: the metrics that have a value for each sample, (N,), by name.
        classification: None if the model is not a classifier.
        regression: None if the model is not a regression.
    """

    record: Record
    split: str
    step: int
    is_best: bool
    metrics: Mapping[str, Estimate]
    recorded: Mapping[str, float | None]
    changed_numerics: tuple[str, ...]
    per_sample: Mapping[str, Floats]
    classification: ClassificationResult | None
    regression: RegressionResult | None
    architecture: Architecture
    data: Data
    device: str

    @property
    def main_metric(self) -> str:
        """Return the name of the metric of ``--best-metric``, else of the first metric."""
        best = str(self.record.manifest["config"].get("best_metric") or "").partition(":")[0]
        return best if best in self.metrics else next(iter(self.metrics))

    @property
    def more_is_better(self) -> bool:
        """Return whether a high main metric is good; by default, losses and errors should be low."""
        name, _, mode = str(self.record.manifest["config"].get("best_metric") or "").partition(":")
        if name == self.main_metric and mode in ("min", "max"):
            return mode == "max"
        low_is_better = ("loss", "error", "perplexity", "bits", "mse", "mae", "rmse")
        return not any(word in self.main_metric.lower() for word in low_is_better)


def analyse(
    directory: RunDirectory,
    *,
    split: str = "test",
    checkpoint: str | None = None,
    task: str = "",
    on_progress: OnProgress = lambda done, total: None,
) -> Analysis:
    """Read a run and evaluate one of its checkpoints, without writing anything.

    Args:
        checkpoint: "best", "last" or a step; None: the best, or the last if the run has no validation.
        task: where the task's class is now, if not where it was when the run was trained.

    Raises:
        UserError: the directory holds no run, or its task or data cannot be built.
        CheckpointError: the checkpoint does not exist or is damaged.
    """
    record = read_record(directory)
    with (
        load_trained_model(directory, checkpoint, task=task) as trained,
        closing(make_evaluator(trained, split)) as evaluator,
    ):
        with torch.no_grad():
            inference = trained.run.task.inference_signature(trained.module)
        if inference is not None:
            inference.module.eval()
        recorder = EvaluationRecorder(trained.run.task, inference)
        shapes = LayerShapes(trained.module)
        done = 0

        def observe(microbatch: MicroBatch, values: Mapping[str, Any]) -> None:
            nonlocal done
            recorder(microbatch, values)
            done += microbatch.num_samples
            on_progress(done, evaluator.num_samples)

        with shapes:
            measured = trained.evaluate(evaluator, split, observe)
        predictions, values = recorder.predictions(), recorder.regression()
        return Analysis(
            record=record,
            split=split,
            step=trained.info.step,
            is_best=trained.is_best,
            metrics={name: recorder.estimates.estimate(name, value) for name, value in measured.items()},
            recorded=_recorded(record, trained, split),
            changed_numerics=tuple(trained.changed_numerics),
            per_sample=recorder.estimates.per_sample(),
            classification=None if predictions is None else classify(predictions),
            regression=None if values is None else regress(values),
            architecture=shapes.architecture(),
            data=Data(
                samples=evaluator.num_samples,
                sha256=recorder.data_sha256,
                train_samples=record.manifest.get("data", {}).get("train_samples"),
                val_samples=record.manifest.get("data", {}).get("val_samples"),
                inputs={} if inference is None else {n: _describe(spec) for n, spec in inference.inputs.items()},
                preprocessing=None if inference is None else _source(type(inference.module)),
            ),
            device=str(trained.run.device),
        )


def _recorded(record: Record, trained: LoadedModel, split: str) -> Mapping[str, float | None]:
    """Return the run's own metrics if they are of this model: the best, or the last without validation."""
    best = (record.result or {}).get("best_step")
    result_step = (record.result or {}).get("steps") if best is None else best
    return record.recorded_metrics.get(split, {}) if result_step == trained.info.step else {}


def _describe(spec: TensorSpec) -> str:
    shape = " × ".join("any" if size is None else str(size) for size in spec.shape)
    if isinstance(spec.encoding, Categories):
        return f"{shape + ' of' if shape else 'one of'} {len(spec.encoding.codes):,} categories"
    if isinstance(spec.encoding, Dates):
        return f"a date, as {', '.join(spec.encoding.parts)}"
    if spec.encoding is not None:
        return f"a text, as {shape} numbers"
    if spec.columns:
        return f"{spec.dtype}: " + ", ".join(starmap(name_with_unit, spec.columns.items()))
    return f"{spec.dtype}, {shape or 'a number'}" + (f" in {spec.unit}" if spec.unit else "")


def _source(kind: type) -> str | None:
    try:
        lines = inspect.getsource(kind).splitlines()
    except (OSError, TypeError):
        return None
    return "\n".join(lines if len(lines) <= _SOURCE_LINES else [*lines[:_SOURCE_LINES], "..."])
