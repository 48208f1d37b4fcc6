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
from plugins.lm.tests.causal_models import SIZES
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    BloomConfig,
    BloomForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    DataCollatorWithFlattening,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import paceline
from paceline.core.errors import TaskError
from paceline.parallel.wrap_units import checkpoint_activations
from paceline.runs.checkpointer import load
from paceline_lm import token_loss
from paceline_lm.token_loss import IGNORED
from paceline_lm.transformers import TransformersTask

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


def causal(kind: str, attention: str) -> PreTrainedModel:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": WORDS,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    gpt2 = {"n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": WORDS, "resid_pdrop": 0.0}
    torch.manual_seed(0)
    model: PreTrainedModel = {
        "llama": lambda: LlamaForCausalLM._from_config(LlamaConfig(**sizes), attn_implementation=attention),
        "qwen2": lambda: Qwen2ForCausalLM._from_config(Qwen2Config(**sizes), attn_implementation=attention),
        "gpt2": lambda: GPT2LMHeadModel._from_config(GPT2Config(**gpt2), attn_implementation=attention),
        "bloom": lambda: BloomForCausalLM(BloomConfig(hidden_size=16, n_layer=2, n_head=2, vocab_size=WORDS)),
    }[kind]()
    return model


def documents() -> list[dict[str, list[int]]]:
    return [{"input_ids": torch.randint(3, WORDS, (length,)).tolist()} for length in (9, 4, 11)]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_packed_documents_do_not_see_each_other(kind: str, attention: str) -> None:
    model, task, packer = causal(kind, attention), TransformersTask(), DataCollatorWithFlattening()
    is_training = [module.training for module in model.modules()]
    examples, state = documents(), torch.get_rng_state()
    packed = task.loss(model, packer(examples))
    assert [module.training for module in model.modules()] == is_training
    if kind != "gpt2":  # it has dropout
        assert torch.equal(torch.get_rng_state(), state)
    model.eval()
    packed = task.loss(model, packer(examples))
    alone = [task.loss(model, packer([example])) for example in examples]
    torch.testing.assert_close(packed.sum, sum(loss.sum for loss in alone))
    assert packed.weight == sum(float(loss.weight) for loss in alone) == 21
    in_evaluation, weight = task.metrics(model, packer(examples))["loss"]
    assert (in_evaluation.item(), weight) == (packed.sum.item(), packed.weight)


