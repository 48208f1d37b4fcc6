"""Activations that are computed again: the same bits, the same names, under every strategy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.training import model_tasks, tasks
from torch import nn

from paceline.core.errors import ConfigError
from paceline.parallel.wrap_units import checkpoint_activations, repeated_units

JOB: dict[str, Any] = {"task": "Noisy", "options": {"max_steps": 4, "ema": 0.9, "eval_every": "2steps"}}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp-block": {"checkpoint_activations": "block"},
    "ddp-selective": {"checkpoint_activations": "selective"},
    "fsdp-block": {"checkpoint_activations": "block", "strategy": "fsdp", "fsdp_wrap": "NoisyBlock"},
    "fsdp-selective": {"checkpoint_activations": "selective", "strategy": "fsdp", "fsdp_wrap": "NoisyBlock"},
    "fsdp-inside": {"checkpoint_activations": "block", "strategy": "fsdp", "fsdp_wrap": "Linear"},
}
# DistributedDataParallel sums in its own order; between split layers each rank draws for itself.
OWN_BITS: dict[str, dict[str, Any]] = {
    "torch": {**JOB, "options": {**JOB["options"], "strategy": "ddp", "reduction": "ddp"}},
    "tp": {
        "task": "Text",
        "fields": {"dropout": 0.2, "layers": 2},
        "options": {"strategy": "tp", "max_steps": 2},
    },
}


def with_options(job: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {**job, "options": {**job["options"], **options}}


@pytest.fixture(scope="module")
def alone(start_trainings: Any) -> Any:
    jobs = {
        f"{precision}-{what}": with_options(JOB, checkpoint_activations=what, precision=precision)
        for precision in ("fp32", "bf16")
        for what in ("none", "block", "selective")
    }
    return start_trainings(jobs)


@pytest.fixture(scope="module")
def together(start_trainings: Any) -> Any:
    jobs = {name: with_options(JOB, **options) for name, options in STRATEGIES.items()}
    for name, job in OWN_BITS.items():
        for what in ("none", "block"):
            jobs[f"{name}-{what}"] = with_options(job, checkpoint_activations=what)
    return start_trainings(jobs, ranks=2)


@pytest.mark.parametrize("what", ["block", "selective"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_process_has_the_same_bits(alone: Any, precision: str, what: str) -> None:
    for key in ("model_sha256", "metrics"):
        assert alone[f"{precision}-{what}"].get(key) == alone[f"{precision}-none"][key]


@pytest.mark.matrix
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_has_the_bits_of_one_process(together: Any, alone: Any, name: str) -> None:
    for key in ("model_sha256", "metrics"):
        assert together[name].get(key) == alone["fp32-none"][key]


@pytest.mark.matrix
@pytest.mark.parametrize("name", OWN_BITS)
def test_what_has_bits_of_its_own_keeps_them(together: Any, name: str) -> None:
    for key in ("model_sha256", "metrics"):
        assert together[f"{name}-block"].get(key) == together[f"{name}-none"][key]


class Counted(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        Counted.calls += 1
        return torch.relu(self.inner(features)) ** 2


def saved_bytes(model: nn.Module, features: torch.Tensor) -> int:
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(features)
    return sum(sizes.values())


def test_blocks_run_again_in_backward_and_keep_less() -> None:
    plain = nn.Sequential(*(Counted() for _ in range(4)))
    model = copy.deepcopy(plain)
    checkpoint_activations(model, "block", "auto")
    features = torch.randn(64, 3, requires_grad=True)
    Counted.calls = 0
    model(features).sum().backward()
    assert Counted.calls == 8
    with torch.no_grad():
        model(features)
    assert Counted.calls == 12
    assert saved_bytes(model, features) < 0.5 * saved_bytes(plain, features)


def test_names_stay_and_a_copy_is_its_own() -> None:
    plain = nn.Sequential(model_tasks.NoisyBlock(), model_tasks.NoisyBlock())
    names = list(plain.state_dict())
    checkpoint_activations(plain, "block", "auto")
    assert [name for name, _ in plain.named_parameters()] == [n for n in names if n.endswith(("weight", "bias"))]
    twin = copy.deepcopy(plain)
    assert list(twin.state_dict()) == names
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    features = torch.randn(5, tasks.FEATURES)
    assert torch.equal(twin(features), features)
    assert not torch.equal(plain(features), features)


def test_which_modules_are_repeated() -> None:
    stage = nn.Sequential(model_tasks.NoisyBlock(), model_tasks.NoisyBlock())
    leaves = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    model = nn.Sequential(nn.Linear(3, 3), stage, nn.ModuleList([leaves, nn.ReLU()]))
    assert repeated_units(model) == [stage[0], stage[1], leaves]


def test_a_model_without_blocks_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    message = r"has no list of composed modules\. Give --checkpoint-blocks with some of Linear, ReLU"
    with pytest.raises(ConfigError, match=message):
        checkpoint_activations(model, "block", "auto")
    with pytest.raises(ConfigError, match=r"--checkpoint-blocks Conv2d: the model has no module of class"):
        checkpoint_activations(model, "block", "Conv2d")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--checkpoint-blocks", "Linear"), "--checkpoint-blocks needs --checkpoint-activations"),
        (("--checkpoint-activations", "block", "--compile"), "does not work with --compile"),
        (("--checkpoint-activations", "all"), "none"),
        (
            ("--checkpoint-activations", "block", "--strategy", "dp"),
            "does not work with --strategy dp. Use --strategy ddp",
        ),
    ],
)
def test_bad_options(
    run_processes: Any, tests_importable: dict[str, str], options: tuple[str, ...], message: str
) -> None:
    command = ("train", "tests.training.model_tasks:Noisy", "--quiet", *options)
    done = run_processes.paceline(*command, env=tests_importable)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
