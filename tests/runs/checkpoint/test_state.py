from __future__ import annotations

import copy
import hashlib
import json
import math
import struct
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import lr_scheduler

from paceline.core.errors import CheckpointError
from paceline.runs.checkpoint_state import (
    SAFETENSORS_DTYPES,
    bytes_of,
    flatten,
    model_sha256,
    scheduler_state,
    unflatten,
)


def same(a: Any, b: Any) -> bool:
    """Equal in type, structure and bits; dicts also in the order of their keys."""
    if isinstance(a, Tensor):
        return type(b) is Tensor and a.dtype == b.dtype and a.shape == b.shape and bytes_of(a) == bytes_of(b)
    if isinstance(a, dict):
        return type(b) in (dict, type(a)) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return bool(a == b)


def through_json(state: Any) -> Any:
    tensors, skeleton = flatten(state)
    return unflatten(tensors, json.loads(json.dumps(skeleton, allow_nan=False)))


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(list(SAFETENSORS_DTYPES)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    nbytes = math.prod(shape) * dtype.itemsize
    content = draw(st.binary(min_size=nbytes, max_size=nbytes))
    if dtype is torch.bool:
        content = bytes(byte & 1 for byte in content)
    return (
        torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape) if nbytes else torch.empty(shape, dtype=dtype)
    )


scalars = st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.floats() | st.text(max_size=5)
keys = st.text(max_size=5) | st.integers()
states = st.recursive(
    scalars | tensors(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["tensor", "tied", "dict", "a/b", "a", "b", "__metadata__"]), inner, max_size=3
        )
    ),
    max_leaves=12,
)


@given(states)
def test_any_nested_state_comes_back_exactly(state: Any) -> None:
    assert same(state, through_json(state))


@given(states)
def test_skeleton_shares_nothing_with_the_state(state: Any) -> None:
    _, skeleton = flatten({"state": state, "list": [1]})
    again = json.dumps(skeleton)
    if isinstance(state, dict):
        state["later"] = 1
    elif isinstance(state, list):
        state.append(1)
    assert json.dumps(skeleton) == again


def test_names_are_paths_and_stay_distinct() -> None:
    x, y, z = torch.ones(1), torch.ones(1), torch.ones(1)
    named, _ = flatten({"a": {"b": x}, "a/b": y, "__metadata__": z})
    assert list(named) == ["a/b", "a/b#2", "__metadata__#2"]
    assert list(named.values()) == [x, y, z]


def test_int_and_str_keys_are_kept_apart() -> None:
    state = {"state": {0: {"step": torch.tensor(3.0)}, 1: 2.5}, "0": "text", "mixed": {0: "int", "0": "str"}}
    assert same(state, through_json(state))


def test_counter_and_ordered_dict() -> None:
    back = through_json({"milestones": Counter({5: 2, 3: 1}), "weights": OrderedDict(b=1, a=2)})
    assert type(back["milestones"]) is Counter
    assert list(back["milestones"].elements()) == [5, 5, 3]
    assert list(back["weights"].items()) == [("b", 1), ("a", 2)]


def test_numpy_float_becomes_float() -> None:
    back = through_json([np.float64(0.1), np.float64("-inf")])
    assert back == [0.1, -math.inf]
    assert all(type(value) is float for value in back)


def test_tied_tensors_are_named_once_and_come_back_as_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    named, skeleton = flatten(Tied().state_dict())
    assert list(named) == ["embed.weight"]
    assert skeleton == {"dict": {"embed.weight": {"tensor": "embed.weight"}, "head.weight": {"tied": "embed.weight"}}}
    back = unflatten(named, skeleton)
    assert back["head.weight"] is back["embed.weight"]


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x[:2],
        lambda x: x.t(),
        lambda x: x.view(torch.int32),
        lambda x: x.clone(),
        lambda x: x.flatten(),
    ],
)
def test_another_view_of_the_same_memory_is_no_tie(other: Any) -> None:
    x = torch.arange(9.0).reshape(3, 3)
    state = [x, other(x)]
    named, _ = flatten(state)
    assert len(named) == 2
    assert same(state, through_json(state))


