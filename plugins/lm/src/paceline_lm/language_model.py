"""``paceline train hf:MODEL --data FILE``: a pretrained language model, and the text to train it on."""

from __future__ import annotations

import hashlib
import logging
import re
import socket
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file
from transformers.utils.logging import disable_progress_bar

from paceline.core.errors import TaskError
from paceline.core.task import Callback, Defaults, Loss, RankInfo, RunSchedule
from paceline.torch_internals import FakeTensor
from paceline_lm.data import Data, DataBuilder
from paceline_lm.document_stream import DocumentStream
from paceline_lm.documents import Documents, pad_documents
from paceline_lm.eval_samples import log_samples, read_prompts
from paceline_lm.mixture import StreamMixture
from paceline_lm.sources import parse_sources, parse_tokens
from paceline_lm.throughput import Counts, Rates, count_flops, count_tokens
from paceline_lm.transformers import Collator, Perplexity, TransformersTask, inside_of

_log = logging.getLogger(__name__)


@dataclass
class LanguageModel(TransformersTask):
    """A causal language model from a directory or the Hub, in the format of ``transformers``.

    Weights are read from safetensors only, and no code of the model's repository is run.

    Attributes:
        model: the directory, or ``ORG/NAME`` on the Hub.
        data: the training data: a JSONL or Parquet file of documents (:class:`~paceline_lm.encoding.Encoder`), or
            ``bin:FILE``, a file of tokens (:class:`~paceline_lm.token_file.TokenFile`). A pattern (``web-*.bin``) is
            many files, ``s3://...`` an address, ``PLACE=0.7,PLACE=0.3`` a mixture
            (:class:`~paceline_lm.mixture.Mixture`), and ``stream:PLACE`` documents that are encoded while the model
            trains (:class:`~paceline_lm.document_stream.DocumentStream`).
        val_data: the validation data, in the same forms.
        pack: tokens of a sample, which holds as many documents as fit; None: a sample is a document.
        concat: a pack holds documents one after another, which are cut where it ends, and see those before them.
        context: most tokens of a document, which is cut there, and the tokens of a sample of ``bin:FILE``. None: as
            many as a pack, or else the model, has positions.
        tokens: to train on, such as ``20B``: the length of the run, in place of epochs.
        from_scratch: initialise the weights; the directory then needs none.
        eval_samples: a file of prompts, a line each, which the model completes at each evaluation.
    """

    model: str = ""
    data: str = ""
    val_data: str = ""
    pack: int | None = None
    concat: bool = False
    context: int | None = None
    tokens: int | str | None = None
    from_scratch: bool = False
    eval_samples: str = ""
    _digests: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)
    _summary: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)
    _mean_tokens: float | None = field(default=None, init=False, repr=False, compare=False)
    _has_end: bool = field(default=True, init=False, repr=False, compare=False)
    _counts: Counts = field(default_factory=list, init=False, repr=False, compare=False)
    _is_pretrained: bool = field(default=False, init=False, repr=False, compare=False)
    _base: dict[str, str] | None = field(default=None, init=False, repr=False, compare=False)

    defaults: ClassVar[Defaults] = Defaults(global_batch_size=8)
    min_microbatch_size: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not self.model:
            raise TaskError("LanguageModel.model is missing. Name a model, as in paceline train hf:DIR --data FILE.")
        # Recorded, and so found if the run continues from another directory.
        if Path(self.model).exists():
            self.model = str(Path(self.model).absolute())
        if self.eval_samples:
            self.eval_samples = str(Path(self.eval_samples).absolute())
        if self.concat and (not self.pack or self.context):
            raise TaskError("--concat needs --pack, the length of the samples, and no --context.")
        self.tokens = None if self.tokens is None else parse_tokens(self.tokens)
        self.data = ",".join(map(str, parse_sources(self.data, "--data"))) if self.data else ""
        self.val_data = ",".join(map(str, parse_sources(self.val_data, "--val-data"))) if self.val_data else ""

    def build_config(self) -> PreTrainedConfig:
        """Return the model's configuration.

        Raises:
            TaskError: there is none, or it needs code that ``transformers`` does not have.
        """
        if Path(self.model).is_dir() and not Path(self.model, "config.json").is_file():
            raise TaskError(f"hf:{self.model}: there is no config.json. Give the directory of a transformers model.")
        if not Path(self.model).is_dir():
            _require_hub(self.model)
        try:
            config: PreTrainedConfig = AutoConfig.from_pretrained(self.model, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise self._unloadable("the model", error) from error
        return config

    def build_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer.

        Raises:
            TaskError: there is none.
        """
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self.model, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise self._unloadable("its tokenizer", error) from error
        return tokenizer

    def build_model(self) -> PreTrainedModel:
        config = self.build_config()
        try:
            # Of fake tensors, with which `paceline plan` measures memory, a file has no values.
            if self.from_scratch or isinstance(torch.empty(0), FakeTensor):
                _, context = self._config_and_context()
                if context > (getattr(config, "max_position_embeddings", None) or context):
                    config.max_position_embeddings = context
                built: PreTrainedModel = AutoModelForCausalLM.from_config(
                    config, dtype=torch.float32, trust_remote_code=False
                )
                return built
            self._require_safetensors()
            disable_progress_bar()
            # Weights are updated in fp32 whatever the file has: an update is often below bfloat16's rounding.
            built, info = AutoModelForCausalLM.from_pretrained(
                self.model,
                config=config,
                dtype=torch.float32,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
            self._is_pretrained = not info["missing_keys"]
        except (OSError, ValueError) as error:
            raise self._unloadable("the model", error) from error
        return built

    def frozen_base(self) -> Mapping[str, str] | None:
        """Return the model's files, unless some weights were initialised."""
        if self._is_pretrained and self._base is None:
            folder = Path(cached_file(self.model, "config.json", local_files_only=True)).parent
            paths = sorted([folder / "config.json", *folder.glob("*.safetensors")])
            digests = [f"{each.name} {_sha256(each, each.stat().st_size, each.stat().st_mtime_ns)}\n" for each in paths]
            self._base = {"address": self.model, "sha256": hashlib.sha256("".join(digests).encode()).hexdigest()}
        return self._base

    def build_dataset(self, split: str) -> Data | None:
        if split == "train" and not self.data:
            raise TaskError('hf:MODEL needs --data FILE.jsonl, with lines such as {"text": "..."}, or --data bin:FILE.')
        name = {"train": self.data, "val": self.val_data}.get(split)
        if not name:
            return None
        config, context = self._config_and_context()
        builder = DataBuilder(
            option="--data" if split == "train" else "--val-data",
            vocabulary=config.vocab_size,
            context=sys.maxsize if self.concat else context,
            pack=self.pack,
            concat=self.concat,
            tokens=parse_tokens(self.tokens) if self.tokens and split == "train" else None,
            tokenizer=self.build_tokenizer,
        )
        # Drawn from the run's seed, as all that is built here.
        data = builder.build(name, torch.initial_seed())
        self._digests |= builder.digests
        self._summary[split] = "\n".join(builder.summary)
        if split == "train":
            if isinstance(data, DocumentStream | StreamMixture):
                self._mean_tokens = data.mean_tokens
            else:
                self._mean_tokens = data.tokens / len(data)
            self._has_end = not isinstance(data, StreamMixture)
        return data

    def build_planned_dataset(self) -> Data | list[dict[str, torch.Tensor]] | None:
        """Return the data that ``paceline plan`` measures with: without ``data``, one sample as long as the context."""
        if self.data or self.pack:
            return self.build_dataset("train")
        tokens = torch.zeros(self._config_and_context()[1], dtype=torch.int64)
        return [{"input_ids": tokens, "labels": tokens}]

    def sample_lengths(self, dataset: Any) -> Any:
        return dataset.lengths if isinstance(dataset, Documents) else None

    def build_collator(self) -> Collator:
        return pad_documents if self.pack is None else super().build_collator()

    def build_callback(self, model: nn.Module, schedule: RunSchedule) -> Callback:
        if self.tokens and schedule.epochs not in (None, 1):
            raise TaskError("--tokens is the length of the run: leave --epochs out, and --max-steps beyond it.")
        if not self._has_end and schedule.total_steps is None:
            raise TaskError("a mixture of streams has no end: give --tokens or --max-steps.")
        shown = "\n".join(self._summary[split] for split in ("train", "val") if split in self._summary)
        inside, rates = inside_of(self, model), None
        if self._mean_tokens is not None:
            length = self.pack or max(1, round(self._mean_tokens))
            # Counted once, and not for each group of ranks, which a lost one may wait for.
            flops = cache(partial(count_flops, self.build_config(), length, inside))
            rates = Rates(self._mean_tokens, flops, self._counts)
        if not self.eval_samples:
            return _Report(inside, shown, rates)
        report = _ReportWithSamples(inside, shown, rates)
        report.log_samples = partial(
            log_samples, self, tokenizer=self.build_tokenizer(), prompts=read_prompts(Path(self.eval_samples))
        )
        return report

    def loss(self, model: nn.Module, batch: Mapping[str, Any]) -> Loss:
        if torch.is_grad_enabled():
            self._counts += count_tokens(batch)
        return super().loss(model, batch)

    def state_dict(self) -> dict[str, Any]:
        return {"digests": dict(self._digests)} if self._digests else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, digest in state["digests"].items():
            if self._digests.get(name, digest) != digest:
                raise TaskError(
                    f"{name}, the tokenizer or its chat template has changed since the run began. Restore them, or "
                    "start a new run."
                )

    def _config_and_context(self) -> tuple[PreTrainedConfig, int]:
        """Return the model's configuration, and the most tokens of a document.

        Raises:
            TaskError: the model, or a pack, has fewer positions than ``context``.
        """
        config = self.build_config()
        positions = getattr(config, "max_position_embeddings", None)
        known = [limit for limit in (self.context, self.pack, None if self.context else positions) if limit]
        if not known:
            raise TaskError(f"hf:{self.model} has no limit of positions. Give --context, most tokens of a document.")
        context = min(known)
        if self.context and self.pack and self.context > self.pack:
            raise TaskError(f"--context {self.context} does not fit into --pack {self.pack}.")
        if positions and context > positions and not self.from_scratch:
            raise TaskError(f"--context {context}: hf:{self.model} has {positions} positions. Give at most as many.")
        return config, context

    def _require_safetensors(self) -> None:
        folder = Path(self.model)
        if not folder.is_dir() or any(folder.glob("*.safetensors")):
            return
        what, how = "no weights", "Give"
        if pickled := sorted(path.name for path in folder.glob("*.bin")):
            what = f"only pickled weights ({pickled[0]}), which can run code when they are read"
            how = "Save them as safetensors, by model.save_pretrained(DIR) of transformers, or give"
        raise TaskError(f"hf:{self.model} has {what}. {how} --from-scratch to initialise them.")

    def _unloadable(self, what: str, error: Exception) -> TaskError:
        text = str(error).strip()
        if "trust_remote_code" in text:
            text = _NEEDS_CODE
        elif "backend tokenizer" in text:
            text = "there is no tokenizer.json. Save it there, by tokenizer.save_pretrained(DIR) of transformers."
        return TaskError(f"hf:{self.model}: cannot load {what}: {text.splitlines()[0]}")


_NEEDS_CODE = (
    "it needs code of its own repository (auto_map), which Paceline does not run. Use a model that transformers itself "
    "has, or write a task with this model (docs/adapters.md)."
)


class _Report(Perplexity):
    """Prints the data, and a document with its labels, at a run's start, and has rates and the padding logged.

    Args:
        rates: those that are logged; None without training data.
    """

    def __init__(self, model: PreTrainedModel, summary: str, rates: Rates | None) -> None:
        super().__init__(model)
        self._summary = summary
        self._rates = rates

    def attach(self, group: RankInfo, *, step: int, epoch: int) -> None:
        if group.rank == 0 and step == 0 and self._summary:
            _log.info("%s", self._summary)
        if self._rates is not None and group.trains:
            self._rates.attach(group)

    def on_gradients_reduced(self, *, due: bool) -> Mapping[str, float]:
        return self._rates.measure() if due and self._rates is not None else {}


class _ReportWithSamples(_Report):
    """Logs samples at each evaluation as well."""

    log_samples: Callable[[nn.Module], None]
    """Logs those of the evaluated model."""

    def attach(self, group: RankInfo, *, step: int, epoch: int) -> None:
        super().attach(group, step=step, epoch=epoch)
        if any(parameter.is_meta for parameter in self.model.parameters()):
            raise TaskError("--eval-samples calls the whole model, which no process of --strategy pp can.")

    def on_eval_begin(self, split: str, module: nn.Module) -> None:
        self.log_samples(module)


@cache
def _sha256(path: Path, size: int, changed_ns: int) -> str:
    """Return the digest of a file, which this process reads again only if its size or time of change is another."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require_hub(name: str) -> None:
    """Refuse a name that the Hub cannot have, and a Hub that has no address here: its client would try for 23 s."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise TaskError(f"hf:{name}: there is no such directory, and a name on the Hub is ORG/NAME.")
    host = urllib.parse.urlsplit(ENDPOINT).hostname
    if HF_HUB_OFFLINE or urllib.request.getproxies() or isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    try:
        socket.create_connection((host, 443), timeout=5).close()
    except OSError as error:
        raise TaskError(
            f"hf:{name}: the Hub cannot be reached ({error}), and the model is not in its cache. Give a directory."
        ) from error
