"""A run under faults, and the proof that nothing was lost."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
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
from paceline.core.files import WriteFaults
from paceline.core.options import parse_nodes, parse_nproc
from paceline.core.stats import percentile
from paceline.data.audit import AuditReport, audit
from paceline.elastic.control import AgentConnection
from paceline.insight.fault_injection import Fault, FaultInjector, Injection, Kind, check_kinds, plan_faults
from paceline.runs.directory import RunDirectory
from paceline.runs.timeline import Timeline, timeline

# --- What a run under faults came to, held against the undisturbed run ---


@dataclass(frozen=True)
class KindReport:
    """The faults of one kind.

    Attributes:
        planned, injected, recovered: how many; one that finds no place before the run's end is not injected.
        p50_s, p99_s: of the time from the fault to the recovery.
    """

    kind: Kind
    planned: int
    injected: int
    recovered: int
    p50_s: float | None
    p99_s: float | None


@dataclass(frozen=True)
class Capacity:
    """What the run under faults made of the workers that it had.

    Attributes:
        needed_s: the undisturbed run's training time.
        available_s: the disturbed run's, each second weighed by the share of the undisturbed run's processors
            that the workers which survived could keep busy.
        faults: how many there were.
    """

    needed_s: float
    available_s: float
    faults: int

    @property
    def goodput(self) -> float | None:
        """``needed_s`` over ``available_s``; near 1 where faults cost no more than the workers they took."""
        return self.needed_s / self.available_s if self.available_s > 0 else None

    @property
    def lost_s_per_fault(self) -> float | None:
        """Time lost beyond the lost capacity."""
        return (self.available_s - self.needed_s) / self.faults if self.faults else None


@dataclass(frozen=True, kw_only=True)
class ChaosReport:
    """The outcome; :attr:`problems` is empty where nothing was lost.

    Attributes:
        clean_run, chaos_run: their directories.
        seed: of the faults and of the run.
        exit_code: of the disturbed run.
        steps: of the undisturbed run.
        repeated_steps: computed again, because all that held them were lost.
        samples_lost, samples_duplicated: by the ledger's audit.
        audit: its verdict; "" where there was none.
        clean_sha256, chaos_sha256: of the final models; None where the run did not finish.
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
    capacity: Capacity | None
    clean_sha256: str
    chaos_sha256: str | None

    @property
    def same_model(self) -> bool:
        """Whether the final models are equal, bit for bit."""
        return self.chaos_sha256 == self.clean_sha256

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong, a phrase each."""
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
                f"{planned - injected} of {planned} faults found no place before the end: "
                "ask for fewer, or for more steps (--max-steps)"
            )
        if not self.audit_clean:
            phrases.append(f"the audit: {self.audit or 'there is no ledger'}")
        if self.chaos_sha256 is not None and not self.same_model:
            phrases.append("the final model is not the undisturbed run's")
        return tuple(phrases)

    @property
    def ok(self) -> bool:
        """Whether every fault came and was recovered from, the audit is clean and the models are equal."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """The report as JSON types."""
        document = asdict(self)
        if self.capacity is not None:
            document["capacity"] |= {
                "goodput": self.capacity.goodput,
                "lost_s_per_fault": self.capacity.lost_s_per_fault,
            }
        return {"ok": self.ok, "problems": list(self.problems), "same_model": self.same_model, **document}


def kind_reports(planned: Sequence[Kind], injected: Sequence[tuple[Kind, float | None]]) -> tuple[KindReport, ...]:
    """One row a kind.

    Args:
        planned: the kind of each planned fault.
        injected: the kind of each that came, and how long it took to recover; None where it did not.
    """
    rows = []
    for kind in dict.fromkeys(planned):
        times = [seconds for injected_kind, seconds in injected if injected_kind == kind]
        recovered = [seconds for seconds in times if seconds is not None]
        rows.append(
            KindReport(
                kind=kind,
                planned=planned.count(kind),
                injected=len(times),
                recovered=len(recovered),
                p50_s=percentile(recovered, 50),
                p99_s=percentile(recovered, 99),
            )
        )
    return tuple(rows)


def capacity(clean: Timeline, chaos: Timeline, *, nproc: int, processors: float, faults: int) -> Capacity:
    """Hold the disturbed run's time against the undisturbed one's.

    W workers keep ``min(W, processors)`` processors busy. From the moment a fault hits, only those count
    that the next view is made of. Time in which the run waited for all its workers, because the conductor
    asked for it, is nobody's.

    Args:
        clean: the undisturbed run's history.
        chaos: the disturbed one's.
        nproc: workers of the undisturbed run.
        processors: that the workers share, in units of one worker's threads.
        faults: how many were injected.
    """
    end = max((entry.seconds for entry in chaos.entries), default=0.0)
    begins = {i.end: i.begin for i in chaos.interruptions}
    # A view counts from when the one before was lost.
    worlds = [(begins.get(world.seconds, world.seconds), world.world_size) for world in chaos.worlds]
    available = sum(
        (following[0] - begin) * min(size, processors) for (begin, size), following in pairwise([*worlds, (end, 0)])
    )
    sizes = {world.seconds: world.world_size for world in chaos.worlds}
    available -= sum(
        i.seconds * min(sizes.get(i.end, nproc), processors) for i in chaos.interruptions if i.cause == "gathering"
    )
    return Capacity(clean.goodput.active_s, available / min(nproc, processors), faults)


def lost_and_duplicated(report: AuditReport) -> tuple[int, int]:
    """Samples that no step saw, and those that more than one did."""
    return sum(epoch.never for epoch in report.epochs), sum(epoch.repeated for epoch in report.epochs)


# --- Runs a task once undisturbed and once under faults, and compares ---


_LOOK_S = 0.05
_END_S = 30.0
_TAIL_LINES = 20
_CHECKPOINT_EVERY = "25steps"
_RESTARTS = 8  # for each worker, as a fault may end all of them


@dataclass(frozen=True, kw_only=True)
class ChaosRequest:
    """What to do.

    Attributes:
        options: of both runs, as ``paceline train`` takes them; ``recover`` and ``run_dir`` are not for the user.
        root: a new folder for both runs' directories, ``clean`` and ``chaos``.
        faults: how many.
        kinds: which.
    """

    options: Mapping[str, Any]
    root: Path
    faults: int
    kinds: tuple[Kind, ...]


def run_chaos(request: ChaosRequest, tell: Callable[[str], None]) -> ChaosReport:
    """Train the task undisturbed, then under faults; compare.

    Args:
        request: what to do.
        tell: called with a line of progress from time to time.

    Raises:
        UserError: the options, or these faults with them, cannot work.
        LaunchError: the undisturbed run failed, or the other one did not begin.
    """
    config, clean_options, chaos_options = _resolve(request)
    nproc = _nproc(config)
    request.root.mkdir(parents=True, exist_ok=True)
    clean, disturbed = (RunDirectory(request.root / name) for name in ("clean", "chaos"))
    tell(f"the undisturbed run: {config.task}, {_workers(nproc)}, in {clean.path}")
    with _training(clean, clean_options) as process:
        code = _wait(process)
    result = clean.read_result() if code == 0 else None
    if result is None:
        raise LaunchError(f"the undisturbed run failed with exit code {code}.{_tail(clean)}", exit_code=code or 1)
    plan = plan_faults(request.kinds, faults=request.faults, seed=config.seed, nproc=nproc, steps=result["steps"])
    took = f"{result['steps']} steps in {result['seconds']:.1f} s"
    tell(f"{took}; now with {len(plan)} faults, in {disturbed.path}")
    injected, code = _disturb(disturbed, chaos_options, plan, result["steps"], tell)
    return _report(config, clean, disturbed, plan, injected, code)


def _resolve(request: ChaosRequest) -> tuple[RunConfig, dict[str, Any], dict[str, Any]]:
    """The run's configuration, and the options of the undisturbed and of the disturbed run."""
    given = dict(request.options)
    if given.get("recover", "inplace") != "inplace":
        raise ConfigError(f"--recover {given['recover']}: a run under faults recovers in place. Leave the option out.")
    if request.faults < 1:
        raise ConfigError(f"--faults must be at least 1, but is {request.faults}.")
    defaults: dict[str, Any] = {"on": "spawn", "checkpoint_every": (_CHECKPOINT_EVERY,)}
    config = config_from_mapping(defaults | given, "the command line")
    check_kinds(request.kinds, _nproc(config))
    if parse_nodes(config.nodes) != (1, 1):
        raise ConfigError(f"--nodes {config.nodes}: faults are injected on one machine. Leave the option out.")
    for name in ("clean", "chaos"):
        if RunDirectory(request.root / name).exists():
            raise RunDirectoryError(f"{request.root / name} holds a run already. Choose another --run-dir DIR.")
    clean = defaults | given | {"recover": "none"}
    chaos = {"max_restarts": _RESTARTS * _nproc(config), **defaults, **given, "recover": "inplace"}
    return config, clean, chaos