def test_documents_that_see_each_other_are_refused_at_the_first_packed_batch() -> None:
    model, packer = causal("bloom", "eager"), DataCollatorWithFlattening()
    TransformersTask().loss(model, packer(documents()[:1]))  # one document sees no other
    with pytest.raises(paceline.TaskError, match=r"see each other: BloomForCausalLM with attention 'eager' computes"):
        TransformersTask().loss(model, packer(documents()))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_activation_checkpointing_leaves_the_gradients_as_they_are(kind: str) -> None:
    packed, gradients = DataCollatorWithFlattening()(documents()), []
    for mode in ("none", "block", "selective"):
        model = causal(kind, "sdpa")
        if mode != "none":
            checkpoint_activations(model, mode, "auto", to_the_end=False)
        torch.manual_seed(1)
        TransformersTask().loss(model, packed).sum.backward()
        gradients.append(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]))
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that an operation returns."""

    numbers = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = operation(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor):
            self.numbers = max(self.numbers, output.numel())
        return output


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bias", "frozen"), [(False, False), (True, False), (True, True)])
def test_the_loss_in_chunks_is_that_of_all_logits(
    monkeypatch: pytest.MonkeyPatch, precision: torch.dtype, bias: bool, frozen: bool
) -> None:
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(8, 600, bias=bias), torch.randn(2, 50, 8, requires_grad=True)
    head.requires_grad_(not frozen)
    targets = torch.randint(0, 600, (2, 50))
    targets[:, ::3] = IGNORED
    monkeypatch.setattr(token_loss, "_LOGITS", 600 * 9)
    found = []
    for in_chunks in (False, True):
        hidden.grad, head.weight.grad = None, None
        with LargestTensor() as largest, torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
            if in_chunks:
                loss = token_loss.summed_loss(head, hidden, targets)[0, 0, 0]
            else:
                loss = cross_entropy(head(hidden).float().flatten(0, 1), targets.flatten(), reduction="sum")
            (loss / 7).backward()
        assert (largest.numbers < 600 * 50) == in_chunks
        found.append([loss, *(part.grad for part in (hidden, *head.parameters()) if part.requires_grad)])
    for whole, chunks in zip(*found, strict=True):
        tolerance = {} if precision == torch.float32 else {"rtol": 0.02, "atol": 0.02}
        torch.testing.assert_close(chunks, whole, **tolerance)
    with torch.no_grad():
        right = token_loss.summed_loss(head, hidden, targets)[0, 0, 1]
    assert right == (head(hidden).argmax(-1) == targets).sum()
    loss = token_loss.summed_loss(head, hidden, targets)[0, 0, 0]
    loss.backward()
    with pytest.raises(TaskError, match="compute the loss again"):
        loss.backward()


def test_only_models_whose_logits_are_their_heads_have_their_loss_in_chunks() -> None:
    batch = {"input_ids": tokens(WORDS).clamp(min=0), "labels": tokens(WORDS)}
    cohere = CohereForCausalLM(CohereConfig(**{**SIZES, "vocab_size": WORDS}))  # scales its logits
    for model, expected in [(causal("llama", "sdpa"), True), (gpt2(), True), (cohere, False), (t5(), False)]:
        task = TransformersTask()
        task.loss(model, batch)
        assert task._ends_with_head is expected, type(model).__name__
        assert "forward" not in vars(model.get_output_embeddings())


def test_a_head_that_recomputes_has_its_loss_in_chunks() -> None:
    batch, model = {"input_ids": tokens(WORDS).clamp(min=0), "labels": tokens(WORDS)}, causal("llama", "sdpa")
    task = TransformersTask()
    plain = task.loss(model, batch)
    checkpoint_activations(model, "block", "Linear")
    forward = model.get_output_embeddings().forward
    task = TransformersTask()
    outputs, recomputed = task._forward(model, batch)
    assert task._ends_with_head
    assert outputs["logits"].shape == (1, 1, 2)
    assert torch.equal(recomputed.sum, plain.sum)
    assert model.get_output_embeddings().forward == forward  # for evaluations and generation


def test_labels_that_do_not_count_have_no_gradient() -> None:
    for model in (causal("llama", "sdpa"), bert(BertForMaskedLM)):
        words = torch.zeros(1, LENGTH, dtype=torch.int64)
        loss = TransformersTask().loss(model, {"input_ids": words, "labels": torch.full_like(words, IGNORED)})
        loss.sum.backward()
        assert loss.sum.item() == loss.weight == 0
        assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


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
    for name, expected in (("cosine", [0, 1, 0.5, 0]), ("constant", [0, 1, 1, 1])):
        task = TransformersTask(warmup=0.2, lr_schedule=name)  # type: ignore[arg-type]
        factor = task.build_scheduler(optimizer, 10).lr_lambdas[0]
        assert [factor(step) for step in (0, 2, 6, 10)] == pytest.approx(expected)


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


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "cohere", "t5"])
@pytest.mark.parametrize(
    ("alone", "sharded"),
    [
        ((), ("--fsdp-wrap", "500")),  # attention and feed-forward layers are units, as of a large model by default
        # Norms are units inside a block: selective recomputation gathers them once more.
        (
            ("--precision", "bf16"),
            ("--precision", "bf16", "--fsdp-mixed-precision", "--checkpoint-activations", "selective"),
        ),
    ],
    ids=["fp32", "mixed"],
)
def test_fsdp_has_the_bits_of_one_process(
    run_processes: Any, tmp_path: Path, kind: str, alone: tuple[str, ...], sharded: tuple[str, ...]
) -> None:
    task = f"{Path(__file__).with_name('causal_models.py')}:Causal"
    options = ("--set", f"kind={kind}", "--threads", "1", "--max-steps", "3", "--num-workers", "0", "--quiet")
    started = {
        name: run_processes.start(
            [sys.executable, "-m", "paceline", "train", task, *options, *more, "--run-dir", tmp_path / name]
        )
        for name, more in {"one": alone, "two": ("--nproc", "2", "--strategy", "fsdp", *sharded)}.items()
    }
    for popen in started.values():
        finished = run_processes.finish(popen, timeout_s=150)
        assert finished.returncode == 0, finished.stderr
    one, two = (json.loads((tmp_path / name / "result.json").read_text())["model_sha256"] for name in ("one", "two"))
    assert one == two


def test_a_model_in_bfloat16_is_told(run_processes: Any, tmp_path: Path) -> None:
    file = tmp_path / "halves.py"
    file.write_text(
        "from dataclasses import dataclass\nfrom plugins.lm.tests.causal_models import Causal\n"
        "@dataclass\nclass Half(Causal):\n    def build_model(self):\n        return super().build_model().bfloat16()\n"
    )
    root = Path(__file__).parents[3]
    options = ("--threads", "1", "--max-steps", "1", "--num-workers", "0", "--run-dir", tmp_path / "run")
    done = run_processes.paceline("train", f"{file}:Half", *options, env={"PYTHONPATH": str(root)})
    assert done.returncode == 0, done.stderr
    assert "the model has trained weights in bfloat16: they, the optimizer's moments" in done.stdout + done.stderr