def test_empty_tensors_and_conjugates_are_no_ties() -> None:
    z = torch.tensor([1 + 2j], dtype=torch.complex64)
    state = [torch.empty(0), torch.empty(0), z, z.conj()]
    named, _ = flatten(state)
    assert len(named) == 4


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({1, 2}, "builtins.set"),
        (len, "builtin"),
        (b"bytes", "bytes"),
        (nn.Linear(1, 1), "Linear"),
        (torch.Size([1]), "torch.Size"),
        (torch.float32, "dtype"),
        (torch.zeros(2, 2).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.zeros(1, dtype=torch.complex128), "complex128"),
        ({(1, 2): 3}, "(1, 2)"),
        ({True: 3}, "True"),
        (1 << 5000, "5001 bits"),
    ],
)
def test_anything_else_is_refused_with_its_path(value: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=r"at groups/1/extra it holds") as error:
        flatten({"groups": [0, {"extra": value}]})
    assert said in str(error.value)


def test_a_cycle_is_refused() -> None:
    state: dict[str, Any] = {}
    state["self"] = state
    with pytest.raises(CheckpointError, match="more than 100 levels"):
        flatten(state)


@pytest.mark.parametrize(
    "skeleton",
    [
        {"tensor": "other"},
        {"tensor": 3},
        {"tensor": "x", "tied": "x"},
        [{"tensor": "x"}, {"tensor": "x"}],
        {"dict": [1]},
        {"items": [[1, 2, 3]]},
        {"items": [[1.5, {"tensor": "x"}]]},
        {"items": [[True, {"tensor": "x"}]]},
        {"items": [[1, {"tensor": "x"}], [1, 2]]},
        {"float": "1e999"},
        {"unknown": {"tensor": "x"}},
        {},
        None,
        {"tied": "x"},
    ],
)
def test_malformed_skeletons_are_refused(skeleton: Any) -> None:
    with pytest.raises(CheckpointError):
        unflatten({"x": torch.ones(1)}, skeleton)


def test_a_skeleton_nested_without_end_is_refused() -> None:
    skeleton: Any = 1
    for _ in range(500):
        skeleton = [skeleton]
    with pytest.raises(CheckpointError, match="levels deep"):
        unflatten({}, skeleton)


class Warmup:
    def __init__(self) -> None:
        self.scale = 0.5

    def __call__(self, step: int) -> float:
        return self.scale * step


class WithFunction(lr_scheduler.LRScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer, rule: Any) -> None:
        self.rule = rule
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        return [self.rule(base) for base in self.base_lrs]


SCHEDULERS = {
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "callable_object": lambda o: lr_scheduler.LambdaLR(o, Warmup()),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    "warm_restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "multi_step": lambda o: lr_scheduler.MultiStepLR(o, [3, 5, 5, 9]),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, scale_fn=lambda x: 0.9, scale_mode="iterations"),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.LambdaLR(o, lambda step: 0.5)], [4]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)]),
    "own_function": lambda o: WithFunction(o, lambda base: base * 0.5),
    "function_inside": lambda o: lr_scheduler.SequentialLR(
        o, [WithFunction(o, lambda base: base * 0.5), lr_scheduler.ConstantLR(o)], [4]
    ),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}


