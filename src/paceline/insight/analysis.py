"""What a report says of a run: its record, its model's layers, its results."""

from __future__ import annotations

import inspect
import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from paceline.core.config import config_from_mapping, non_defaults, to_flags
from paceline.core.errors import RunDirectoryError, UserError
from paceline.core.files import read_json_lines
from paceline.core.inference import InferenceSignature
from paceline.core.option_sets import select
from paceline.core.stats import Estimate, Floats
from paceline.data.samples import MicroBatch
from paceline.insight.classification import ClassificationResult, classify
from paceline.insight.evaluation_recorder import EvaluationRecorder, Predictions
from paceline.runs.directory import RunDirectory
from paceline.runs.timeline import Timeline, timeline
from paceline.training.loaded_model import LoadedModel, load_trained_model, make_evaluator

# --- What a run's directory says of it, read by somebody who trusts none of it ---


_ELSEWHERE = select(lambda its: its.scope in ("place", "task"))
"""Options that say where a run was, and the task, which a record names by itself."""


@dataclass(frozen=True)
class CurvePoint:
    """A number at a step."""

    step: int
    value: float


@dataclass(frozen=True)
class Record:
    """A run's directory, read.

    Attributes:
        name: the directory's.
        path: the directory's.
        manifest: ``run.toml``.
        train, evaluations: the records of ``metrics.jsonl``.
        result: ``result.json``; None while the run has not finished.
        timeline: of ``events.jsonl``.
        state: "finished", "running", or the last that is known of it.
    """

    name: str
    path: Path
    manifest: Mapping[str, Any]
    train: tuple[Mapping[str, Any], ...]
    evaluations: tuple[Mapping[str, Any], ...]
    result: Mapping[str, Any] | None
    timeline: Timeline
    state: str

    @cached_property
    def loss(self) -> list[CurvePoint]:
        """The training loss."""
        return _points(self.train, "loss")

    @cached_property
    def learning_rate(self) -> list[CurvePoint]:
        """The first parameter group's."""
        return _points(self.train, "lr")

    @cached_property
    def throughput(self) -> list[CurvePoint]:
        """Samples a second."""
        return _points(self.train, "samples_per_s")

    @cached_property
    def memory(self) -> list[CurvePoint]:
        """MiB of the rank that takes the most."""
        found = []
        for record in self.train:
            ranks = record.get("ranks")
            taken = [_finite(rank.get("memory_mib")) for rank in ranks] if isinstance(ranks, list) else []
            step = record.get("step")
            if isinstance(step, int) and (known := [mib for mib in taken if mib is not None]):
                found.append(CurvePoint(step, max(known)))
        return found

    def metric(self, split: str, name: str) -> list[CurvePoint]:
        """A metric of a split, over the run."""
        inside = [
            {"step": record.get("step"), "value": record["metrics"].get(name)}
            for record in self.evaluations
            if record.get("split") == split and isinstance(record.get("metrics"), Mapping)
        ]
        return _points(inside, "value")

    @property
    def fields(self) -> Mapping[str, Any]:
        """The task's."""
        return dict(self.manifest["task"]["fields"])

    @property
    def settings(self) -> dict[str, Any]:
        """What decides what the run computes, and how it was run: the task, its fields and all options."""
        options = {n: v for n, v in self.manifest["config"].items() if n not in _ELSEWHERE}
        return {"task": self.manifest["task"]["spec"], **self.fields, **options}

    @property
    def phases_s(self) -> dict[str, float]:
        """Seconds by phase, of the last start."""
        found = (self.result or {}).get("phases_s")
        if not isinstance(found, Mapping):
            return {}
        return {str(name): s for name, value in found.items() if (s := _finite(value)) is not None}

    @property
    def recorded_metrics(self) -> dict[str, dict[str, float | None]]:
        """What ``result.json`` says: split -> name -> value."""
        found = (self.result or {}).get("metrics")
        if not isinstance(found, Mapping):
            return {}
        return {
            str(split): {str(name): _finite(value) for name, value in metrics.items()}
            for split, metrics in found.items()
            if isinstance(metrics, Mapping)
        }

    @property
    def command(self) -> str | None:
        """The command that trains the same model again; None where the options cannot be read any more."""
        try:
            config = config_from_mapping(self.manifest["config"], "run.toml")
        except UserError:
            return None
        words = ["paceline", "train", str(self.manifest["task"]["spec"])]
        for name, value in self.fields.items():
            words += ["--set", f"{name}={value}"]
        words += to_flags(non_defaults(config), leave_out=_ELSEWHERE)
        return shlex.join(words)


