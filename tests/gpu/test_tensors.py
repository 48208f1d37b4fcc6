"""What a process does with a GPU's tensors: randomness, copies, snapshots, and the backward of attention."""

from __future__ import annotations

import hashlib
import re
from contextlib import closing
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import Dataset, default_collate

from benchmarks.gpu.rows import IS_REAL, report
from paceline.data.loader import build_loader
from paceline.data.order import DeterministicSampler
from paceline.runs.checkpoint_state import Snapshot, file_contents, read_tensors
from paceline.training.reproducibility import seed_step

pytestmark = [pytest.mark.gpu, pytest.mark.integration]


def test_a_step_has_its_own_randomness_on_the_gpu() -> None:
    torch.ones(1, device="cuda")  # only a GPU that is in use has a generator to seed
    drawn = []
    for step in (3, 4, 3):
        seed_step(0, step)
        drawn.append(torch.rand(1000, device="cuda").cpu())
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])


@pytest.mark.gpu(real=True, gpus=2)
def test_the_randomness_of_a_step_is_that_of_the_ranks_own_gpu() -> None:
    drawn = []
    for index in range(2):
        with torch.cuda.device(index):
            torch.rand(index + 1, device="cuda")  # the two generators differ before
            seed_step(0, 3)
            drawn.append(functional.dropout(torch.ones(1000, device="cuda"), 0.5).cpu())
    assert torch.equal(*drawn)


def digest(*tensors: torch.Tensor | None) -> str:
    content = hashlib.sha256()
    for tensor in tensors:
        assert tensor is not None
        content.update(tensor.detach().float().cpu().numpy().tobytes())
    return content.hexdigest()[:12]


BACKENDS = ("MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION")


@pytest.mark.parametrize("backend", BACKENDS if IS_REAL else BACKENDS[:1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_backward_of_attention_has_one_result_or_is_refused(
    backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    generator = torch.Generator().manual_seed(0)
    shape = (4, 8, 1024, 64) if IS_REAL else (2, 2, 32, 16)
    inputs = [torch.randn(shape, generator=generator).to("cuda", dtype).requires_grad_() for _ in range(3)]
    weights = torch.randn(shape, generator=generator).to("cuda", dtype)
    found: dict[str, str] = {}
    for mode, enabled, warn_only in (("free", False, False), ("warnings", True, True), ("errors", True, False)):
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        results = set()
        try:
            with sdpa_kernel(SDPBackend.__members__[backend]):
                for _ in range(20):
                    out = functional.scaled_dot_product_attention(*inputs, is_causal=True)
                    results.add(digest(*torch.autograd.grad((out * weights).sum(), inputs)))
            found[mode] = f"{len(results)} of 20"
        except RuntimeError as error:
            if not re.search("No available kernel|deterministic", str(error)):
                raise
            found[mode] = "refused"
        finally:
            torch.use_deterministic_algorithms(False)
    report(f"{backend} {str(dtype).removeprefix('torch.')}: " + ", ".join(f"{m} {r}" for m, r in found.items()))
    assert found["errors"] == "1 of 20" or (backend != "MATH" and found["errors"] == "refused")


class Numbers(Dataset[Any]):
    """Sample k is 4096 times k."""

    def __len__(self) -> int:
        return 240

    def __getitem__(self, k: int) -> torch.Tensor:
        return torch.full((4096,), float(k))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_arrive_whole_while_the_gpu_is_busy(workers: int) -> None:
    """A pinned buffer that is filled again before the GPU has read it would show here."""
    gpu = torch.device("cuda", 0)
    order = DeterministicSampler(240, 12, 3, seed=0)
    options: dict[str, Any] = {"seed": 5, "workers": workers, "collate": default_collate}
    size = 4096 if IS_REAL else 64
    matrix = torch.randn(size, size, device=gpu)
    with (
        closing(build_loader(Numbers(), order, device=gpu, **options)) as loader,
        closing(build_loader(Numbers(), order, device=torch.device("cpu"), **options)) as expected,
    ):
        batches = []
        for step in range(order.steps_per_epoch):
            for _ in range(10):
                matrix @ matrix
            batches.append([each.batch.clone() for each in loader.fetch(0, step, range(3))])
        for step, fetched in enumerate(batches):
            wanted = [each.batch for each in expected.fetch(0, step, range(3))]
            assert all(torch.equal(a.cpu(), b) for a, b in zip(fetched, wanted, strict=True)), f"step {step}"


def test_a_snapshot_holds_what_the_gpu_had_when_it_was_taken() -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "weights": torch.randn(257, 129, generator=generator).cuda(),
        "transposed": torch.randn(65, 33, generator=generator).cuda().t(),
        "half": torch.randn(1001, generator=generator).to("cuda", torch.bfloat16),
        "flags": (torch.randn(77, generator=generator) > 0).cuda(),
        "count": torch.tensor(7, device="cuda"),
        "empty": torch.empty(0, 3, device="cuda"),
        "of the host": torch.randn(5, generator=generator),
    }
    wanted = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    snapshot = Snapshot()
    snapshot.capture({"state.safetensors": tensors})
    for tensor in tensors.values():
        tensor.zero_()
    content = {name: b"".join(file_contents(tensors)) for name, tensors in snapshot.files.items()}
    back = read_tensors(content["state.safetensors"])
    assert back.keys() == wanted.keys()
    assert all(torch.equal(back[name], wanted[name]) for name in wanted)
