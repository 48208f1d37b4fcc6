"""A Hugging Face ``transformers`` model with its collator, as a Paceline task."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from paceline.core.errors import TaskError
from paceline.core.plugins import install_command
from paceline.core.task import Callback, Loss, RunSchedule, Task
from paceline.parallel.wrap_units import CheckpointedForward
from paceline.torch_internals import FakeTensor
from paceline_lm.pipeline import evaluation_mode, replaced_forward, split_layers
from paceline_lm.token_loss import IGNORED, has_chunks, loss_of_logits, summed_loss

try:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, default_data_collator
    from transformers.loss.loss_utils import ForCausalLMLoss
except ModuleNotFoundError as error:
    raise TaskError(
        f"paceline_lm.transformers needs transformers ({error.name} is not installed): "
        + install_command("transformers")
    ) from error

# Threads that read weights would read them even of a model that is built without values.
os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")

_LEAST_INFLUENCE = 2.0**-14
"""Of one document on another's logits, relative to the greatest; or a rounding, if that is larger (bfloat16)."""

Collator = Callable[[list[Any]], Mapping[str, Any]]


@dataclass
class TransformersTask(Task):
    """A ``PreTrainedModel`` that computes its own loss from ``labels``.

    Subclass it as a dataclass; :meth:`build_model` and :meth:`build_dataset` are required, samples being
    mappings. A step is the mean over all labels that count, whichever micro-batch they are in: by tokens for
    language models, by samples for classification. It does not depend on the distribution of tokens, as a mean
    of the ranks' means would.

    Attributes:
        lr: the peak of AdamW's learning rate.
        weight_decay: of AdamW; biases and norms have none.
        warmup: the share of the steps in which the learning rate rises.
        lr_schedule: how it falls to 0 afterwards, linearly as with ``transformers.Trainer``, or that it does not.
    """

    lr: float = 5e-5
    weight_decay: float = 0.0
    warmup: float = 0.0
    lr_schedule: Literal["linear", "cosine", "constant"] = "linear"
    _collator: Collator | None = field(default=None, init=False, repr=False, compare=False)
    _isolation_checked: bool = field(default=False, init=False, repr=False, compare=False)
    _isolation_error: TaskError | None = field(default=None, init=False, repr=False, compare=False)
    _ends_with_head: bool | None = field(default=None, init=False, repr=False, compare=False)

    def build_collator(self) -> Collator:
        """Return what makes a batch of samples, such as ``DataCollatorForLanguageModeling(tokenizer)``."""
        collator: Collator = default_data_collator
        return collator

    def build_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Return the tokenizer that ``export --format hf`` writes next to the model: the collator's, if any."""
        found = getattr(self.build_collator(), "tokenizer", None)
        return found if isinstance(found, PreTrainedTokenizerBase) else None

    def loss_weight(self, model: PreTrainedModel, batch: Mapping[str, Any]) -> torch.Tensor | int:
        """Count the labels of a batch over which the model's loss is the mean.

        Override it for a model whose loss is another mean.
        """
        labels = batch.get("labels")
        if labels is None:
            return len(next(iter(batch.values())))  # question answering: a sample has two positions
        if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
            return len(labels)
        return (_predicted(model, labels) != IGNORED).sum()

    # --- what Paceline calls

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        if self._collator is None:
            self._collator = self.build_collator()
        return dict(self._collator(samples))

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
        plain = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
        groups = [
            {"params": decayed, "weight_decay": self.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        return AdamW([group for group in groups if group["params"]], lr=self.lr)

    def build_scheduler(self, optimizer: Optimizer, total_steps: int) -> LambdaLR:
        rising = math.ceil(self.warmup * total_steps)

        def factor(step: int) -> float:
            if step < rising:
                return step / rising
            left = max(0.0, (total_steps - step) / max(1, total_steps - rising))
            if self.lr_schedule == "cosine":
                return (1 - math.cos(math.pi * left)) / 2
            return left if self.lr_schedule == "linear" else 1.0

        return LambdaLR(optimizer, factor)

    def build_callback(self, model: nn.Module, schedule: RunSchedule) -> Callback:
        return Perplexity(inside_of(self, model))

    def pipeline_blocks(self, model: nn.Module) -> Sequence[Any] | None:
        inside = inside_of(self, model)
        if inside is not model:
            return None
        parts = split_layers(inside)
        # No rank will have the whole model.
        self._isolation_checked = True
        words = torch.ones(1, 8, dtype=torch.int64, device=next(inside.parameters()).device)
        self._ends_with_head = self._is_head_last(inside, words)
        packed = {"input_ids": words, "position_ids": torch.arange(4, device=words.device).repeat(1, 2)}
        try:
            _require_isolation(inside, packed, _arguments(inside, packed))
        except TaskError as error:
            self._isolation_error = error
        return parts

    def loss(self, model: nn.Module, batch: Mapping[str, Any]) -> Loss:
        return self._forward(model, batch)[1]

    def metrics(self, model: nn.Module, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        outputs, loss = self._forward(model, batch)
        values: dict[str, Any] = {"loss": (loss.sum, loss.weight)}
        labels, logits = batch.get("labels"), outputs.get("logits")
        if self._ends_with_head and logits is not None:
            values["accuracy"] = (logits[0, 0, 1], loss.weight)
        elif isinstance(labels, torch.Tensor) and isinstance(logits, torch.Tensor):
            expected = _predicted(inside_of(self, model), labels)
            said = logits.argmax(dim=-1)
            said = said[..., : expected.shape[-1]] if expected.dim() > 1 else said
            if not labels.is_floating_point() and said.shape == expected.shape:
                counts = expected != IGNORED
                values["accuracy"] = ((said == expected)[counts].sum(), counts.sum())
        return values

    def _is_head_last(self, model: PreTrainedModel, words: Any) -> bool:
        return type(self).loss_weight is TransformersTask.loss_weight and _ends_with_head(model, words)

    def _forward(self, model: nn.Module, batch: Mapping[str, Any]) -> tuple[Any, Loss]:
        inside = inside_of(self, model)
        arguments = _arguments(inside, batch)
        if not self._isolation_checked:
            self._isolation_checked = True
            _require_isolation(inside, batch, arguments)
        if self._isolation_error is not None and _is_packed(batch):
            raise self._isolation_error
        if self._ends_with_head is None:
            self._ends_with_head = self._is_head_last(inside, batch.get("input_ids"))
        if self._ends_with_head and isinstance(batch.get("labels"), torch.Tensor):
            outputs = _call_with_loss(model, inside, arguments)
            return outputs, Loss(outputs["logits"][0, 0, 0], self.loss_weight(inside, batch))
        outputs = model(**arguments)
        mean = outputs.get("loss")
        if mean is None:
            raise TaskError(
                f"{type(inside).__name__} returned no loss: the batch has {', '.join(batch)}. Have the "
                'collator or the dataset give "labels", or define loss() in the task.'
            )
        weight = torch.as_tensor(self.loss_weight(inside, batch), device=mean.device)
        # The mean over no labels is NaN; its gradients are 0.
        return outputs, Loss(torch.where(weight > 0, mean, 0.0) * weight, weight)


def _call_with_loss(model: nn.Module, inside: PreTrainedModel, arguments: Mapping[str, Any]) -> Any:
    """Call a causal model whose head returns :func:`~paceline_lm.token_loss.summed_loss` in place of the logits.

    The head is called within the model, where a strategy has its weights.
    """
    head = inside.get_output_embeddings()
    targets = nn.functional.pad(arguments["labels"][..., 1:], (0, 1), value=IGNORED)
    plain = head.forward

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = summed_loss(head, hidden, targets) if has_chunks(head, hidden) else plain(hidden)
        return logits

    with replaced_forward(head, forward):
        outputs = model(**{name: value for name, value in arguments.items() if name != "labels"})
    if outputs["logits"].shape != (1, 1, 2):  # in a pipeline's evaluation, another rank has called the head
        outputs["logits"] = loss_of_logits(outputs["logits"], targets)
    return outputs


def _ends_with_head(model: PreTrainedModel, words: Any) -> bool:
    """Return whether a model's loss is the cross entropy of the next token, and its logits what a linear head returns.

    Other logits are scaled, capped, or come from several heads. All ranks decide alike, without the batch's values.
    """
    head = model.get_output_embeddings()
    replaced = None if head is None else vars(head).get("forward")
    if (
        not isinstance(head, nn.Linear)
        or type(head).forward is not nn.Linear.forward  # such as with adapters
        or not isinstance(getattr(replaced, "__func__", replaced), CheckpointedForward | None)
        or model.loss_function is not ForCausalLMLoss
        or model.config.is_encoder_decoder
        or getattr(model.config, "output_router_logits", False)
        or not isinstance(words, torch.Tensor)
        or words.dim() != 2
        or any(parameter.is_meta for parameter in model.parameters())
    ):
        return False
    returned: list[Any] = []
    hook = head.register_forward_hook(lambda module, given, output: returned.append(output))
    try:
        logits = call_in_evaluation(model, input_ids=words[:1, :2], use_cache=False)
    finally:
        hook.remove()
    return len(returned) == 1 and logits is returned[0]


def call_in_evaluation(model: nn.Module, **arguments: Any) -> Any:
    """Return a model's logits, without dropout."""
    with evaluation_mode(model), torch.no_grad():
        return model(**arguments).get("logits")


def _arguments(model: PreTrainedModel, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the model's forward takes of a batch."""
    taken = inspect.signature(type(model).forward).parameters
    arguments = {name: value for name, value in batch.items() if name in taken}
    if "use_cache" in taken:
        # With a cache, transformers would not look for documents in the position ids.
        arguments.setdefault("use_cache", False)
    return arguments


def _require_isolation(model: PreTrainedModel, batch: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Refuse packed documents if the model's output for one depends on those before it.

    A model that is sharded over ranks needs the same calls on all of them, so they do not depend on the batch's values.
    """
    words, positions = batch.get("input_ids"), batch.get("position_ids")
    if "attention_mask" in batch or not isinstance(words, torch.Tensor) or not isinstance(positions, torch.Tensor):
        return
    if words.dim() != 2 or words.shape[1] < 4:
        return
    # There is nothing to compare in `paceline plan`, and where other ranks hold the layers.
    if isinstance(words, FakeTensor) or any(parameter.is_meta for parameter in model.parameters()):
        return
    words = words[:1, : 2 * (getattr(model.config, "max_position_embeddings", None) or words.shape[1])]
    half = words.shape[1] // 2
    vocabulary = model.get_input_embeddings().num_embeddings
    others = torch.cat([(words[:, :half] + 1) % vocabulary, words[:, half:]], dim=1)
    restarting = torch.arange(words.shape[1], device=words.device) % half  # an odd length has a document of one word
    options = {name: restarting[None] if name == "position_ids" else value for name, value in arguments.items()}
    options = {name: value for name, value in options.items() if name in ("position_ids", "use_cache")}
    logits, after_others = (call_in_evaluation(model, input_ids=ids, **options) for ids in (words, others))
    if not _is_packed(batch) or logits is None or logits.dim() != 3 or logits.shape[1] != words.shape[1]:
        return
    second, difference = logits[:, half:].float(), (logits - after_others)[:, half:].float()
    if difference.abs().max() > max(_LEAST_INFLUENCE, torch.finfo(logits.dtype).eps) * second.abs().max():
        raise TaskError(
            f"the documents of a packed batch see each other: {type(model).__name__} with attention "
            f"{model.config._attn_implementation!r} computes another output for a document after others, though the "
            "position ids restart. Use a model that isolates them, or a collator that pads and gives an "
            "attention_mask."
        )


def _is_packed(batch: Mapping[str, Any]) -> bool:
    positions = batch.get("position_ids")
    return (
        "attention_mask" not in batch
        and isinstance(positions, torch.Tensor)
        and bool((positions.diff(dim=-1) < 0).any())
    )


class Perplexity(Callback):
    """Adds the perplexity of a language model: of the mean loss, which a mean of blocks' would not be."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._speaks = model.get_output_embeddings() is not None  # a classifier has none

    def on_eval_end(self, split: str, metrics: Mapping[str, float]) -> Mapping[str, float]:
        if not self._speaks:
            return metrics
        try:
            return {**metrics, "perplexity": math.exp(metrics["loss"])}
        except OverflowError:
            return {**metrics, "perplexity": math.inf}


def _predicted(model: PreTrainedModel, labels: torch.Tensor) -> torch.Tensor:
    """Return the labels that the model predicts; a model that reads from left to right predicts no first token.

    ``transformers`` itself takes a loss that is not known by the model's class name for a causal one.
    """
    known = model.loss_type not in (None, "ForCausalLM", "ForConditionalGeneration")
    causal = not known and not model.config.is_encoder_decoder and labels.dim() > 1
    return labels[..., 1:] if causal else labels


def inside_of(task: Task, model: nn.Module) -> PreTrainedModel:
    """Return the model inside its wrappers (``DistributedDataParallel``, ``torch.compile``)."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            return part
    raise TaskError(
        f"{type(task).__name__}.build_model returned a {type(model).__name__}; it must return a "
        "transformers.PreTrainedModel."
    )
