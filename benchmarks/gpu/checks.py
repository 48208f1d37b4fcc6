"""The rows of ``make test-gpu``: each runs tests that are marked ``gpu`` in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.gpu.pages import ROOT
from benchmarks.gpu.rows import Row

_GPU = "tests/gpu/test_{}.py::test_{}"
_MARK = "@pytest.mark.gpu\n"


def _row(
    name: str,
    title: str,
    *tests: str,
    limit_s: float = 90,
    gpus: int = 1,
    real: bool = False,
    alone: bool = False,
) -> Row:
    # Each process starts from nothing, as a user's does: none is forked from one that has loaded torch.
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--durations=0", "--cold"]
    # Warnings of another machine's packages are not about the GPU.
    command += ["-o", "filterwarnings=default", "-o", "timeout=0", *tests]
    return Row(name=name, title=title, command=command, limit_s=limit_s, gpus=gpus, real=real, alone=alone)


def _other_tests() -> Sequence[str]:
    """Return the other files that have tests marked ``gpu``."""
    roots = (ROOT / "tests", *ROOT.glob("plugins/*/tests"))
    files = sorted(path for root in roots for path in root.rglob("test_*.py") if _MARK in path.read_text())
    # The tests of our own pytest plug-ins have the mark in the text of a test.
    without = (ROOT / "tests" / "gpu", ROOT / "tests" / "plugins")
    found = [path for path in files if path.parent not in without]
    return [str(path.relative_to(ROOT)) for path in found]


def rows() -> list[Row]:
    """Return the rows, the cheapest and most telling first."""
    two_ranks = _GPU.format("one_gpu", "two_ranks_on_one_gpu_have_the_bits_of_one")
    tensors = (
        "a_step_has_its_own_randomness_on_the_gpu",
        "batches_arrive_whole_while_the_gpu_is_busy",
        "a_snapshot_holds_what_the_gpu_had_when_it_was_taken",
    )
    refusals = ("two_ranks_of_nccl_do_not_share_a_gpu", "a_hidden_gpu_is_not_replaced_by_the_cpu")
    return [
        _row(
            "one process",
            "two runs have the same bits, in fp32 and bf16",
            _GPU.format("one_gpu", "one_process_has_the_same_bits_again"),
        ),
        _row(
            "agent",
            "its workers take the GPU, and the first line names it",
            _GPU.format("choice", "an_agents_worker_takes_the_gpu_and_says_so"),
        ),
        _row(
            "attention",
            "20 backward passes have one result, by each backend",
            _GPU.format("tensors", "the_backward_of_attention_has_one_result_or_is_refused"),
        ),
        *(
            _row(
                f"{strategy}, 2 on 1 GPU",
                "two ranks by gloo have the bits of one process, in fp32 and bf16",
                f"{two_ranks}[{strategy}-fp32]",
                f"{two_ranks}[{strategy}-bf16]",
            )
            for strategy in ("ddp", "zero1", "pp")
        ),
        _row(
            "tensors",
            "randomness, copies and snapshots of a GPU",
            *(_GPU.format("tensors", name) for name in tensors),
        ),
        _row(
            "NCCL, 1 rank",
            "warm-up, broadcast, abort",
            _GPU.format("nccl", "a_group_of_one_rank_is_formed_and_aborted"),
            limit_s=60,
            real=True,
        ),
        _row(
            "refusals",
            "two ranks of NCCL share no GPU, and no CPU takes its place",
            *(_GPU.format("choice", name) for name in refusals),
        ),
        _row(
            "SIGTERM",
            "saved and resumed, with the same bits",
            _GPU.format("one_gpu", "a_stopped_run_continues_with_the_same_bits"),
            limit_s=120,
        ),
        _row(
            "out of memory",
            "the message says so, and what to do",
            _GPU.format("choice", "out_of_memory_says_so_and_what_to_do"),
            real=True,
        ),
        _row(
            "export",
            "made on the CPU, it predicts on the GPU",
            _GPU.format("choice", "a_model_exported_on_the_cpu_predicts_on_the_gpu"),
            limit_s=120,
        ),
        _row(
            "other tests",
            "the tests marked gpu of the other files",
            *_other_tests(),
            limit_s=120,
            real=True,
            alone=True,  # some measure time
        ),
        _row(
            "kill -9",
            "a worker is restarted with the same bits, and memory is freed",
            _GPU.format("one_gpu", "a_killed_worker_is_restarted_with_the_same_bits_and_leaves_no_memory"),
            limit_s=150,
            alone=True,
        ),
        _row(
            "randomness, 2 GPUs",
            "it is that of the rank's own GPU",
            _GPU.format("tensors", "the_randomness_of_a_step_is_that_of_the_ranks_own_gpu"),
            gpus=2,
            real=True,
        ),
        *(
            _row(
                f"NCCL, {gpus} GPUs",
                "ddp, zero1, fsdp and pp have the bits of one process",
                _GPU.format("nccl", f"{name}_gpus_have_the_bits_of_one"),
                limit_s=200,
                gpus=gpus,
                real=True,
                alone=True,
            )
            for gpus, name in ((2, "two"), (4, "four"), (8, "eight"))
        ),
        _row(
            "verify, 2 GPUs",
            "every strategy agrees with one process",
            _GPU.format("nccl", "every_strategy_agrees_with_one_process"),
            limit_s=240,
            gpus=2,
            real=True,
            alone=True,
        ),
    ]
