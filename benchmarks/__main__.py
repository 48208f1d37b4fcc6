"""Paceline compared with hand-written loops and other libraries: ``python -m benchmarks SUITE``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from cyclopts import App, Parameter

from paceline.core.errors import PacelineError
from paceline_checks.bench_report import print_report

if TYPE_CHECKING:
    from benchmarks.results import BenchResult
    from benchmarks.workloads import Workload

app = App(
    name="python -m benchmarks",
    help="Compare Paceline's speed with plain loops and other libraries.",
    version_flags=(),
    result_action="return_value",
    help_format="plaintext",
)

PeerName = Literal["ddp", "accelerate", "lightning", "paceline-exact", "paceline-fast", "paceline-torch"]
_ALL_PEERS: tuple[PeerName, ...] = get_args(PeerName)

RecovererName = Literal["torchrun", "paceline-torchrun", "paceline-inplace"]
_ALL_RECOVERERS: tuple[RecovererName, ...] = get_args(RecovererName)

SuiteName = Literal["fsdp", "tp", "pp", "schedules", "memory", "pipeline", "pipedream", "slow-link", "slow-worker"]

ServingSuiteName = Literal["json", "binary", "predict", "overload", "swap", "drain", "kill", "exact", "engine"]

EngineName = Literal["paceline", "mesh", "ray", "monarch", "monarch-1s"]
SearchedTask = Literal["fashion-mnist", "transformer"]
_ALL_ENGINES: tuple[EngineName, ...] = get_args(EngineName)

Rounds = Annotated[int, Parameter(help="How often each is measured, in turns.")]
Steps = Annotated[int | None, Parameter(help="Steps to measure. Default: some seconds' worth.")]
WorkloadName = Annotated[Literal["convnet", "mlp", "all"], Parameter(help="What to train.")]
Json = Annotated[bool, Parameter(negative="", help="Print JSON, with every round, instead of tables.")]
Markdown = Annotated[bool, Parameter(negative="", help="Print Markdown tables.")]


@app.command
def train(
    *,
    workload: WorkloadName = "all",
    peers: Annotated[
        tuple[PeerName, ...],
        Parameter(
            consume_multiple=True,
            negative="",
            show_default=False,
            help="What trains; ratios are to the first. Default: all, in this order.",
        ),
    ] = _ALL_PEERS,
    rounds: Rounds = 5,
    steps: Steps = None,
    warmup: Annotated[int | None, Parameter(help="Steps of warm-up. Default: the workload's.")] = None,
    microbatches: Annotated[int, Parameter(help="Paceline's --microbatches.")] = 2,
    json: Json = False,
    markdown: Markdown = False,
) -> int:
    """Steps a second of the same training by each peer: 2 CPU ranks, gloo, 64 samples a rank."""
    from benchmarks.train import bench_train

    result = bench_train(
        workloads=_workloads(workload),
        peers=peers,
        rounds=rounds,
        steps=steps,
        warmup=warmup,
        microbatches=microbatches,
        progress=_progress,
    )
    return show(result, json=json, markdown=markdown)


@app.command
def checkpoint(*, rounds: Rounds = 5, steps: Steps = None, json: Json = False, markdown: Markdown = False) -> int:
    """What a checkpoint every 50 steps costs, on the ConvNet."""
    from benchmarks.train import bench_checkpoint

    return show(bench_checkpoint(rounds=rounds, steps=steps, progress=_progress), json=json, markdown=markdown)


@app.command
def overhead(*, rounds: Rounds = 5, steps: Steps = None, json: Json = False, markdown: Markdown = False) -> int:
    """What recovery in place costs while nothing fails, on the ConvNet."""
    from benchmarks.train import bench_overhead

    return show(bench_overhead(rounds=rounds, steps=steps, progress=_progress), json=json, markdown=markdown)


@app.command
def guard(*, rounds: Rounds = 5, steps: Steps = None, json: Json = False, markdown: Markdown = False) -> int:
    """What the purity guard costs, on the ConvNet and the MLP: blocks of steps with and without it, in turns."""
    from benchmarks.train import bench_guard

    return show(bench_guard(rounds=rounds, steps=steps, progress=_progress), json=json, markdown=markdown)


@app.command
def memory(*, rounds: Rounds = 3, json: Json = False, markdown: Markdown = False) -> int:
    """Peak memory of a rank beyond the imports', on a 20-million-parameter MLP."""
    from benchmarks.train import bench_memory

    return show(bench_memory(rounds=rounds, progress=_progress), json=json, markdown=markdown)