def _nproc(config: RunConfig) -> int:
    match parse_nproc(config.nproc):
        case (nproc,):
            return nproc
    raise ConfigError("--nproc must be a number here: faults are planned for so many workers.")


def _disturb(
    directory: RunDirectory,
    options: Mapping[str, Any],
    plan: Sequence[Fault],
    steps: int,
    tell: Callable[[str], None],
) -> tuple[list[Injection], int]:
    """Train under faults; return those that came, and the exit code."""
    write_faults = WriteFaults(directory.path / "write-faults")
    with _training(directory, options, write_faults.environment) as process:
        agent = _connect(directory, process)
        with agent:
            conductor = FaultInjector(
                directory,
                agent,
                plan,
                steps,
                write_faults,
                lambda text: tell(f"{len(conductor.injected):>3}/{len(plan)}  {text}"),
            )
            conductor.run()
        return conductor.injected, _wait(process)


def _connect(directory: RunDirectory, process: subprocess.Popen[bytes]) -> AgentConnection:
    """Wait for the job's agent."""
    while not directory.agent.exists():
        if process.poll() is not None:
            raise LaunchError(f"the run ended before it began.{_tail(directory)}", exit_code=process.returncode or 1)
        time.sleep(_LOOK_S)
    return AgentConnection(directory)