def read_record(directory: RunDirectory) -> Record:
    """Read a run's directory; what is not there is empty.

    Raises:
        RunDirectoryError: it is no run's, or its files are damaged.
    """
    manifest = directory.read_complete_manifest()
    events = directory.read_events()
    records = read_json_lines(directory.metrics)
    result = directory.read_result()
    try:
        until = directory.metrics.stat().st_mtime if directory.metrics.exists() else None
        read = timeline(events, until=until)
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
        timeline=read,
        state=_state(directory, result, read),
    )


def _state(directory: RunDirectory, result: Mapping[str, Any] | None, read: Timeline) -> str:
    if result is not None:
        return "finished"
    if directory.is_running():
        return "running"
    last = read.entries[-1].event if read.entries else ""
    return last if last in ("stopped", "failed") else "not finished"


def _points(records: Any, name: str) -> list[CurvePoint]:
    return [
        CurvePoint(record["step"], value)
        for record in records
        if isinstance(record.get("step"), int) and (value := _finite(record.get(name))) is not None
    ]


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


# --- A model as a table: its layers in the order in which they compute ---


@dataclass(frozen=True)
class Layer:
    """A module without children, or with parameters of its own.

    Attributes:
        name: in the model.
        kind: its class.
        shape: of its output for one sample, without the batch; None where it has not computed.
        parameters: how many numbers; those of a parameter that an earlier layer has, too, count there.
        trained: how many of them are trained.
    """

    name: str
    kind: str
    shape: tuple[int, ...] | None
    parameters: int
    trained: int


@dataclass(frozen=True)
class Architecture:
    """A model.

    Attributes:
        kind: its class.
        layers: in the order in which they computed first; those that did not come last.
        parameters: how many numbers, each once.
        trained: how many of them are trained.
        bytes: of parameters and buffers.
    """

    kind: str
    layers: tuple[Layer, ...]
    parameters: int
    trained: int
    bytes: int


