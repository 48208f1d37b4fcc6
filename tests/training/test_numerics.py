"""The numerics fingerprint, the ranks' comparison of it, and kernels without a deterministic form."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from tests.processes import Processes
from tests.training.tasks import Points
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import SGD

import paceline
from paceline.core.config import RunConfig
from paceline.core.errors import ConfigError, TaskError
from paceline.parallel.world import World
from paceline.training import step
from paceline.training.reproducibility import (
    compare_numerics,
    configure_numerics,
    describe_differing_ranks,
    deterministic_kernels,
    fix_cublas_workspace,
    numerics_fingerprint,
    preserve_numerics,
    release_cublas_workspace,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
EXACT = RunConfig()

# --- The fingerprint of a CPU ---


@pytest.mark.integration
def test_both_settings_of_float32_precision_are_read(run_processes: Processes) -> None:
    """Once the present setting is used, torch raises if anybody reads the former one; nor can all be put back."""
    code = """
import torch
from paceline.core.config import RunConfig
from paceline.training.reproducibility import numerics_fingerprint
def tell(): print(numerics_fingerprint(RunConfig(), torch.device("cpu"))["tf32"])
tell()
torch.set_float32_matmul_precision("highest"); tell()
torch.set_float32_matmul_precision("high"); tell()
torch.set_float32_matmul_precision("medium"); tell()
torch.set_float32_matmul_precision("highest"); tell()
torch.backends.cuda.matmul.fp32_precision = "tf32"; tell()
torch.backends.mkldnn.conv.fp32_precision = "bf16"; tell()
torch.backends.mkldnn.conv.fp32_precision = "ieee"; tell()
torch.backends.fp32_precision = "tf32"; tell()
"""
    done = run_processes.run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "False", "True", "True", "False", "False", "True", "False", "True"]


def test_a_cpu_has_no_fields_of_a_gpu() -> None:
    fingerprint = numerics_fingerprint(EXACT, CPU)
    assert {"torch", "device", "threads", "reduction", "deterministic", "tf32"} <= fingerprint.keys()
    assert not {"driver", "cudnn", "attention", "fp32_matmul"} & fingerprint.keys()


# --- The fingerprint of a GPU, as far as a build for CPUs has its settings ---


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")


@pytest.mark.usefixtures("pretended_gpu")
def test_the_settings_of_a_gpu_are_in_its_fingerprint() -> None:
    before = numerics_fingerprint(EXACT, CUDA)
    assert before["device"] == "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    assert before["multiprocessors"] == 132
    assert before["cublas_workspace"] == ":16:8"
    assert before["attention"] == "flash, mem_efficient, math, cudnn"
    assert (before["fp32_matmul"], before["fp32_conv"], before["fp32_rnn"]) == ("ieee", "tf32", "tf32")
    assert "tf32" not in before

    def changed() -> set[str]:
        after = numerics_fingerprint(EXACT, CUDA)
        return {name for name in before | after if before.get(name) != after.get(name)}

    assert changed() == set()
    with sdpa_kernel(SDPBackend.MATH):
        assert changed() == {"attention"}
    with torch.backends.cudnn.flags(enabled=False):
        assert "cudnn" in changed()
    matmul = torch.backends.cuda.matmul
    for setting, field in {
        "allow_fp16_reduced_precision_reduction": "fp16_reduced_sums",
        "allow_bf16_reduced_precision_reduction": "bf16_reduced_sums",
        "allow_fp16_accumulation": "fp16_accumulation",
    }.items():
        value = getattr(matmul, setting)
        setattr(matmul, setting, not value)
        try:
            assert changed() == {field}
        finally:
            setattr(matmul, setting, value)


# --- The comparison of all ranks ---


class Ranks:
    """Stands for a world whose ranks told these fingerprints."""

    rank = 0

    def __init__(self, *told: Any) -> None:
        self.told = told

    def all_gather_object(self, own: Any) -> list[Any]:
        return [own, *self.told]


def test_equal_ranks_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    own = ["cpu", numerics_fingerprint(EXACT, CPU)]
    compare_numerics(cast(World, Ranks(own, own)), EXACT, CPU)
    assert not caplog.messages


def test_cpus_of_several_models_train_together_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    own = numerics_fingerprint(EXACT, CPU)
    world = Ranks(["cpu", own | {"device": "Other CPU, AVX2"}], ["cpu", own])
    compare_numerics(cast(World, world), EXACT, CPU)
    (message,) = caplog.messages
    assert f"device: {own['device']} on ranks 0, 2, Other CPU, AVX2 on rank 1" in message
    assert "equal within rounding" in message
    compare_numerics(cast(World, world), RunConfig(reduction="allreduce"), CPU)
    assert len(caplog.messages) == 1


@pytest.mark.usefixtures("pretended_gpu")
def test_gpus_that_compute_differently_are_an_error_that_names_them() -> None:
    own = numerics_fingerprint(EXACT, CUDA)
    told = [["cuda", own | {"driver": "570.1", "cudnn": 1}], ["cuda", own | {"driver": "580.2", "cudnn": 1}]]
    with pytest.raises(ConfigError) as raised:
        compare_numerics(cast(World, Ranks(*told)), EXACT, CUDA)
    assert "driver: not set on rank 0, 570.1 on rank 1, 580.2 on rank 2" in str(raised.value)
    assert "on ranks 1, 2" in str(raised.value)
    assert "--reduction allreduce" in str(raised.value)
    compare_numerics(cast(World, Ranks(*told)), RunConfig(reduction="allreduce"), CUDA)


def test_each_field_has_a_line() -> None:
    lines = describe_differing_ranks([{"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": True, "b": "y"}])
    assert lines == ["a: 1 on ranks 0, 1, True on rank 2", "b: x on rank 0, y on ranks 1, 2"]


# --- Operations without a deterministic kernel ---


@pytest.fixture
def as_in_training() -> Iterator[None]:
    with preserve_numerics():
        configure_numerics(EXACT, torch.get_num_threads(), CPU)
        yield


def put_in_no_order() -> None:
    """An operation of which torch has no deterministic form on a CPU either."""
    torch.zeros(4).put_(torch.tensor([0, 1]), torch.ones(2))


@pytest.mark.usefixtures("as_in_training")
def test_on_a_gpu_such_an_operation_is_an_error_of_the_task() -> None:
    with pytest.raises(TaskError, match=r"operation put_ has no deterministic kernel.*--reduction allreduce"):  # noqa: SIM117
        with deterministic_kernels(EXACT, CUDA):
            put_in_no_order()
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    with pytest.raises(TaskError, match=r"attention that sdpa_kernel\(\) selects.*FLASH_ATTENTION"):  # noqa: SIM117
        with deterministic_kernels(EXACT, CUDA):
            raise RuntimeError("No available kernel. Aborting execution.")
    with pytest.raises(RuntimeError, match="another"), deterministic_kernels(EXACT, CUDA):
        raise RuntimeError("another")
    with deterministic_kernels(EXACT, CUDA):
        with deterministic_kernels(EXACT, CUDA):
            pass
        assert not torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.mark.usefixtures("as_in_training")
@pytest.mark.parametrize(("config", "device"), [(EXACT, CPU), (RunConfig(reduction="allreduce"), CUDA)])
def test_elsewhere_torch_only_warns(config: RunConfig, device: torch.device) -> None:
    with deterministic_kernels(config, device):
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        with pytest.warns(UserWarning, match="put_ does not have a deterministic implementation"):
            put_in_no_order()


class Checked:
    """Whether the code that runs is within :func:`deterministic_kernels`, and what a task saw of it."""

    now = False
    seen: ClassVar[dict[str, set[bool]]] = defaultdict(set)

    @classmethod
    def note(cls, what: str) -> None:
        cls.seen[what].add(cls.now)


@contextmanager
def note_checked(config: RunConfig, device: torch.device) -> Iterator[None]:
    Checked.now = True
    yield
    Checked.now = False


class NotingSGD(SGD):
    def step(self, closure: Any = None) -> None:
        Checked.note("update")
        super().step(closure)


class NotingCallback(paceline.Callback):
    def on_step_begin(self, step: int, step_in_epoch: int) -> None:
        Checked.note("callback")


@dataclass
class Noting(Points):
    def build_optimizer(self, model: nn.Module) -> SGD:
        return NotingSGD(model.parameters(), lr=0.1)

    def build_callback(self, model: nn.Module, schedule: paceline.RunSchedule) -> NotingCallback:
        return NotingCallback()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        Checked.note("training" if model.training else "evaluation")
        return super().loss(model, batch)


def test_only_the_computation_of_a_step_is_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The task's callbacks and its evaluation are not."""
    monkeypatch.setattr(step, "deterministic_kernels", note_checked)
    paceline.fit(Noting(num_val=8), run_dir=str(tmp_path / "run"), max_steps=2, device="cpu")
    assert Checked.seen == {"training": {True}, "update": {True}, "callback": {False}, "evaluation": {False}}


