"""Which layers are found to be split, without any process; and what cannot be split is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional

from paceline.core.errors import ConfigError, TaskError
from paceline.parallel.tensor_parallel import ShardedRNGTracker
from paceline.parallel.tp_autoplan import Pair, infer_tp_plan, pairs, require_whole_heads, tp_plan_from_task
from paceline_tasks.fashion_mnist import FashionMNIST, FashionMNISTMLP
from paceline_tasks.transformer import Transformer


class Gated(nn.Module):
    """What many language models have for an MLP; and a second output, where it is asked for."""

    def __init__(self, between: Any = functional.silu) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.between(self.gate(x)) * self.up(x)
        return x + self.down(hidden)


class Viewed(nn.Module):
    """Attention written with ``view`` and a product of its own."""

    def __init__(self, heads: int, last: int = -1) -> None:
        super().__init__()
        self.heads, self.last = heads, last
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, self.heads, 2).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return self.o(mixed.transpose(1, 2).reshape(b, t, self.last))


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = Gated(), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if x.sum() > 0 else self.norm(x)


def softmax(x: torch.Tensor) -> torch.Tensor:
    return functional.softmax(x, dim=-1)


def test_pairs_of_the_recipes() -> None:
    block = [
        Pair(
            tuple(f"blocks.0.attention.{name}" for name in ("query", "key", "value")),
            ("blocks.0.attention.out",),
            4,
            heads=True,
        ),
        Pair(("blocks.0.up",), ("blocks.0.down",), 32),
    ]
    assert pairs(Transformer(layers=1, width=8, heads=4, dropout=0.1).build_model()) == block
    assert pairs(FashionMNISTMLP().build_model()) == [Pair(("1",), ("3",), 32)]
    assert pairs(FashionMNIST().build_model()) == []


def test_pairs_of_common_blocks() -> None:
    gated = Gated()
    assert pairs(gated) == [Pair(("gate", "up"), ("down",), 8)]
    assert int(gated.calls) == 0, "looking at a model changed it"
    assert pairs(Untraceable()) == [Pair(("inner.gate", "inner.up"), ("inner.down",), 8)]
    assert pairs(Viewed(-1)) == [Pair(("q", "k", "v"), ("o",), 4, heads=True)]
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 16, batch_first=True), 2)
    assert pairs(encoder) == [Pair((f"layers.{n}.linear1",), (f"layers.{n}.linear2",), 16) for n in (0, 1)]


@pytest.mark.parametrize(
    "module",
    [
        Gated(softmax),  # over all features
        Gated(lambda x: x + torch.ones(8)),
        Viewed(4),  # says how many heads there are
        Viewed(-1, last=8),
        nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)),
        nn.Sequential(nn.Linear(4, 8), nn.ReLU()),
    ],
)
def test_what_looks_at_all_features_is_no_pair(module: nn.Module) -> None:
    found = pairs(module)
    assert not any("gate" in pair.columns or pair.heads for pair in found)
    assert not any("0" in pair.columns for pair in found)


def test_layers_by_themselves_are_split_too() -> None:
    plan = infer_tp_plan(Transformer(layers=1, width=8, heads=4, context=6).build_model(), 4)
    assert isinstance(plan["head"], ColwiseParallel)
    assert isinstance(plan["token_embedding"], RowwiseParallel)
    assert isinstance(plan["position_embedding"], ColwiseParallel), "4 do not divide 6 positions"
    # What two layers share is split in one way, or not at all.
    tied = Transformer(layers=1, width=8, heads=4, tied=True)
    assert {"head", "token_embedding"} <= set(infer_tp_plan(tied.build_model(), 2))
    padded = nn.Sequential(nn.Embedding(8, 8, padding_idx=0), nn.ReLU(), nn.Linear(8, 8))
    assert set(infer_tp_plan(padded, 2)) == {"0", "2"}
    padded[2].weight = padded[0].weight
    with pytest.raises(ConfigError, match="no linear layer and no embedding"):
        infer_tp_plan(padded, 2)


@pytest.mark.parametrize(
    ("module", "degree", "message"),
    [
        (
            Transformer(layers=1, width=16, heads=4).build_model(),
            3,
            r"3 processes cannot share the 4 heads of 'blocks.0.attention.query' equally. The nearest number "
            r"that divides all layers: 4",
        ),
        (FashionMNISTMLP().build_model(), 5, r"5 processes cannot share the 32 features of '1'.*: 4"),
        (
            nn.Sequential(nn.Conv2d(1, 4, 3)),
            2,
            r"no linear layer and no embedding that 2 processes can share",
        ),
    ],
)
def test_what_cannot_be_split(module: nn.Module, degree: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        infer_tp_plan(module, degree)


def test_a_plan_by_patterns() -> None:
    column: ParallelStyle = ColwiseParallel()
    model = nn.Sequential(Gated(), Gated())
    plan = tp_plan_from_task({"*.up": column, "0.gate": column}, model, "Mine.tensor_parallel_plan")
    assert list(plan) == ["0.up", "1.up", "0.gate"]
    with pytest.raises(TaskError, match=r"Mine.tensor_parallel_plan names '0.gates'.*The nearest: 0.gate\."):
        tp_plan_from_task({"0.gates": column}, model, "Mine.tensor_parallel_plan")


def test_ranks_draw_the_same_outside_of_split_parts_only() -> None:
    def drawn(rank: int) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        note = Noted(seen)
        model = nn.Sequential(note, nn.Linear(16, 16), note, nn.Linear(16, 16), note)
        ShardedRNGTracker(model, [model[1]], [model[3]], rank, everywhere=False)
        torch.manual_seed(3)
        for _ in range(2):
            model(torch.zeros(1, 16))
        return seen

    one, other = drawn(0), drawn(1)
    assert [torch.equal(a, b) for a, b in zip(one, other, strict=True)] == [True, False, True] * 2
    # Outside, what one process draws that has nothing split.
    torch.manual_seed(3)
    alone = [torch.rand(16) for _ in range(4)]
    assert all(torch.equal(a, b) for a, b in zip(alone, [one[0], one[2], one[3], one[5]], strict=True))
    assert not torch.equal(one[1], one[4])


class Noted(nn.Module):
    def __init__(self, seen: list[torch.Tensor]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(torch.rand(16))
        return x


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--nproc", "1", "--strategy", "tp"),
            "--strategy tp splits layers over processes, but there is one",
        ),
        (("--nproc", "2", "--strategy", "tp", "--ema", "0.9"), "--ema does not work with --strategy tp"),
        (
            ("--nproc", "2", "--sequence-parallel"),
            "--sequence-parallel needs --strategy tp, or tp among the axes of --mesh",
        ),
    ],
)
def test_bad_input(run_processes: Any, tasks_file: Path, options: tuple[str, ...], message: str) -> None:
    done = run_processes.paceline("train", f"{tasks_file}:Points", "--quiet", *options)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count(message) == 1, done.stderr


def test_a_plan_that_would_part_a_head() -> None:
    task = Transformer(layers=2, width=24, heads=3, context=6)
    model = task.build_model()
    plan = tp_plan_from_task(task.sequence_parallel_plan(model), model, "Transformer.sequence_parallel_plan")
    require_whole_heads(model, plan, 3)
    # 24 features could be shared by two.
    with pytest.raises(
        ConfigError,
        match=r"2 processes cannot share the 3 heads of 'blocks.0.attention.query' equally.*: 3\.",
    ):
        require_whole_heads(model, plan, 2)
    require_whole_heads(model, {"head": ColwiseParallel()}, 2)
