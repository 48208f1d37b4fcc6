"""transformers models as tasks: losses weighted by what counts, the same model from any number of ranks."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

import paceline
from paceline.runs.checkpointer import load
from paceline.training.adapters.transformers import IGNORED, TransformersTask

pytestmark = pytest.mark.matrix

EXAMPLE = Path(__file__).parents[3] / "examples" / "transformers_text.py"
WORDS, LENGTH, SAMPLES = 13, 7, 6


def bert(kind: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        max_position_embeddings=LENGTH,
        num_labels=3,
    )
    return kind(config).eval()


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=8, n_layer=1, n_head=1)).eval()


def t5() -> PreTrainedModel:
    config = T5Config(vocab_size=WORDS, d_model=8, d_kv=8, d_ff=8, num_layers=1, num_heads=1, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config).eval()


def tokens(classes: int) -> torch.Tensor:
    """Labels of tokens, of which each sample has another number, and the last one none."""
    labels = torch.randint(0, classes, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    for sample in range(SAMPLES):
        labels[sample, : sample + 2] = IGNORED
    return labels


@pytest.mark.parametrize(
    ("build", "labels"),
    [
        (gpt2, tokens(WORDS)),
        (t5, tokens(WORDS)),
        (lambda: bert(BertForMaskedLM), tokens(WORDS)),
        (lambda: bert(BertForTokenClassification), tokens(3)),
        (lambda: bert(BertForSequenceClassification), torch.arange(SAMPLES) % 3),
        (lambda: bert(BertForSequenceClassification), torch.rand(SAMPLES, 3)),
    ],
    ids=["causal", "encoder-decoder", "masked", "token", "class", "classes"],
)
def test_sums_over_any_microbatches_make_the_mean_that_the_model_computes_at_once(
    build: Callable[[], PreTrainedModel], labels: torch.Tensor
) -> None:
    torch.manual_seed(0)
    model, task = build(), TransformersTask()
    words = torch.randint(0, WORDS, (SAMPLES, LENGTH))
    batch = {"input_ids": words, "labels": labels, "not_for_the_model": torch.zeros(SAMPLES)}
    whole = model(input_ids=words, labels=labels).loss
    parts = [
        task.loss(model, {name: values[cut] for name, values in batch.items()})
        for cut in (slice(0, 1), slice(1, 5), slice(5, 6))
    ]
    total = sum(part.sum for part in parts) / sum(float(part.weight) for part in parts)
    torch.testing.assert_close(total, whole)
    if labels.dtype == torch.int64:
        value, weight = task.metrics(model, batch)["accuracy"]
        assert 0 <= value <= weight == sum(part.weight for part in parts)


def test_a_batch_without_labels_is_explained() -> None:
    with pytest.raises(paceline.TaskError, match=r"GPT2LMHeadModel returned no loss: the batch has input_ids"):
        TransformersTask().loss(gpt2(), {"input_ids": torch.zeros(1, LENGTH, dtype=torch.int64)})


def test_the_learning_rate_rises_and_falls() -> None:
    task, model = TransformersTask(lr=1.0, warmup=0.2), gpt2()
    optimizer = task.build_optimizer(model)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.0]
    scheduler = task.build_scheduler(optimizer, 10)
    rates = [1.0 * scheduler.lr_lambdas[0](step) for step in range(11)]
    assert rates == [0, 0.5, 1, *(left / 8 for left in range(7, -1, -1))]


def test_any_number_of_processes_ends_with_the_same_tied_weights(run_processes: Any, tmp_path: Path) -> None:
    started = {
        name: run_processes.start(
            [
                *(sys.executable, "-m", "paceline", "train", f"{EXAMPLE}:Proverbs", "--run-dir", name),
                *("--threads", "1", "--seed", "3", "--epochs", "2", "--quiet", *arguments),
            ]
        )
        for name, arguments in {"one": ["--num-workers", "0"], "two": ["--nproc", "2", "--num-workers", "1"]}.items()
    }
    results = {}
    for name, popen in started.items():
        finished = run_processes.finish(popen, timeout_s=150)
        assert finished.returncode == 0, finished.stderr
        results[name] = json.loads((tmp_path / name / "result.json").read_text())
    for key in ("model_sha256", "metrics", "steps"):
        assert results["one"][key] == results["two"][key], key
    metrics = results["one"]["metrics"]["val"]
    assert metrics["perplexity"] == math.exp(metrics["loss"])
    assert 0 < metrics["accuracy"] < 1
    # Saved once, and one tensor again when it is loaded.
    *_, newest = sorted(p for p in (tmp_path / "one" / "checkpoints").iterdir() if p.name.startswith("step"))
    model = load(newest).state["model"]
    assert model["lm_head.weight"] is model["transformer.wte.weight"]
