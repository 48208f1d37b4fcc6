"""What is found out on fake tensors is what real ones take."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.utils.data import TensorDataset

from paceline.core.errors import TaskError
from paceline.core.task import Task
from paceline_planning.measurement import measure
from paceline_planning.model_partition import MemoryTracker, Recompute
from paceline_tasks.transformer import Transformer


@dataclasses.dataclass
class Two(Task):
    """Two matrices; 8 samples of 16 numbers."""

    reads_values: bool = False
    width: int = 32
    adam: bool = False

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(16, self.width, bias=False), nn.ReLU(), nn.Linear(self.width, 4, bias=False))

    def build_dataset(self, split: str) -> Any:
        return TensorDataset(torch.ones(8, 16))

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return Adam(model.parameters()) if self.adam else SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = model(batch[0]).square().mean()
        if self.reads_values:
            assert loss.item() >= 0
        return loss


def test_a_view_counts_once_and_not_for_longer_than_it_lives() -> None:
    before = torch.zeros(10)
    live = MemoryTracker([before])
    with live:
        other = before.view(2, 5) + 1
        view = other.t()
        assert live.now == 40
        del other
        assert live.now == 40
        del view
        assert (live.now, live.peak) == (0, 40)


def test_two_matrices() -> None:
    m = measure(Two(), 8, "cpu")
    assert m.built_for_real is None
    assert m.parameters == 16 * 32 + 32 * 4
    assert m.whole.parameter_bytes == m.whole.gradient_bytes == m.whole.optimizer_bytes == 4 * m.parameters
    # What ReLU returned, what was squared, the loss and its sum; the batch is not the model's.
    assert m.whole.activations["fp32", "none"].saved == 4 * (8 * 32 + 8 * 4 + 2)
    # At the end of backward: the first weight's new gradient, that of its output, and three scalars.
    assert m.whole.activations["fp32", "none"].peak == 4 * (16 * 32 + 8 * 32 + 3)
    assert m.batch_bytes == 4 * 8 * 16
    # Forward; both weights' gradients, and that of the first one's output.
    assert m.whole.flops == 2 * 8 * (2 * 16 * 32 + 3 * 32 * 4)
    assert m.modules == {"0": 4 * 512, "1": 0, "2": 4 * 128}


def test_new_gradients_of_weights_are_told_from_activations() -> None:
    held = measure(Two(width=4096), 1, "cpu").whole.activations["fp32", "none"]
    assert held.peak >= 4 * 16 * 4096
    assert max(held.forward_peak, *held.backward_peaks) < 4 * 4 * 4096, "rows of the hidden layer"


def test_adam_holds_two_numbers_a_parameter_and_its_steps() -> None:
    m = measure(Two(adam=True), 8, "cpu")
    assert m.whole.optimizer_bytes == 2 * m.whole.parameter_bytes + 2 * 4


def test_autocast_keeps_copies_of_the_weights() -> None:
    m = measure(Two(width=4096), 1, "cpu")
    # The second weight's, for the gradient of what it was multiplied with; the first one's input has none.
    assert m.whole.activations["bf16", "none"].saved >= 2 * 4096 * 4
    assert m.whole.activations["fp32", "none"].saved < 2 * 4096 * 4
    # Of both, while forward runs.
    assert m.whole.activations["bf16", "none"].peak >= m.whole.parameter_bytes / 2


def test_a_loss_that_reads_values_is_run_for_real() -> None:
    fake, real = measure(Two(), 8, "cpu"), measure(Two(reads_values=True), 8, "cpu")
    assert real.built_for_real is not None
    assert "DataDependent" in real.built_for_real
    assert real.as_json() == fake.as_json() | {"built_for_real": real.built_for_real}


def test_what_is_too_large_for_that_is_refused() -> None:
    with pytest.raises(TaskError, match=r"too large to be run for real here.*GiB"):
        measure(Two(reads_values=True, width=2**36), 8, "cpu")


def test_a_small_dataset_gives_its_samples_again() -> None:
    assert measure(Two(), 20, "cpu").batch_bytes == 20 * 16 * 4


@pytest.mark.integration
def test_two_ranks_share_a_transformer_s_layers() -> None:
    m = measure(Transformer(layers=2, width=32, heads=2, context=16, held_out=4), 2, "cpu")
    assert m.degrees == (2,), "two heads"
    assert m.halved is not None
    # Whole on both: norms, and the biases of what is split by rows.
    whole = 4 * (2 * (4 * 32 + 2 * 32) + 2 * 32)
    assert m.halved.whole.parameter_bytes == (m.whole.parameter_bytes + whole) // 2
    assert m.halved.whole.flops < 0.6 * m.whole.flops
    assert m.halved.whole.reduced_bytes > 0
    # Embeddings make nothing to speak of: two blocks and the output layer do.
    assert m.anatomy.most_stages == 3
    one, two = m.anatomy.stages(2)
    assert one.parameter_bytes + two.parameter_bytes == m.whole.parameter_bytes
    assert one.sent_bytes == two.received_bytes == 4 * 2 * 16 * 32


class Inside(nn.Module):
    """A model whose blocks are in a module of its own, as in those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Module()
        self.body.embedding = nn.Linear(8, 8)
        self.body.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(6))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body.embedding(x)
        for layer in self.body.layers:
            x = layer(x)
        found: torch.Tensor = self.head(x)
        return found


@dataclasses.dataclass
class Deep(Task):
    def build_model(self) -> nn.Module:
        return Inside()

    def build_dataset(self, split: str) -> TensorDataset | None:
        return TensorDataset(torch.randn(64, 8), torch.zeros(64, dtype=torch.long)) if split == "train" else None

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.1)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "block")


def test_blocks_inside_of_another_module_are_recomputed_one_by_one() -> None:
    anatomy = measure(Deep(), 64).anatomy
    assert [piece.name for piece in anatomy.pieces] == [
        "body.embedding",
        *(f"body.layers.{number}" for number in range(6)),
        "head",
    ]
    held = anatomy.whole.activations
    row = 64 * 8 * 4
    none, selective, block = (held["fp32", what].saved for what in RECOMPUTE)
    assert block < none - 5 * row, "of a block its output alone, not what is inside"
    assert selective == block + 6 * row, "and the result of its first product"
    assert anatomy.repetition("selective") == 1.0
    # Of six blocks all but the last product: a sixth of all.
    assert 1.1 < anatomy.repetition("block") < 1.2
    # Autocast's copies of all weights end with forward, whatever is recomputed.
    weights = anatomy.whole.parameter_bytes // 2
    assert held["bf16", "block"].peak >= weights
    assert held["bf16 gathers", "block"].peak < held["bf16", "block"].peak
