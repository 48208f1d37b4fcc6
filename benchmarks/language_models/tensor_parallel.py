"""Samples a second of a Llama of 19 million parameters on two processes of one thread, in turns.

``python -m benchmarks.language_models.tensor_parallel``: ``--strategy tp``, transformers' own tensor parallelism under
torchrun, and ``--strategy fsdp``, on the same samples.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.language_models.sizes import BATCH_SIZE, CONTEXT, RANKS
from benchmarks.language_models.suite import train_command
from benchmarks.results import BenchResult, Quantity, compare, take_samples
from benchmarks.rounds import REPORT, BenchCommand, Sample, Variant, read_json
from benchmarks.workloads import read_records
from paceline.launch.local_run import free_master_port
from paceline_checks.bench_report import print_report

_RATE = Quantity("samples_per_s", "samples/s", 1)
_WARMUP = 3


def _write(directory: Path, steps: int) -> None:
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(directory / "model")
    draw = np.random.default_rng(0)
    draw.integers(0, 2048, steps * BATCH_SIZE * CONTEXT).astype("<u2").tofile(directory / "tokens.bin")


def _ours(strategy: str, inputs: Path, steps: int, directory: Path) -> list[BenchCommand]:
    options = {
        "--data": f"bin:{inputs / 'tokens.bin'}",
        "--context": CONTEXT,
        "--strategy": strategy,
        "--microbatches": 1 if strategy == "tp" else RANKS,
    }
    return train_command(inputs / "model", options, BATCH_SIZE, steps, directory)


def _theirs(inputs: Path, steps: int, directory: Path) -> list[BenchCommand]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", RANKS]
    meeting = ["--master-port", free_master_port("torch", RANKS), "-m", "benchmarks.language_models.tp_script"]
    words = [*torchrun, *meeting, inputs / "model", inputs / "tokens.bin", directory / REPORT, steps]
    return [BenchCommand([str(word) for word in words], {"HF_HUB_OFFLINE": "1"})]


def _read(directory: Path) -> Sample:
    if (directory / REPORT).exists():
        at = read_json(directory / REPORT)["at"]
    else:
        records = read_records(directory / "run" / "metrics.jsonl")
        at = [record["seconds"] for record in records if record["kind"] == "train"]
    return {_RATE.key: BATCH_SIZE * (len(at) - _WARMUP) / (at[-1] - at[_WARMUP - 1])}


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    steps = options.steps + _WARMUP
    with tempfile.TemporaryDirectory(prefix="paceline-bench-tp-") as name:
        inputs = Path(name)
        command = f"from {__spec__.name} import _write; _write(__import__('pathlib').Path({name!r}), {steps})"
        subprocess.run([sys.executable, "-c", command], check=True)
        contenders = [
            Variant(
                name="transformers", title="transformers, tp", commands=partial(_theirs, inputs, steps), read=_read
            ),
            *(
                Variant(name=each, title=f"--strategy {each}", commands=partial(_ours, each, inputs, steps), read=_read)
                for each in ("tp", "fsdp")
            ),
        ]
        title = "Llama of 19 million parameters"
        samples = take_samples(title, _RATE, contenders, options.rounds, lambda line: print(line, file=sys.stderr))
        table = compare(title, [_RATE], contenders, samples)
    print_report(BenchResult(benchmark="tp", document={}, comparisons=[table]), json=False, markdown=False)


if __name__ == "__main__":
    main()
