"""``paceline train hf:MODEL --data FILE``: a pretrained language model, and the text to train it on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from paceline.core.errors import TaskError
from paceline.core.task import Defaults
from paceline_lm.transformers import TransformersTask


@dataclass
class LanguageModel(TransformersTask):
    """A causal language model from a directory or the Hub, in the format of ``transformers``.

    Weights are read from safetensors only, and no code of the model's repository is run.

    Attributes:
        model: the directory, or ``ORG/NAME`` on the Hub.
        data: the training data, a JSONL file of ``{"text": ...}``.
        context: most tokens of a document, which is cut there. None: as many as the model has positions.
        from_scratch: initialise the weights; the directory then needs none.
    """

    model: str = ""
    data: str = ""
    context: int | None = None
    from_scratch: bool = False

    defaults: ClassVar[Defaults] = Defaults(global_batch_size=8)
    min_microbatch_size: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not self.model:
            raise TaskError("LanguageModel.model is missing. Name a model, as in paceline train hf:DIR --data FILE.")
        # Recorded, and so found if the run continues from another directory.
        self.model, self.data = _absolute(self.model), _absolute(self.data)

    def build_config(self) -> PreTrainedConfig:
        """Return the model's configuration.

        Raises:
            TaskError: there is none, or it needs code that ``transformers`` does not have.
        """
        if Path(self.model).is_dir() and not Path(self.model, "config.json").is_file():
            raise TaskError(f"hf:{self.model}: there is no config.json. Give the directory of a transformers model.")
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
            if self.from_scratch:
                built: PreTrainedModel = AutoModelForCausalLM.from_config(
                    config, dtype=torch.float32, trust_remote_code=False
                )
                return built
            self._require_safetensors()
            logging.disable_progress_bar()
            # Weights are updated in fp32 whatever the file has: an update is often below bfloat16's rounding.
            built = AutoModelForCausalLM.from_pretrained(
                self.model, config=config, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
            )
        except (OSError, ValueError) as error:
            raise self._unloadable("the model", error) from error
        return built

    def build_dataset(self, split: str) -> Any:
        if split != "train":
            return None
        if not self.data:
            raise TaskError('hf:MODEL needs --data FILE.jsonl, in which each line is such as {"text": "..."}.')
        tokenizer, longest = self.build_tokenizer(), self.context or self.build_config().max_position_embeddings
        documents = []
        with Path(self.data).open(encoding="utf-8") as lines:
            for line in lines:
                words = tokenizer(json.loads(line)["text"], truncation=True, max_length=longest)["input_ids"]
                documents.append({"input_ids": torch.tensor(words), "labels": torch.tensor(words)})
        return documents

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


def _absolute(name: str) -> str:
    return str(Path(name).absolute()) if name and Path(name).exists() else name
