"""Train a task with and without injected faults, and prove that nothing was lost."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import tomli_w

from paceline.core.config import RunConfig, config_from_mapping
from paceline.core.environment import Environment, default_threads
from paceline.core.errors import ConfigError, LaunchError, RunDirectoryError
from paceline.core.options import at_least
from paceline.core.ownership import own_prefix, remove_leftovers
from paceline.core.stats import percentile
from paceline.data.audit import audit
from paceline.elastic.agent import AgentConnection
from paceline.runs.directory import RunDirectory
from paceline.runs.timeline import Timeline, timeline
from paceline_checks.fault_injection import Fault, FaultInjector, Injection, Kind, WriteFaults, check_kinds, plan_faults

# --- The results of a run under faults, compared with a run without faults ---


@dataclass(frozen=True)
class KindReport:
    """Counts of the faults of one kind, of which some are not injected if the run ends first, and times to recover."""

    kind: Kind
    planned: int
    injected: int
    recovered: int
    p50_s: float | None
    p99_s: float | None


@dataclass(frozen=True)
class Capacity:
    """How well the run under faults used the workers that it had.

    Attributes:
        needed_s: training time of the run without faults.
        available_s: training time of the run under faults, each second weighted by the share of the
            fault-free run's processors that the surviving workers could use.
        goodput: the ratio of both; close to 1 if faults cost no more than the workers that they killed.
        lost_s_per_fault: beyond the lost capacity.
    """

    needed_s: float
    available_s: float
    faults: int
    goodput: float | None
    lost_s_per_fault: float | None


@dataclass(frozen=True, kw_only=True)
class ChaosReport:
    """The outcome of a chaos test; :attr:`problems` is empty if nothing was lost.

    Attributes:
        repeated_steps: recomputed because all their holders were lost.
        leaks: what the run under faults left behind in ``/dev/shm`` and in its temporary directory.
        clean_sha256, chaos_sha256: of the final models; None if the run did not finish.
    """

    task: str
    clean_run: str
    chaos_run: str
    nproc: int
    seed: int
    exit_code: int
    steps: int
    kinds: tuple[KindReport, ...]
    repeated_steps: int
    samples_lost: int
    samples_duplicated: int
    audit_clean: bool
    audit: str
    leaks: tuple[str, ...]
    capacity: Capacity | None
    clean_sha256: str
    chaos_sha256: str | None

    @property
    def same_model(self) -> bool:
        return self.chaos_sha256 == self.clean_sha256

    @property
    def problems(self) -> tuple[str, ...]:
        planned, injected, recovered = (
            sum(getattr(kind, name) for kind in self.kinds) for name in ("planned", "injected", "recovered")
        )
        phrases = []
        if self.exit_code:
            phrases.append(f"the run under faults ended with exit code {self.exit_code}")
        if recovered < injected:
            phrases.append(f"{injected - recovered} of {injected} faults were not recovered from")
        if injected < planned:
            phrases.append(
                f"{planned - injected} of {planned} faults were not injected before the end of the run: "
                "use fewer faults or more steps (--max-steps)"
            )
        if not self.audit_clean:
            phrases.append(f"audit: {self.audit or 'there is no ledger'}")
        if self.leaks:
            phrases.append(f"left behind after the run: {', '.join(self.leaks)}")
        if self.chaos_sha256 is not None and not self.same_model:
            phrases.append("the final model differs from that of the run without faults")
        return tuple(phrases)

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "problems": list(self.problems), "same_model": self.same_model, **asdict(self)}


def kind_reports(planned: Sequence[Kind], injected: Sequence[tuple[Kind, float | None]]) -> tuple[KindReport, ...]:
    """Summarise the faults of each kind.

    Args:
        injected: kind and recovery time of each injected fault; None if the run did not recover.
    """
    rows = []
    for kind in dict.fromkeys(planned):
        times = [seconds for injected_kind, seconds in injected if injected_kind == kind]
        recovered = [seconds for seconds in times if seconds is not None]
        percentiles = percentile(recovered, 50), percentile(recovered, 99)
        rows.append(KindReport(kind, planned.count(kind), len(times), len(recovered), *percentiles))
    return tuple(rows)


def capacity(clean: Timeline, chaos: Timeline, *, nproc: int, processors: float, faults: int) -> Capacity:
    """Compare the training time of the run under faults with that of the run without.

    W workers use ``min(W, processors)`` processors. From the moment of a fault, only the workers of the next
    group count. Time in which the run waited for all workers because the fault injector asked for it is
    excluded.

    Args:
        processors: shared by the workers, in units of one worker's threads.
    """
    end = max((entry.seconds for entry in chaos.entries), default=0.0)
    begins = {i.end: i.begin for i in chaos.interruptions}
    # A group counts from the loss of the previous one.
    worlds = [(begins.get(world.seconds, world.seconds), world.world_size) for world in chaos.worlds]
    available = sum(
        (following[0] - begin) * min(size, processors) for (begin, size), following in pairwise([*worlds, (end, 0)])
    )
    sizes = {world.seconds: world.world_size for world in chaos.worlds}
    available -= sum(
        i.seconds * min(sizes.get(i.end, nproc), processors) for i in chaos.interruptions if i.cause == "gathering"
    )
    needed_s, available_s = clean.goodput.active_s, available / min(nproc, processors)
    goodput = needed_s / available_s if available_s > 0 else None
    return Capacity(needed_s, available_s, faults, goodput, (available_s - needed_s) / faults if faults else None)


# --- Run the task once without and once with faults, and compare ---


_POLL_S = 0.05
_END_S = 30.0
_TAIL_LINES = 20
_CHECKPOINT_EVERY = "25steps"
_RESTARTS = 8  # per worker, since a fault may end all of them


def run_chaos(
    options: Mapping[str, Any], root: Path, *, faults: int, kinds: tuple[Kind, ...], tell: Callable[[str], None]
) -> ChaosReport:
    """Train the task without and then with faults, and compare.

    Args:
        options: of both runs, as for ``paceline train``, without ``recover`` and ``run_dir``.
        root: a new folder for the directories ``clean`` and ``chaos`` of the runs.

    Raises:
        UserError: the options, or these faults with them, cannot work.
        LaunchError: the run without faults failed, or the other one did not start.
    """
    clean, faulty = (RunDirectory(root / name) for name in ("clean", "chaos"))
    config, clean_options, chaos_options = _resolve(options, faults, kinds)
    for directory in (clean, faulty):
        if directory.exists():
            raise RunDirectoryError(f"{directory.path} already holds a run. Choose another --run-dir DIR.")
    nproc = _nproc(config)
    root.mkdir(parents=True, exist_ok=True)
    tell(f"run without faults: {config.processes.task}, {nproc} worker{'s' if nproc != 1 else ''}, in {clean.path}")
    with _training(clean, clean_options) as process:
        code = _wait(process)
    result = clean.read_result() if code == 0 else None
    if result is None:
        raise LaunchError(f"the run without faults failed with exit code {code}.{_tail(clean)}", exit_code=code or 1)
    plan = plan_faults(kinds, faults=faults, seed=config.training.seed, nproc=nproc, steps=result["steps"])
    duration = f"{result['steps']} steps in {result['seconds']:.1f} s"
    tell(f"{duration}; run with {len(plan)} faults, in {faulty.path}")
    with tempfile.TemporaryDirectory(prefix=own_prefix("chaos")) as temporary:
        injected, code = _train_under_faults(faulty, chaos_options, plan, result["steps"], temporary, tell)
        leaks = [*remove_leftovers(temporary), *Path(temporary).glob("pymp-*")]
    return _report(config, clean, faulty, plan, injected, code, leaks)


def _resolve(
    explicit: Mapping[str, Any], faults: int, kinds: tuple[Kind, ...]
) -> tuple[RunConfig, dict[str, Any], dict[str, Any]]:
    """Return the configuration, and the options of the runs without and with faults."""
    if explicit.get("recover", "inplace") != "inplace":
        raise ConfigError(
            f"--recover {explicit['recover']}: a run under faults must use inplace. Leave the option out."
        )
    at_least("faults", faults, 1)
    options = {"on": "spawn", "checkpoint_every": (_CHECKPOINT_EVERY,), **explicit}
    config = config_from_mapping(options, "the command line")
    check_kinds(kinds, _nproc(config))
    if config.processes.nodes != (1, 1):
        raise ConfigError(
            f"--nodes {config.values['nodes']}: faults are injected on one node only. Leave the option out."
        )
    chaos = {"max_restarts": _RESTARTS * _nproc(config), **options, "recover": "inplace"}
    return config, {**options, "recover": "none"}, chaos


def _nproc(config: RunConfig) -> int:
    match config.processes.nproc:
        case (nproc,):
            return nproc
    raise ConfigError("--nproc must be one number for paceline chaos, which plans faults for that many workers.")


def _train_under_faults(
    directory: RunDirectory,
    options: Mapping[str, Any],
    plan: Sequence[Fault],
    steps: int,
    temporary: str,
    tell: Callable[[str], None],
) -> tuple[list[Injection], int]:
    """Train under faults, with a temporary directory; return the injected faults and the exit code."""
    write_faults = WriteFaults(directory.path / "write-faults")
    with _training(directory, options, {**write_faults.environment, "TMPDIR": temporary}) as process:
        while not directory.agent.exists():
            if process.poll() is not None:
                code = process.returncode or 1
                raise LaunchError(f"the run ended before it began.{_tail(directory)}", exit_code=code)
            time.sleep(_POLL_S)
        with AgentConnection(directory) as agent:
            injector = FaultInjector(
                *(directory, agent, plan, steps, write_faults),
                lambda text: tell(f"{len(injector.injected):>3}/{len(plan)}  {text}"),
            )
            injector.run()
        return injector.injected, _wait(process)


def _report(
    config: RunConfig,
    clean: RunDirectory,
    faulty: RunDirectory,
    plan: Sequence[Fault],
    injected: Sequence[Injection],
    code: int,
    leaks: Sequence[Path],
) -> ChaosReport:
    nproc = _nproc(config)
    expected, result = clean.read_result(), faulty.read_result()
    assert expected is not None
    try:
        audited = audit(faulty)
        verdict, is_clean, epochs, repeated = audited.verdict, audited.clean, audited.epochs, audited.recomputed_steps
    except RunDirectoryError as error:
        verdict, is_clean, epochs, repeated = str(error), False, (), 0
    history = timeline(faulty.read_events(), repeated_steps=repeated)
    used = None
    if result is not None:
        share = Environment(world_size=nproc, local_world_size=nproc)
        processors = len(os.sched_getaffinity(0)) / default_threads(share, config.processes.threads, os.environ)
        undisturbed = timeline(clean.read_events())
        used = capacity(undisturbed, history, nproc=nproc, processors=processors, faults=len(injected))
    return ChaosReport(
        task=config.processes.task,
        clean_run=str(clean.path),
        chaos_run=str(faulty.path),
        nproc=nproc,
        seed=config.training.seed,
        exit_code=code,
        steps=expected["steps"],
        kinds=kind_reports([f.kind for f in plan], [(i.fault.kind, i.seconds) for i in injected]),
        repeated_steps=history.goodput.repeated_steps,
        samples_lost=sum(epoch.never for epoch in epochs),
        samples_duplicated=sum(epoch.repeated for epoch in epochs),
        audit_clean=is_clean,
        audit=verdict,
        leaks=tuple(map(str, leaks)),
        capacity=used,
        clean_sha256=expected["model_sha256"],
        chaos_sha256=None if result is None else result["model_sha256"],
    )


@contextmanager
def _training(
    directory: RunDirectory, options: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a training job that ends with the context and prints into a file."""
    document = {name: list(v) if isinstance(v, tuple) else v for name, v in options.items()}
    request = directory.path.with_suffix(".toml")
    request.write_text(tomli_w.dumps(document), encoding="utf-8")
    command = [sys.executable, "-m", "paceline", "train", "--config", str(request), "--run-dir", str(directory.path)]
    with _output(directory).open("wb") as output:
        process = subprocess.Popen(
            [*command, "--quiet"],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,  # Ctrl-C in the terminal must reach only this process, which ends the job
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                # Its workers end with it.
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes]) -> int:
    code = process.wait()
    return 128 - code if code < 0 else code


def _output(directory: RunDirectory) -> Path:
    return directory.path.with_suffix(".out")


def _tail(directory: RunDirectory) -> str:
    """Return the end of a job's output."""
    output = _output(directory)
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
    text = "".join(f"\n  {line}" for line in lines)
    return f" Its output is in {shlex.quote(str(output))} and ends with:{text}" if lines else ""