@app.command
def microbatches(
    *,
    counts: Annotated[
        tuple[int, ...],
        Parameter(
            consume_multiple=True,
            negative="",
            show_default=False,
            help="Numbers of micro-batches; ratios are to the first. Default: 2 12.",
        ),
    ] = (2, 12),
    workload: WorkloadName = "convnet",
    rounds: Rounds = 5,
    steps: Steps = None,
    json: Json = False,
    markdown: Markdown = False,
) -> int:
    """Time a step for several numbers of logical micro-batches, with the exact reduction."""
    from benchmarks.train import bench_microbatches

    result = bench_microbatches(
        workloads=_workloads(workload), microbatches=counts, rounds=rounds, steps=steps, progress=_progress
    )
    return show(result, json=json, markdown=markdown)


@app.command
def shares(
    *,
    rounds: Rounds = 3,
    steps: Annotated[int, Parameter(help="Steps to measure.")] = 200,
    warmup: Annotated[int, Parameter(help="Steps before those, in which speeds are measured.")] = 200,
    json: Json = False,
    markdown: Markdown = False,
) -> int:
    """Two ranks share 12 micro-batches of the ConvNet, one at half speed: --load-balance auto against equal.

    The slow rank is stopped for 4 of every 8 milliseconds (SIGSTOP, SIGCONT).
    """
    from benchmarks.train import bench_shares

    result = bench_shares(rounds=rounds, steps=steps, warmup=warmup, progress=_progress)
    return show(result, json=json, markdown=markdown)


@app.command
def scaling(
    task: str,
    *options: Annotated[str, Parameter(allow_leading_hyphen=True, help="After --: further options of paceline train.")],
    nproc: Annotated[
        tuple[int, ...],
        Parameter(consume_multiple=True, negative="", help="Numbers of processes a node; ratios are to the least."),
    ] = (1, 2),
    batch_per_process: Annotated[
        int | None, Parameter(help="Samples a process and step (weak scaling). Default: the same global batch for all.")
    ] = None,
    steps: Annotated[int, Parameter(help="Steps to measure.")] = 100,
    warmup: Annotated[int, Parameter(help="Steps before those.")] = 20,
    rounds: Rounds = 1,
    json: Json = False,
    markdown: Markdown = False,
) -> int:
    """Throughput, speed-up and efficiency of a task of your own by the number of processes."""
    from benchmarks.scaling import bench_scaling

    result = bench_scaling(
        task,
        nproc=nproc,
        batch_per_process=batch_per_process,
        steps=steps,
        warmup=warmup,
        rounds=rounds,
        options=options,
        progress=_progress,
    )
    return show(result, json=json, markdown=markdown)


@app.command
def coordinators(*, rounds: Rounds = 5, json: Json = False, markdown: Markdown = False) -> int:
    """Nodes killed and frozen: how soon the others continue, with the embedded coordinator and with etcd."""
    from benchmarks.coordinators import bench_coordinators

    return show(bench_coordinators(rounds=rounds, progress=_progress), json=json, markdown=markdown)