PUTTING = '''
from dataclasses import dataclass

import torch
from tests.training.tasks import Points


@dataclass
class Putting(Points):
    """Writes in no order, into what nobody reads."""

    where: str = "training"

    def loss(self, model, batch):
        if self.where == ("training" if model.training else "evaluation"):
            place = torch.zeros(4, device=batch[0].device)
            place.put_(torch.tensor([0, 1], device=batch[0].device), torch.ones(2, device=batch[0].device))
        return super().loss(model, batch)
'''


@pytest.mark.integration
def test_training_on_a_gpu_names_the_operation(
    run_processes: Processes, gpu_stand_in: Any, tests_importable: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "putting.py").write_text(PUTTING)
    env = gpu_stand_in.env(1)
    env["PYTHONPATH"] += os.pathsep + tests_importable["PYTHONPATH"]

    def train(where: str, reduction: str) -> subprocess.CompletedProcess[str]:
        options = ("--set", f"where={where}", "--set", "num_val=8", "--reduction", reduction, "--device", "cuda")
        run = tmp_path / f"{where}-{reduction}"
        return run_processes.paceline("train", "putting.py:Putting", *options, "--run-dir", run, env=env)

    refused = train("training", "exact")
    assert refused.returncode == 2
    assert "the operation put_ has no deterministic kernel" in refused.stderr
    assert "--reduction allreduce" in refused.stderr
    for done in (train("training", "allreduce"), train("evaluation", "exact")):
        assert done.returncode == 0, done.stderr