class LayerShapes:
    """Notes the layers' outputs during their first forward."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers = [
            (name, module)
            for name, module in model.named_modules()
            if not any(True for _ in module.children()) or any(True for _ in module.parameters(recurse=False))
        ]
        self._shapes: dict[str, tuple[int, ...]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While it is entered, forwards are noted."""
        handles = [module.register_forward_hook(partial(self._computed, name)) for name, module in self._layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _computed(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self._shapes.setdefault(name, _shape(output))

    def architecture(self) -> Architecture:
        """What was seen."""
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
            parameters=sum(p.numel() for p in self._model.parameters()),
            trained=sum(p.numel() for p in self._model.parameters() if p.requires_grad),
            bytes=sum(t.numel() * t.element_size() for t in tensors),
        )


def _shape(output: Any) -> tuple[int, ...]:
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return tuple(tensors[0].shape[1:]) if tensors else ()


# --- One run, analysed: its record, and its model evaluated once more on a split ---


OnProgress = Callable[[int, int], None]
"""Is told how many samples were evaluated, and how many there are."""

_SOURCE_LINES = 60


@dataclass(frozen=True, kw_only=True)
class Data:
    """What the model was evaluated on.

    Attributes:
        samples: how many the split has.
        sha256: of its tensors, in blocks of whatever size.
        train_samples, val_samples: of the run's own, where they have a length.
        inputs: name -> "uint8, 1 x 28 x 28" and so on, as the model's :class:`Inference` says.
        preprocessing: the source of what stands between inputs and outputs, which is part of the model that
            is exported; None where there is none.
    """

    samples: int
    sha256: str
    train_samples: int | None
    val_samples: int | None
    inputs: Mapping[str, str]
    preprocessing: str | None


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """A run and what its model does on a split.

    Attributes:
        record: what its directory says.
        split: what was evaluated.
        step: of the checkpoint.
        is_best: whether that is the best model so far.
        metrics: by name, with intervals.
        recorded: what the run itself recorded for this split and model, by name; empty where it did not.
        changed_numerics: in what this process differs from the run's, where bits depend on it.
        per_sample: the metrics that have a value for each sample, (N,), by name.
        predictions: None where the model is no classifier.
        classification: of the predictions.
        architecture: of the model.
        data: what was evaluated.
        device: where.
    """

    record: Record
    split: str
    step: int
    is_best: bool
    metrics: Mapping[str, Estimate]
    recorded: Mapping[str, float | None]
    changed_numerics: tuple[str, ...]
    per_sample: Mapping[str, Floats]
    predictions: Predictions | None
    classification: ClassificationResult | None
    architecture: Architecture
    data: Data
    device: str

    @property
    def main_metric(self) -> str:
        """The name of the metric that ``--best-metric`` watches, else of the first."""
        best = str(self.record.manifest["config"].get("best_metric") or "").partition(":")[0]
        return best if best in self.metrics else next(iter(self.metrics))

    @property
    def more_is_better(self) -> bool:
        """Whether the main metric is to be high; where nothing says so, a loss or an error is to be low."""
        name, _, mode = str(self.record.manifest["config"].get("best_metric") or "").partition(":")
        if name == self.main_metric and mode in ("min", "max"):
            return mode == "max"
        low = ("loss", "error", "perplexity", "bits", "mse", "mae", "rmse")
        return not any(word in self.main_metric.lower() for word in low)


def analyse(
    directory: RunDirectory,
    *,
    split: str = "test",
    checkpoint: str | None = None,
    on_progress: OnProgress = lambda done, total: None,
) -> Analysis:
    """Read a run, and evaluate one of its checkpoints; nothing is written.

    Args:
        directory: the run's.
        split: "test" or "val".
        checkpoint: "best", "last" or a step; None: the best, or the last where nothing was validated.
        on_progress: called after each block of samples.

    Raises:
        UserError: the directory holds no run, or its task or data cannot be built.
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    record = read_record(directory)
    with (
        load_trained_model(directory, checkpoint) as trained,
        closing(make_evaluator(trained, split)) as evaluator,
    ):
        with torch.no_grad():
            inference = trained.run.task.inference_signature(trained.module)
        if inference is not None:
            inference.module.eval()
        observer = EvaluationRecorder(trained.run.task, inference)
        watch = LayerShapes(trained.module)
        done = 0

        def observe(microbatch: MicroBatch, values: Mapping[str, Any]) -> None:
            nonlocal done
            observer(microbatch, values)
            done += microbatch.num_samples
            on_progress(done, evaluator.num_samples)

        with watch.watching():
            measured = trained.evaluate(evaluator, split, observe)
        predictions = observer.predictions()
        return Analysis(
            record=record,
            split=split,
            step=trained.info.step,
            is_best=trained.is_best,
            metrics={name: observer.estimates.estimate(name, value) for name, value in measured.items()},
            recorded=_recorded(record, trained, split),
            changed_numerics=tuple(trained.changed_numerics),
            per_sample=observer.estimates.per_sample(),
            predictions=predictions,
            classification=None if predictions is None else classify(predictions),
            architecture=watch.architecture(),
            data=_data(record, evaluator.num_samples, observer.data_sha256, inference),
            device=str(trained.run.device),
        )


def _recorded(record: Record, trained: LoadedModel, split: str) -> Mapping[str, float | None]:
    """A result's metrics are those of the best model, or of the last where nothing was validated."""
    best = (record.result or {}).get("best_step")
    of_step = (record.result or {}).get("steps") if best is None else best
    return record.recorded_metrics.get(split, {}) if of_step == trained.info.step else {}


def _data(record: Record, samples: int, sha256: str, inference: InferenceSignature | None) -> Data:
    recorded = record.manifest.get("data", {})
    inputs = {}
    if inference is not None:
        for name, spec in inference.inputs.items():
            shape = " × ".join("any" if size is None else str(size) for size in spec.shape)
            inputs[name] = f"{spec.dtype}, {shape or 'a number'}"
    return Data(
        samples=samples,
        sha256=sha256,
        train_samples=recorded.get("train_samples"),
        val_samples=recorded.get("val_samples"),
        inputs=inputs,
        preprocessing=None if inference is None else _source(type(inference.module)),
    )


def _source(kind: type) -> str | None:
    try:
        lines = inspect.getsource(kind).splitlines()
    except (OSError, TypeError):
        return None
    return "\n".join(lines if len(lines) <= _SOURCE_LINES else [*lines[:_SOURCE_LINES], "..."])