@app.command
def recovery(
    *,
    contenders: Annotated[
        tuple[RecovererName, ...],
        Parameter(
            consume_multiple=True,
            negative="",
            show_default=False,
            help="Whose workers are killed: torchrun (a plain DDP script with snapshots), paceline-torchrun, "
            "paceline-inplace. Default: all.",
        ),
    ] = _ALL_RECOVERERS,
    nproc: Annotated[int, Parameter(help="Workers.")] = 2,
    kills: Annotated[int, Parameter(help="Workers killed in a round, of each contender.")] = 3,
    rounds: Annotated[int, Parameter(help="How often each is tried, in turns.")] = 1,
    seed: Annotated[int, Parameter(help="Decides at which steps and which ranks.")] = 0,
    hang_after: Annotated[float, Parameter(help="Seconds without a step that count as a hang.")] = 30.0,
    json: Json = False,
    markdown: Markdown = False,
) -> int:
    """Workers killed with -9: which jobs come back, how soon, and with the weights of the undisturbed run."""
    from benchmarks.recovery import bench_recovery

    result = bench_recovery(
        contenders=contenders,
        nproc=nproc,
        kills=kills,
        rounds=rounds,
        seed=seed,
        hang_after_s=hang_after,
        progress=_progress,
    )
    return show(result, json=json, markdown=markdown)


@app.command
def strategies(
    *,
    suite: Annotated[
        tuple[SuiteName, ...],
        Parameter(
            consume_multiple=True,
            negative="",
            show_default=False,
            help="What to measure. Default: all but slow-link.",
        ),
    ] = (),
    rounds: Rounds = 3,
    steps: Annotated[int, Parameter(help="Steps to measure.")] = 200,
    warmup: Annotated[int, Parameter(help="Steps before those.")] = 50,
    json: Json = False,
    markdown: Markdown = False,
) -> int:
    """Strategies compared with the same by hand with torch's own APIs, each with its target.

    fsdp, tp, pp: steps a second at 2 ranks. schedules: those of the pipeline. memory: of a rank of 4, fsdp
    against ddp. pipeline: balanced stages, and the runtime, in the same processes. pipedream: against 1F1B.
    slow-link: bytes and accuracy over 100 Mbit/s between two network namespaces (needs root). slow-worker:
    parameter servers. At the end, one table of all bars.
    """
    from benchmarks.strategies import bench_strategies

    result = bench_strategies(chosen=suite, rounds=rounds, steps=steps, warmup=warmup, progress=_progress)
    return show(result, json=json, markdown=markdown)


@app.command
def tune(
    *,
    trials: Annotated[int, Parameter(help="Trials of both searches.")] = 32,
    steps: Annotated[int, Parameter(help="Steps of a whole trial.")] = 320,
    alone: Annotated[int, Parameter(help="Trials one after another, compared with paceline train.")] = 8,
    rounds: Annotated[int, Parameter(help="How often these two are run, in turns.")] = 3,
    json: Json = False,
    markdown: Markdown = False,
) -> int:
    """ASHA compared with a full grid of the same configurations, and a trial with a bare paceline train."""
    from benchmarks.tuning import bench_tuning

    result = bench_tuning(trials=trials, steps=steps, alone=alone, rounds=rounds, progress=_progress)
    return show(result, json=json, markdown=markdown)


@app.command
def searches(
    *,
    tasks: Annotated[tuple[SearchedTask, ...], Parameter(consume_multiple=True, negative="", help="Which tasks.")] = (
        "fashion-mnist",
        "transformer",
    ),
    trials: Annotated[int, Parameter(help="Trials of each search.")] = 32,
    steps: Annotated[int, Parameter(help="Steps of a whole trial.")] = 160,
    evaluations: Annotated[int, Parameter(help="Evaluations of a whole trial.")] = 16,
    rounds: Annotated[int, Parameter(help="Number of seeds.")] = 3,
    json: Json = False,
    markdown: Markdown = False,
) -> int:
    """Best value and time of a search by Paceline, by Optuna alone and by Ray Tune alone."""
    from benchmarks.tuning import bench_searches

    result = bench_searches(
        tasks=tasks, trials=trials, steps=steps, evaluations=evaluations, rounds=rounds, progress=_progress
    )
    return show(result, json=json, markdown=markdown)


