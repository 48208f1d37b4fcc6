"""The parts of fine-tuning, one by one."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from paceline.core.config import RunConfig
from paceline.core.errors import ConfigError
from paceline.training.optim import EMA, current_lr, scaled_lr
from paceline_fine_tuning.adapters import add_adapters, merge_adapters
from paceline_fine_tuning.initialization import initialise
from paceline_fine_tuning.options import Lora, parse_lora, parse_lr_scale
from paceline_fine_tuning.parameters import freeze, matches, scale_lr
from paceline_fine_tuning.quantization import QuantizedLinear, dequantize


def _model(classes: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, classes))


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("layer1", "layer1.0.weight", True),
        ("layer1.*", "layer1.0.weight", True),
        ("layer1", "layer10.weight", False),
        ("*.bias", "layer1.0.bias", True),
        ("Layer1", "layer1.0.bias", False),
    ],
)
def test_a_pattern_names_a_parameter_or_what_is_around_it(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected


@pytest.mark.parametrize("schedule", ["one-cycle", "lambda"])
@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_a_scaled_group_is_updated_as_with_a_rate_so_much_smaller(kind: Any, schedule: str) -> None:
    """A second optimizer with the lower rate, and the same schedule of it, is the reference."""

    def trained(base: float, scales: tuple[tuple[str, float], ...]) -> list[torch.Tensor]:
        model = _model()
        optimizer = kind(model.parameters(), lr=base)
        scale_lr({"main": optimizer}, model, scales)
        scheduler = (
            OneCycleLR(optimizer, max_lr=base, total_steps=8, cycle_momentum=False)
            if schedule == "one-cycle"
            else LambdaLR(optimizer, lambda step: 1 / (1 + step))
        )
        torch.manual_seed(1)
        for _ in range(3):
            # Gradients that do not depend on the weights: the two runs differ by the rate alone.
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            with scaled_lr({"main": optimizer}):
                optimizer.step()
            scheduler.step()
        return [p.detach() for p in model.parameters()]

    scaled_down = trained(0.5, (("3", 0.25),))
    plain, quarter = trained(0.5, ()), trained(0.125, ())
    for found, expected in zip(scaled_down[:4], plain[:4], strict=True):
        assert torch.equal(found, expected)
    for found, expected in zip(scaled_down[4:], quarter[4:], strict=True):
        torch.testing.assert_close(found, expected)
        assert not torch.equal(found, plain[4])


def test_groups_keep_their_options_and_the_last_pattern_counts() -> None:
    model = _model()
    optimizer = SGD(
        [
            {"params": [model[0].weight, model[3].weight], "weight_decay": 0.1},
            {"params": [model[0].bias, model[3].bias, *model[1].parameters()]},
        ],
        lr=1.0,
        momentum=0.9,
    )
    scale_lr({"main": optimizer}, model, (("0", 0.5), ("0.bias", 0.25)))
    told = {
        id(p): (current_lr(group), group["weight_decay"], group["momentum"])
        for group in optimizer.param_groups
        for p in group["params"]
    }
    assert told[id(model[0].weight)] == (0.5, 0.1, 0.9)
    assert told[id(model[0].bias)] == (0.25, 0, 0.9)
    assert told[id(model[3].weight)] == (1.0, 0.1, 0.9)
    assert len(told) == 6
    with scaled_lr({"main": optimizer}):
        assert sorted({group["lr"] for group in optimizer.param_groups}) == [0.25, 0.5, 1.0]
    assert {group["lr"] for group in optimizer.param_groups} == {1.0}


def test_named_parameters_stay_named() -> None:
    model = _model()
    optimizer = SGD(list(model.named_parameters()), lr=1.0)
    scale_lr({"main": optimizer}, model, (("0", 0.5),))
    assert [group["param_names"] for group in optimizer.param_groups] == [
        ["0.weight", "0.bias"],
        ["1.weight", "1.bias", "3.weight", "3.bias"],
    ]


def test_a_frozen_batch_norm_keeps_its_statistics_also_in_a_copy() -> None:
    model = _model()
    freeze(model, ["1"])
    other = copy.deepcopy(model)
    for each in (model, other):
        before = each[1].running_mean.clone()
        each.train()
        assert each.training
        assert not each[1].training
        each(torch.randn(5, 4) + 3)
        assert torch.equal(each[1].running_mean, before)
    assert other[1].train.__self__ is other[1]


@pytest.mark.parametrize(
    ("pattern", "part"),
    [("lin", "Its layers with parameters: 0, 1, 3"), ("0.weigth", "Did you mean 0.weight")],
)
def test_what_matches_nothing_is_refused_with_the_nearest_names(pattern: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        freeze(_model(), [pattern])
    with pytest.raises(ConfigError, match=part):
        scale_lr({}, _model(), [(pattern, 0.5)])


def test_freezing_everything_leaves_nothing_to_train() -> None:
    with pytest.raises(ConfigError, match="leaves nothing to train"):
        freeze(_model(), ["*"])


def test_what_does_not_fit_is_named_with_the_option_that_helps() -> None:
    config = RunConfig(init_from="parent")
    with pytest.raises(ConfigError) as raised:
        initialise(_model(5), config, _model(3).state_dict())
    assert "3.weight is (3, 6) there and (5, 6) here" in str(raised.value)
    assert "Use --reset-head to reinitialize the last layer (3)." in str(raised.value)
    other = {"0.weight": torch.zeros(6, 4), "stem.weight": torch.zeros(2)}
    with pytest.raises(ConfigError) as raised:
        initialise(_model(), config, other)
    assert "missing there: 0.bias, 1.weight" in str(raised.value)
    assert "not in the model: stem.weight" in str(raised.value)
    assert "--reset 0 --reset 1" in str(raised.value)


@pytest.mark.parametrize("options", [{"reset_head": True}, {"reset": ("3",)}])
def test_what_begins_anew_keeps_the_tasks_own_values(options: Any) -> None:
    parent, child, built = _model(3), _model(5), _model(5)
    with torch.no_grad():
        parent[0].weight.fill_(7)
    initialise(child, RunConfig(init_from="parent", **options), parent.state_dict())
    assert child[0].weight.eq(7).all()
    assert torch.equal(child[3].weight, built[3].weight)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler
def test_the_weights_of_a_compiled_model_are_those_of_the_model() -> None:
    parent, child = (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)) for _ in range(2))
    parent[0] = torch.compile(parent[0])
    assert "0._orig_mod.weight" in parent.state_dict()
    initialise(child, RunConfig(init_from="parent"), parent.state_dict())
    assert torch.equal(child[0].weight, parent[0].weight)
    again = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    again[0] = torch.compile(again[0])
    initialise(again, RunConfig(init_from="parent"), child.state_dict())
    assert torch.equal(again[0].weight, parent[0].weight)


def test_a_head_of_another_name_is_taken_for_the_old_one() -> None:
    weights = {name.replace("3.", "old_head."): value for name, value in _model().state_dict().items()}
    config = RunConfig(init_from="parent", reset=("3", "old_head"))
    child = _model(5)
    initialise(child, config, weights)
    with pytest.raises(ConfigError, match=r"--reset heads: nothing in the model has such a name"):
        initialise(child, RunConfig(init_from="parent", reset=("heads",)), weights)


def test_a_shared_last_layer_is_not_begun_anew_by_half() -> None:
    model = nn.Sequential(nn.Embedding(4, 6), nn.Linear(6, 4, bias=False))
    model[1].weight = model[0].weight
    with pytest.raises(ConfigError, match=r"the last layer \(1\) shares its weights with 0.weight"):
        initialise(model, RunConfig(init_from="parent", reset_head=True), model.state_dict())


def test_merged_weights_compute_what_the_adapters_do() -> None:
    from peft.tuners.lora import Linear

    model = _model().double().eval()
    lora = Lora(rank=2, alpha=3)
    add_adapters(model, lora)
    assert isinstance(model[0], Linear)
    assert not isinstance(model[3], Linear), "all linear layers but the last"
    with torch.no_grad():
        model[0].lora_B["default"].weight.normal_()
    points = torch.randn(5, 4, dtype=torch.float64)
    plain = _model().double().eval()
    before = plain(points)
    plain.load_state_dict(merge_adapters(model.state_dict(), lora))
    torch.testing.assert_close(plain(points), model(points))
    assert not torch.allclose(before, model(points))
    model[0].merge()
    assert torch.equal(model[0].base_layer.weight, plain[0].weight), "the bits of peft's own merge"


def test_layers_of_gpt2_have_adapters() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    model, plain = GPT2LMHeadModel(config).double().eval(), GPT2LMHeadModel(config).double().eval()
    lora = Lora(rank=2, alpha=3)
    add_adapters(model, lora)
    adapted = [name for name in model.state_dict() if name.endswith("lora_B.default.weight")]
    assert len(adapted) == 4  # also the square ones
    with torch.no_grad():
        for name in adapted:
            model.get_parameter(name).normal_()
    plain.load_state_dict(merge_adapters(model.state_dict(), lora))
    words = torch.arange(8)[None]
    torch.testing.assert_close(plain(words).logits, model(words).logits)
    with pytest.raises(ConfigError, match="one of them not square"):
        add_adapters(GPT2LMHeadModel(config), Lora(targets=("attn.c_proj",)))


@pytest.mark.integration  # as the next: the import of bitsandbytes takes seconds
def test_quantized_layers_compute_with_the_weights_that_a_merge_has() -> None:
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(24, 50), nn.Linear(50, 5, bias=False), nn.Linear(5, 2))
    model, weight = copy.deepcopy(plain), plain[0].weight.detach()
    lora = parse_lora("rank=2,quantize=nf4")
    add_adapters(model, lora)
    base = model[0].base_layer
    assert isinstance(base, QuantizedLinear)
    assert base.packed.nbytes == -(-24 * 50 // 64) * 32, "half a byte for each weight"
    rounded = dequantize(base.packed, base.scales, (50, 24))
    assert 0 < (rounded - weight).abs().max() < 0.16 * weight.abs().max(), "half of NF4's largest step"
    with torch.no_grad():
        model[0].lora_B["default"].weight.normal_()
    plain.load_state_dict(merge_adapters(model.state_dict(), lora))
    points = torch.randn(3, 24, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        outputs = model(points)
    assert not [tensor for tensor in kept if tensor.shape in ((50, 24), (5, 50))], "no dequantized weight"
    torch.testing.assert_close(outputs, plain(points))
    for compared in (model, plain):
        points.grad = None
        compared(points).square().sum().backward()
        compared.slopes = points.grad
    torch.testing.assert_close(model.slopes, plain.slopes)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(points).dtype == torch.bfloat16


@pytest.mark.integration
def test_an_average_of_quantized_weights_is_their_copy() -> None:
    pytest.importorskip("bitsandbytes")
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))
    add_adapters(model, Lora(quantize="nf4"))
    average = EMA(copy.deepcopy(model), 0.9)
    for _ in range(3):
        average.update_parameters(model)
    packed = model[0].base_layer.packed
    assert torch.equal(average.module[0].base_layer.packed, packed)
    assert packed.unique().numel() > 99


def test_what_cannot_be_quantized_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    with pytest.raises(ConfigError, match=r"quantize=nf4 is for torch.nn.Linear"):
        add_adapters(GPT2LMHeadModel(config), Lora(quantize="nf4"))
    with pytest.raises(ConfigError, match=r"--strategy tp cannot split quantized weights. Use fsdp."):
        RunConfig(lora="rank=2,quantize=nf4", strategy="tp")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"needs bitsandbytes .* Install it: pip install"):
        add_adapters(_model(), Lora(quantize="nf4"))


@pytest.mark.integration
def test_no_kernel_is_downloaded_when_bitsandbytes_is_imported(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    (tmp_path / "kernels.py").touch()
    code = """