def step_many(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        rates.append(float(optimizer.param_groups[0]["lr"]))
    return rates


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on_where_they_were(name: str) -> None:
    def build() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    optimizer, scheduler = build()
    step_many(optimizer, scheduler, 6)
    saved = through_json({"optimizer": optimizer.state_dict(), "scheduler": scheduler_state(scheduler)})
    expected = step_many(optimizer, scheduler, 8)

    optimizer, scheduler = build()
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    assert step_many(optimizer, scheduler, 8) == expected


def test_plateau_scheduler_keeps_its_infinite_best() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    state = scheduler_state(lr_scheduler.ReduceLROnPlateau(optimizer))
    assert state["best"] == math.inf
    assert same(state, through_json(state))


def small_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Linear(3, 2, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.01),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), amsgrad=True, foreach=False),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
        lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
        lambda p: torch.optim.Adafactor(p, lr=0.01),
    ],
    ids=["adamw", "amsgrad-tensor-lr", "sgd", "rmsprop", "adafactor"],
)
def test_optimizers_go_on_with_the_same_bits(make: Any) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            for index, parameter in enumerate(model.parameters()):
                generator = torch.Generator().manual_seed(1000 * step + index)
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            optimizer.step()

    model = small_model()
    optimizer = make(model.parameters())
    train(model, optimizer, range(3))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    saved = copy.deepcopy(through_json(state))
    assert same(state, saved)
    train(model, optimizer, range(3, 6))

    resumed = small_model()
    resumed.load_state_dict(saved["model"])
    optimizer = make(resumed.parameters())
    optimizer.load_state_dict(saved["optimizer"])
    train(resumed, optimizer, range(3, 6))
    assert model_sha256(resumed.state_dict()) == model_sha256(model.state_dict())


GOLDEN = "604e3aa5c97576ceb7a4ca51973ef19a2ad626e54a0b396c9a996bd252ea70de"


def golden_state() -> dict[str, Tensor]:
    return {
        "weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "bias": torch.tensor([0.5, -0.0], dtype=torch.bfloat16),
        "steps": torch.tensor(7),
        "mask": torch.tensor([True, False]),
    }


def test_model_sha256_is_what_its_description_says() -> None:
    digest = hashlib.sha256(b"paceline model 1")
    for name, dtype, shape, content in [
        (b"bias", b"bfloat16", b"2", struct.pack("<2H", 0x3F00, 0x8000)),
        (b"mask", b"bool", b"2", b"\x01\x00"),
        (b"steps", b"int64", b"", struct.pack("<q", 7)),
        (b"weight", b"float32", b"2,3", struct.pack("<6f", *range(6))),
    ]:
        for field in (name, dtype, shape, content):
            digest.update(struct.pack("<Q", len(field)) + field)
    assert model_sha256(golden_state()) == digest.hexdigest() == GOLDEN


def test_model_sha256_sees_no_memory_format_order_or_tie() -> None:
    x = torch.arange(48.0).reshape(2, 3, 4, 2)
    plain = model_sha256({"a": x, "b": x.clone()})
    assert model_sha256({"b": x.to(memory_format=torch.channels_last), "a": x}) == plain
    assert model_sha256({"a": nn.Parameter(x), "b": x}) == plain


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s | {"weight": s["weight"].reshape(3, 2)},
        lambda s: s | {"weight": s["weight"].view(torch.int32)},
        lambda s: s | {"bias": torch.tensor([0.5, 0.0], dtype=torch.bfloat16)},
        lambda s: {("Weight" if name == "weight" else name): value for name, value in s.items()},
        lambda s: {name: value for name, value in s.items() if name != "mask"},
        lambda s: s | {"empty": torch.empty(0)},
    ],
    ids=["shape", "dtype", "sign-of-zero", "name", "entry-gone", "entry-more"],
)
def test_model_sha256_sees_every_change(change: Any) -> None:
    assert model_sha256(change(golden_state())) != model_sha256(golden_state())


def test_model_sha256_includes_extra_state() -> None:
    def digest(extra: Any) -> str:
        return model_sha256({"weight": torch.ones(1), "_extra_state": extra})

    values = [None, 1, 1.0, {"scale": torch.ones(1)}, {"scale": torch.zeros(1)}]
    assert len({digest(value) for value in values}) == len(values)