def _report(
    config: RunConfig,
    clean: RunDirectory,
    disturbed: RunDirectory,
    plan: Sequence[Fault],
    injected: Sequence[Injection],
    code: int,
) -> ChaosReport:
    nproc = _nproc(config)
    expected, result = clean.read_result(), disturbed.read_result()
    assert expected is not None
    audited, verdict = None, ""
    try:
        audited = audit(disturbed)
        verdict = audited.verdict
    except RunDirectoryError as error:
        verdict = str(error)
    lost, duplicated = (0, 0) if audited is None else lost_and_duplicated(audited)
    repeated = 0 if audited is None else audited.recomputed_steps
    history = timeline(disturbed.read_events(), repeated_steps=repeated)
    share = Environment(world_size=nproc, local_world_size=nproc)
    threads = default_threads(share, config.threads, os.environ)
    return ChaosReport(
        task=config.task,
        clean_run=str(clean.path),
        chaos_run=str(disturbed.path),
        nproc=nproc,
        seed=config.seed,
        exit_code=code,
        steps=expected["steps"],
        kinds=kind_reports([f.kind for f in plan], [(i.fault.kind, i.seconds) for i in injected]),
        repeated_steps=history.goodput.repeated_steps,
        samples_lost=lost,
        samples_duplicated=duplicated,
        audit_clean=audited is not None and audited.clean,
        audit=verdict,
        capacity=None
        if result is None
        else capacity(
            timeline(clean.read_events()),
            history,
            nproc=nproc,
            processors=len(os.sched_getaffinity(0)) / threads,
            faults=len(injected),
        ),
        clean_sha256=expected["model_sha256"],
        chaos_sha256=None if result is None else result["model_sha256"],
    )


@contextmanager
def _training(
    directory: RunDirectory, options: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A training job of its own, which ends with the block; what it prints goes into a file."""
    document = {name: list(v) if isinstance(v, tuple) else v for name, v in options.items()}
    request = directory.path.with_suffix(".toml")
    request.write_text(tomli_w.dumps(document), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "paceline",
        "train",
        "--config",
        str(request),
        "--run-dir",
        str(directory.path),
    ]
    with _output(directory).open("wb") as output:
        process = subprocess.Popen(
            [*command, "--quiet"],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,  # a Ctrl-C in the terminal is for us; we end the job
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
    """The end of what a job printed."""
    output = _output(directory)
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
    told = "".join(f"\n  {line}" for line in lines)
    return f" What it printed is in {shlex.quote(str(output))}; its end:{told}" if lines else ""


def _workers(number: int) -> str:
    return f"{number} worker{'s' if number != 1 else ''}"