@app.command
def lm(
    *,
    rounds: Rounds = 3,
    steps: Annotated[int, Parameter(help="Steps to measure.")] = 30,
    warmup: Annotated[int, Parameter(help="Steps before those.")] = 10,
    json: Json = False,
    markdown: Markdown = False,
) -> int:
    """Tokens a second of paceline train hf:, TRL and transformers' Trainer: a tiny Llama, packed texts, 2 CPU ranks."""
    from benchmarks.language_models.suite import bench_language_models

    result = bench_language_models(rounds=rounds, steps=steps, warmup=warmup, progress=_progress)
    return show(result, json=json, markdown=markdown)


@app.command
def scripts(*, rounds: Rounds = 3, json: Json = False, markdown: Markdown = False) -> int:
    """Steps a second of scripts of others on two CPU ranks: under DDP as they were, and with paceline.Run."""
    from benchmarks.scripts_of_others import bench_scripts

    return show(bench_scripts(rounds=rounds, progress=_progress), json=json, markdown=markdown)


@app.command
def engines(
    *,
    engines: Annotated[
        tuple[EngineName, ...],
        Parameter(
            consume_multiple=True,
            negative="",
            show_default=False,
            help="What carries the processes; ratios are to the first. Default: all, in this order.",
        ),
    ] = _ALL_ENGINES,
    processes: Annotated[
        tuple[int, ...], Parameter(consume_multiple=True, negative="", help="How many processes, a table each.")
    ] = (2, 16, 64),
    rounds: Rounds = 3,
    seconds: Annotated[
        float, Parameter(help="How long the processes are left to themselves, for the processor time of that.")
    ] = 4.0,
    json: Json = False,
    markdown: Markdown = False,
) -> int:
    """Start, a message to all, a kill and memory of processes by Paceline's agent, Ray and Monarch, here."""
    from benchmarks.engines import bench_engines

    result = bench_engines(engines=engines, processes=processes, rounds=rounds, idle_s=seconds, progress=_progress)
    return show(result, json=json, markdown=markdown)


@app.command
def serve(
    *,
    only: Annotated[
        tuple[ServingSuiteName, ...],
        Parameter(consume_multiple=True, negative="", show_default=False, help="What to measure. Default: all."),
    ] = (),
    rounds: Rounds = 3,
    seconds: Annotated[float, Parameter(help="How long each is loaded, after a warm-up.")] = 10.0,
    json: Json = False,
    markdown: Markdown = False,
) -> int:
    """Requests per second of paceline serve, compared with FastAPI and LitServe, on the ConvNet.

    json: 32 connections, each a picture as 784 numbers. binary: 32 rows a request, against the model alone.
    predict: a file of rows, 45,000 for each of --seconds, by paceline predict with one process and with two.
    overload: five times what it can do, what is refused and how fast. swap, drain, kill: a server whose
    package is exchanged 100 times, two that are ended 20 times, replicas killed with -9, all under load.
    engine: tokens of 32 streams through --engine transformers, against its server asked directly.
    At the end, one table of all bars.
    """
    from benchmarks.serving.suite import bench_serve

    result = bench_serve(only=only, rounds=rounds, seconds=seconds, progress=_progress)
    return show(result, json=json, markdown=markdown)


def _workloads(name: str) -> list[Workload]:
    from benchmarks.workloads import WORKLOADS

    return list(WORKLOADS.values()) if name == "all" else [WORKLOADS[name]]


def _progress(line: str) -> None:
    # Not on the standard output, which is for the result.
    print(line, file=sys.stderr, flush=True)


def show(result: BenchResult, *, json: bool = False, markdown: bool = False) -> int:
    """Print a benchmark's result: tables, Markdown or JSON."""
    print_report(result, json=json, markdown=markdown)
    return 0


def main() -> int:
    """Run the command line; return the exit code."""
    try:
        return int(app() or 0)
    except PacelineError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
