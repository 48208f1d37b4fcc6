"""The suite ``lm``: tokens a second, loss curves and lines that a user writes; no torch is imported."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.language_models.sizes import BATCH_SIZE, CONTEXT, RANKS
from benchmarks.results import BenchResult, Progress, Quantity, Spread, TargetResult, compare, take_samples
from benchmarks.rounds import REPORT, BenchCommand, Sample, Variant, read_json
from benchmarks.workloads import read_records
from paceline.core.errors import ConfigError
from paceline.launch.local_run import free_master_port

_TOKENS_PER_S = Quantity("tokens_per_s", "tokens/s", 0)
_TOKENS_PER_PROCESSOR_S = Quantity("tokens_per_processor_s", "tokens/processor second", 0)
_HERE = Path(__file__).parent
_PEERS = {"trl": ("TRL's SFTTrainer", "texts.jsonl"), "trainer": ("transformers' Trainer", "packs.jsonl")}


@dataclass(frozen=True)
class Curve:
    """A run of one contender.

    Attributes:
        at: when each step ended, in seconds.
        processor_s: rank 0's processor time until then.
        losses: of each step.
        packs: of an epoch.
    """

    at: Sequence[float]
    processor_s: Sequence[float]
    losses: Sequence[float]
    packs: int


_ROUNDING_PPM = 10.0
"""By how many millionths of it the loss of the same batch may differ."""


def bench_language_models(*, rounds: int, steps: int, warmup: int, progress: Progress) -> BenchResult:
    """Train a tiny Llama on packed texts by Paceline, TRL and Trainer, in turns.

    Trainer gets Paceline's packs in Paceline's order, so its loss at each step has to be the same within rounding;
    TRL packs and orders the texts itself.

    Raises:
        ConfigError: a number is out of range.
        LaunchError: a process failed.
    """
    if min(rounds, steps, warmup) < 1:
        raise ConfigError("--rounds, --steps and --warmup must be at least 1.")
    with tempfile.TemporaryDirectory(prefix="paceline-bench-lm-") as name:
        inputs = Path(name)
        subprocess.run([sys.executable, "-m", "benchmarks.language_models.data", name], check=True)
        counts = read_json(inputs / "counts.json")
        most = counts["packs"] // (RANKS * BATCH_SIZE)
        if warmup + steps > most:
            raise ConfigError(f"an epoch has {most} steps; --warmup and --steps are {warmup + steps}.")

        def read(curve: Callable[[Path], Curve], directory: Path) -> Sample:
            run = curve(directory)
            tokens = steps * RANKS * BATCH_SIZE * counts["tokens"] / run.packs
            first, last = warmup - 1, warmup + steps - 1
            return {
                _TOKENS_PER_S.key: tokens / (run.at[last] - run.at[first]),
                _TOKENS_PER_PROCESSOR_S.key: tokens / RANKS / (run.processor_s[last] - run.processor_s[first]),
                **{f"loss_{step}": loss for step, loss in enumerate(run.losses, 1)},
            }

        ours = Variant(
            name="paceline",
            title="paceline train hf:",
            commands=partial(_paceline, inputs, warmup + steps),
            read=partial(read, partial(_our_curve, counts["packs"])),
        )
        peers = [
            Variant(
                name=peer,
                title=title,
                commands=partial(_script, peer, inputs / data, inputs / "model", warmup + steps),
                read=partial(read, _peer_curve),
            )
            for peer, (title, data) in _PEERS.items()
        ]
        contenders = [*peers, ours]
        title = "Llama of 1.3 million parameters"
        samples = take_samples(title, _TOKENS_PER_S, contenders, rounds, progress)
    fewest = min(_lines(peer) for peer in _PEERS)
    verdicts = [
        *(_rate(quantity, peer, samples) for quantity in (_TOKENS_PER_S, _TOKENS_PER_PROCESSOR_S) for peer in peers),
        _difference(samples, warmup + steps),
        TargetResult(
            "lines", "that a user writes, of the shorter script's", Spread.of([1 / fewest]), 1.0, at_most=True
        ),
    ]
    settings = {"ranks": RANKS, "packs_per_rank": BATCH_SIZE, "pack": CONTEXT, "warmup": warmup, "steps": steps}
    return BenchResult(
        benchmark="lm",
        document={"settings": {"rounds": rounds, **settings}},
        comparisons=[
            compare(
                title,
                [_TOKENS_PER_S, _TOKENS_PER_PROCESSOR_S, Quantity(f"loss_{warmup + steps}", "last loss", 3)],
                contenders,
                samples,
            )
        ],
        verdicts=verdicts,
        remarks=[
            f"{RANKS} ranks, gloo, 1 thread a rank, {BATCH_SIZE} packs of {CONTEXT} tokens a rank; rounds in turns: "
            f"{rounds}; medians, ratios taken within each round; warm-up excluded."
        ],
    )


def train_command(
    model: Path, own: Mapping[str, object], batch_size: int, steps: int, directory: Path
) -> list[BenchCommand]:
    """Return the command that trains a language model by Paceline, with the options ``own`` before those of all."""
    options = {
        **own,
        "--nproc": RANKS,
        "--global-batch-size": batch_size,
        "--max-steps": steps,
        "--set": "lr=0.001",
        "--log-every": 1,
        "--threads": 1,
        "--device": "cpu",
        "--checkpoint-every": "never",
        "--run-dir": directory / "run",
    }
    words = [str(word) for option in options.items() for word in option]
    return [BenchCommand([sys.executable, "-m", "paceline", "train", f"hf:{model}", "--quiet", *words])]


def _paceline(inputs: Path, steps: int, directory: Path) -> list[BenchCommand]:
    data = {"--data": inputs / "texts.jsonl", "--pack": CONTEXT}
    return train_command(inputs / "model", data, RANKS * BATCH_SIZE, steps, directory)


def _script(peer: str, data: Path, model: Path, steps: int, directory: Path) -> list[BenchCommand]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    meeting = ["--master-port", str(free_master_port("torch", RANKS)), "-m", "benchmarks.language_models.clock"]
    script = [_HERE / f"{peer}_script.py", model, data, directory / "output", steps]
    argv = [*torchrun, *meeting, directory / REPORT, *script]
    variables = {"HF_DATASETS_CACHE": str(directory / "datasets"), "HF_HUB_OFFLINE": "1"}
    return [BenchCommand([str(word) for word in argv], variables)]


def _our_curve(packs: int, directory: Path) -> Curve:
    records = read_records(directory / "run" / "metrics.jsonl")
    steps = [record for record in records if record["kind"] == "train"]
    at = [record["seconds"] for record in steps]
    turns = [after - before for before, after in itertools.pairwise([0.0, *at])]
    spent = [turn * record["ranks"][0]["utilisation"] for turn, record in zip(turns, steps, strict=True)]
    return Curve(at, list(itertools.accumulate(spent)), [record["loss"] for record in steps], packs)


def _peer_curve(directory: Path) -> Curve:
    return Curve(**read_json(directory / REPORT))


def _rate(quantity: Quantity, peer: Variant, samples: Mapping[str, Sequence[Sample]]) -> TargetResult:
    key = quantity.key
    ratios = [own[key] / other[key] for own, other in zip(samples["paceline"], samples[peer.name], strict=True)]
    bar = 1.0 if quantity is _TOKENS_PER_S else None
    return TargetResult(quantity.title, f"of {peer.title}", Spread.of(ratios), bar)


def _difference(samples: Mapping[str, Sequence[Sample]], steps: int) -> TargetResult:
    """The greatest difference of a step's loss from Trainer's, which has the same batches."""
    greatest = [
        1e6 * max(abs(own[f"loss_{step}"] / other[f"loss_{step}"] - 1) for step in range(1, steps + 1))
        for own, other in zip(samples["paceline"], samples["trainer"], strict=True)
    ]
    of_what = "greatest difference from Trainer's"
    return TargetResult("loss", of_what, Spread.of(greatest), _ROUNDING_PPM, at_most=True, unit=" millionths")


def _lines(peer: str) -> int:
    """Lines of a peer's script, without blank ones and its docstring."""
    lines = (_HERE / f"{peer}_script.py").read_text(encoding="utf-8").splitlines()
    return sum(bool(line.strip()) and not line.startswith('"""') for line in lines)
