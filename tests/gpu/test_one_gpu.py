"""One process, and several that share a GPU: the same bits, as often as it is tried and however it is interrupted."""

from __future__ import annotations

import signal
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.gpu.conftest import ONE_UNDER_AN_AGENT, TWO_ON_ONE_GPU, Trainer

from benchmarks.gpu.rows import report

pytestmark = [pytest.mark.gpu, pytest.mark.integration]

PRECISIONS = ("fp32", "bf16")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_process_has_the_same_bits_again(trainer: Trainer, precision: str) -> None:
    runs = [trainer.start(f"run-{number}", "--precision", precision) for number in range(2)]
    models = {run.model() for run in runs}
    assert len(models) == 1
    report(f"{precision}: {models.pop()[:12]} twice")
    if precision == PRECISIONS[0]:
        pins = tomllib.loads((runs[0].directory / "run.toml").read_text())["pins"]
        report("numerics fingerprint: " + ", ".join(f"{name} {value}" for name, value in pins.items()))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "pp"])
def test_two_ranks_on_one_gpu_have_the_bits_of_one(trainer: Trainer, strategy: str, precision: str) -> None:
    options = ("--precision", precision)
    one = trainer.start("one", *options)
    two = trainer.start("two", "--strategy", strategy, *TWO_ON_ONE_GPU, *options)
    assert two.result()["world_size"] == 2
    assert two.model() == one.model()
    report(f"{strategy} {precision}: {one.model()[:12]} on both")


@pytest.mark.parametrize("options", [(), TWO_ON_ONE_GPU], ids=["one", "two"])
def test_a_stopped_run_continues_with_the_same_bits(
    trainer: Trainer, tmp_path: Path, wait_until: Callable[..., None], options: tuple[str, ...]
) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    undisturbed = trainer.start("undisturbed", *options)
    stopped = trainer.start("stopped", *options, hold=hold)
    wait_until(Path(f"{hold}.reached").exists, "step 4")
    stopped.popen.send_signal(signal.SIGTERM)
    hold.unlink()
    began = time.monotonic()
    ended = stopped.finish()
    assert ended.returncode == 75, ended.stdout + ended.stderr
    report(f"SIGTERM to the end: {time.monotonic() - began:.1f} s, exit code 75")
    assert trainer.resume(stopped, *options).model() == undisturbed.model()


@pytest.mark.parametrize("options", [ONE_UNDER_AN_AGENT, TWO_ON_ONE_GPU], ids=["one", "two"])
def test_a_killed_worker_is_restarted_with_the_same_bits_and_leaves_no_memory(
    trainer: Trainer, tmp_path: Path, wait_until: Callable[..., None], options: tuple[str, ...]
) -> None:
    torch.zeros(1, device="cuda")  # the context of this process counts too
    free = torch.cuda.mem_get_info()[0]
    undisturbed = trainer.start("undisturbed", *options).result()
    marker = tmp_path / "kill"
    marker.touch()
    killed = trainer.start("killed", *options, kill_once=marker, kill_rank=int(options is TWO_ON_ONE_GPU)).result()
    assert not marker.exists(), "nobody was killed"
    assert killed["restarts"] + killed["recoveries"] == 1
    assert killed["model_sha256"] == undisturbed["model_sha256"]
    wait_until(lambda: torch.cuda.mem_get_info()[0] > free - 2**26, "the GPU's memory is free", timeout_s=15)
    report(f"{free / 2**30:.1f} GiB free before, {torch.cuda.mem_get_info()[0] / 2**30:.1f} GiB after")