import sys
from torch import nn
from paceline_fine_tuning.quantization import require_bitsandbytes
require_bitsandbytes()
assert "kernels" not in sys.modules
del sys.modules["bitsandbytes"]
from paceline_fine_tuning.adapters import Lora, add_adapters
add_adapters(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), Lora())
assert "bitsandbytes" not in sys.modules, "not without quantize"
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path) as process:
        assert process.wait(60) == 0


def test_adapters_need_a_linear_layer() -> None:
    with pytest.raises(ConfigError, match=r"target=query: no linear layer .* Those there are: 0, 3"):
        add_adapters(_model(), Lora(targets=("query",)))
    with pytest.raises(ConfigError, match="the model has 1 linear layers"):
        add_adapters(nn.Sequential(nn.Linear(2, 2)), Lora())


class _OwnLinear(nn.Linear):
    """A subclass, as Falcon has one."""


class _TwoHeads(nn.Module):
    """The name of one layer ends in that of another, and so does that of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.words = nn.ModuleDict({"fc": nn.Embedding(3, 4)})
        self.head = nn.ModuleDict({"fc": nn.Linear(4, 2)})


@pytest.mark.parametrize(
    ("model", "targets", "adapted"),
    [
        (
            nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), nn.Linear(4, 2)),
            ("all-linear",),
            {"0", "1.1"},
        ),
        (nn.Sequential(_OwnLinear(4, 4), nn.MultiheadAttention(4, 1), nn.Linear(4, 2)), ("all-linear",), {"0"}),
        (_TwoHeads(), ("all-linear",), {"fc"}),
        (_TwoHeads(), ("fc",), {"fc", "head.fc"}),
    ],
)
def test_only_the_layers_that_are_meant_get_adapters(
    model: nn.Module, targets: tuple[str, ...], adapted: set[str]
) -> None:
    from peft.tuners.lora import LoraLayer

    model = copy.deepcopy(model)
    add_adapters(model, Lora(targets=targets))
    assert {name for name, layer in model.named_modules() if isinstance(layer, LoraLayer)} == adapted


def test_a_tied_weight_gets_no_adapter() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "layer": nn.Linear(2, 2), "head": nn.Linear(2, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    with pytest.raises(ConfigError, match=r"embed\.weight.*head\.weight.* are one weight"):
        add_adapters(model, Lora(targets=("head",)))
    add_adapters(model, Lora())


def test_a_layer_that_peft_refuses_is_told() -> None:
    model = _TwoHeads()
    # Of this kind peft knows that an adapter around such a layer would have no effect.
    model.config = SimpleNamespace(model_type="mamba", to_dict=lambda: {"model_type": "mamba"})
    model.out_proj = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match=r"--lora: peft refuses .*out_proj.* Name others with target="):
        add_adapters(model, Lora(targets=("out_proj",)))


def test_options_are_parsed() -> None:
    assert parse_lr_scale("backbone.*=0.1") == ("backbone.*", 0.1)
    assert parse_lora("rank=4") == Lora(rank=4, alpha=8)
    assert parse_lora("rank=8, alpha=16,dropout=0.1,target=query|value") == Lora(
        rank=8, alpha=16, dropout=0.1, targets=("query", "value")
    )


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"lr_scale": ("backbone",)}, "must be PATTERN=FACTOR"),
        ({"lr_scale": ("backbone=-1",)}, "must be PATTERN=FACTOR"),
        ({"lr_scale": ("backbone=0",)}, "Use --freeze 'backbone'"),
        ({"lora": "8"}, "--lora must be like rank=8"),
        ({"lora": "rank=8,rank=9"}, "at most once each"),
        ({"lora": "rank=a"}, "rank and alpha are whole numbers"),
        ({"lora": "rank=0"}, "at least 1"),
        ({"lora": "rank=2,dropout=1"}, "dropout at least 0 and below 1"),
        ({"lora": "rank=2", "freeze": ("a",)}, "--freeze has no effect"),
        ({"lora": "rank=2", "lr_scale": ("a=1",)}, "leave --lr-scale out"),
        ({"reset_head": True}, "Add --init-from RUN"),
        ({"reset": ("a",)}, "Add --init-from RUN"),
    ],
)
def test_options_that_cannot_work_are_refused(options: Any, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        RunConfig(**options)