CUBLAS = (
    "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or "
    "`at::Context::setDeterministicAlgorithms(true)`, but this operation is not deterministic because it uses CuBLAS "
    "and you have CUDA >= 10.2. To enable deterministic behavior in this case, you must set an environment variable "
    "before running your PyTorch application: CUBLAS_WORKSPACE_CONFIG=:4096:8 or CUBLAS_WORKSPACE_CONFIG=:16:8. "
)


def test_a_process_that_multiplied_too_early_is_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch remembers the workspace of its first multiplication, and refuses later ones."""

    def refuse(*matrices: torch.Tensor) -> torch.Tensor:
        if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
            raise RuntimeError(CUBLAS)
        return matrices[0]

    ones = torch.ones(2, 2)
    monkeypatch.setattr(torch, "ones", lambda *shape, device: ones)
    monkeypatch.setattr(torch, "mm", refuse)
    with preserve_numerics():
        with pytest.raises(ConfigError, match=r"multiplied matrices on a GPU.*CUBLAS_WORKSPACE_CONFIG=:4096:8"):
            configure_numerics(EXACT, 1, CUDA)
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        configure_numerics(RunConfig(reduction="allreduce"), 1, CUDA)


@pytest.mark.parametrize(
    ("model", "chosen", "left"),
    [
        (nn.Linear(1, 1), None, None),
        (nn.Linear(1, 1), ":4096:8", None),
        (nn.Linear(1, 1), ":16:8", ":16:8"),
        (nn.Sequential(nn.LSTM(1, 1)), None, ":4096:8"),
    ],
)
def test_torch_parses_no_workspace_in_each_multiplication(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, chosen: str | None, left: str | None
) -> None:
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", chosen)
    with preserve_numerics():
        fix_cublas_workspace()
        release_cublas_workspace(model)
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == left
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == chosen
