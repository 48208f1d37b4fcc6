"""A job on a Slurm cluster."""

from __future__ import annotations

import dataclasses
import getpass
import glob
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from paceline.core.environment import allocation_nodes, allocation_tasks, expand_hosts
from paceline.core.errors import ConfigError, LaunchError
from paceline.launch.job_logs import follow_files
from paceline.launch.launcher import (
    ENDED,
    Command,
    JobHandle,
    JobStatus,
    LaunchSpec,
    RankLauncher,
    RenderedJob,
    SlurmOptions,
    State,
    refuse_unsupported,
)
from paceline.launch.local import EXIT_CODE, BackgroundJob, ForegroundJob
from paceline.launch.slurm_script import (
    ARRAY_INDEX,
    BODIES,
    SCRIPT,
    allocation_script,
    batch_files,
    has_array_index,
    log_pattern,
    needs_login_shell,
)
from paceline.launch.status_poller import PolledJob
from paceline.launch.submit import ClusterLauncher
from paceline.launch.supervisor import RankStarter, SupervisedJob

# --- Slurm's own commands, and what their refusals mean for our options ---


_LIMIT_S = 60

# Messages of sbatch, and the options of ours that may be the reason.
_CAUSES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("invalid partition", ("partition",)),
    ("invalid account", ("account", "partition")),
    ("invalid qos", ("qos",)),
    ("invalid feature", ("constraint",)),
    ("invalid node name", ("exclude", "slurm")),
    ("invalid generic resource|gres", ("gpus_per_node",)),
    ("memory", ("mem",)),
    ("time limit|time specification", ("walltime",)),
    ("job array", ("array",)),
    ("dependency|unrecognized option|invalid .* specification", ("slurm",)),
    ("node count", ("nodes",)),
    (
        "node configuration|more processors|cpu count|too many",
        ("nodes", "nproc", "cpus_per_task", "gpus_per_node", "mem", "constraint", "exclude", "partition"),
    ),
    ("violates accounting|limit", ("walltime", "nodes", "account", "qos", "partition")),
)


def run_slurm(*argv: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands to its end, whatever its exit code; ``env`` is added to our variables."""
    try:
        done = subprocess.run(
            argv,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except FileNotFoundError:
        raise LaunchError(
            f"there is no {argv[0]} here: give the command on a login node of the cluster. "
            "(--dry-run shows the job anywhere.)"
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{argv[0]} has not answered within {_LIMIT_S} s. Is Slurm up? Try: sinfo") from None
    if done.returncode != 0 and re.search(
        "unable to contact|connection refused|could not load|timed out|zero bytes", done.stderr, re.I
    ):
        raise LaunchError(f"the cluster is not reachable: {_words(done.stderr)} Try: sinfo")
    return done


def refusal(stderr: str, spec: LaunchSpec, options: Any) -> LaunchError:
    """Return sbatch's message, with our options that may be the reason.

    Args:
        options: the launcher's, with names as ``--on slurm`` has them; some may be missing.
    """
    given = _given(spec, options)
    suspects = next((names for pattern, names in _CAUSES if re.search(pattern, stderr, re.I)), ())
    causes = [given[name] for name in suspects if name in given]
    advice = f" Check {', '.join(causes)}." if causes else ""
    return LaunchError(f"sbatch refused the job: {_words(stderr)}{advice}")


def _words(stderr: str) -> str:
    """Return a command's message, as one sentence."""
    lines = [re.sub(r"^\w+: (error: |fatal: )?", "", line.strip()) for line in stderr.splitlines()]
    text = "; ".join(line.rstrip(".") for line in lines if line and not line.startswith("Try "))
    return f"{text or 'it said nothing'}."


def _given(spec: LaunchSpec, options: Any) -> dict[str, str]:
    """Our options as they were given, by name."""
    least, most = spec.nodes
    words = {
        "nodes": str(least) if least == most else f"{least}:{most}",
        "nproc": ",".join(map(str, spec.nproc)),
        "cpus_per_task": spec.cpus_per_task,
        "gpus_per_node": spec.gres.removeprefix("gpu:") if spec.gpus_per_node else None,
        "walltime": None if spec.walltime_s is None else f"{spec.walltime_s:g}s",
        **{
            name: getattr(options, name, None)
            for name in ("partition", "account", "qos", "constraint", "exclude", "mem", "array")
        },
        "slurm": " --slurm ".join(options.slurm) or None,
    }
    return {name: f"--{name.replace('_', '-')} {value}" for name, value in words.items() if value is not None}


# --- A job in Slurm's hands ---


# Else Slurm cuts the numbers of an array short.
_WHOLE_LISTS = {"SLURM_BITSTR_LEN": "0"}

_STATES: dict[str, State] = {
    **dict.fromkeys(("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED"), "pending"),
    **dict.fromkeys(("SPECIAL_EXIT", "RESV_DEL_HOLD"), "pending"),
    **dict.fromkeys(("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING"), "running"),
    **dict.fromkeys(("RESIZING", "STAGE_OUT"), "running"),
    "COMPLETED": "succeeded",
    **dict.fromkeys(("CANCELLED", "PREEMPTED", "REVOKED"), "cancelled"),
    **dict.fromkeys(("FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"), "failed"),
}


class SlurmJob(PolledJob):
    """A job, or an array of them, that sbatch has taken."""

    def __init__(self, reference: Mapping[str, Any]) -> None:
        super().__init__(reference)
        self._id: str = reference["id"]

    def status(self) -> JobStatus:
        """Return the controller's status; for jobs that it has forgotten, that of accounting or the job's own files."""
        numbers = _array_indices(self._reference.get("array"))
        known = self._of_controller()
        # While one is active the others do not matter, so the database is not queried each time.
        if all(task.ended for task in known.values()) and not known.keys() >= set(numbers):
            known = {**self._of_accounting(), **known}
        known = {**self._of_files(number for number in numbers if number not in known), **known}
        if not known:
            return JobStatus(state="unknown", detail=f"Slurm does not know job {self._id} any more")
        lost = JobStatus(state="unknown", detail="forgotten by Slurm")
        return _together([known.get(number, lost) for number in numbers])

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        yield from follow_files(self._log_files, ended=self.poller().ended if follow else None)

    def cancel(self) -> None:
        """Have Slurm end it: SIGTERM, upon which a Paceline task saves, then SIGKILL."""
        done = run_slurm("scancel", self._id)
        if done.returncode != 0:
            raise LaunchError(f"scancel did not end job {self._id}: {done.stderr.strip()}")

    @property
    def log_location(self) -> str:
        return ", ".join(self._reference["logs"])

    def _of_controller(self) -> dict[int | None, JobStatus]:
        """Return the controller's status by number in the array; it forgets an ended job after some minutes."""
        done = run_slurm("scontrol", "--oneliner", "show", "job", self._id, env=_WHOLE_LISTS)
        lines = done.stdout.splitlines() if done.returncode == 0 else []
        return self._by_number(
            (line.partition(" JobName=")[0], _from_scontrol(line)) for line in lines if "JobState=" in line
        )

    def _of_accounting(self) -> dict[int | None, JobStatus]:
        """Return the status from the accounting database, which not every cluster has."""
        options = ("--allocations", "--noheader", "--parsable2", "--format=JobID,State,ExitCode")
        done = run_slurm("sacct", *options, f"--jobs={self._id}", env=_WHOLE_LISTS)
        lines = done.stdout.splitlines() if done.returncode == 0 else []
        return self._by_number((line.partition("|")[0], _from_sacct(line)) for line in lines if "|" in line)

    def _of_files(self, numbers: Iterable[int | None]) -> dict[int | None, JobStatus]:
        """Return the status from the files of jobs that have ended by themselves."""
        found: dict[int | None, JobStatus] = {}
        for number in numbers:
            name = EXIT_CODE if number is None else f"{EXIT_CODE}-{self._id}_{number}"
            with suppress(OSError, ValueError):
                code = int((Path(self._reference["directory"]) / name).read_text())
                found[number] = JobStatus(
                    state="failed" if code else "succeeded", detail=f"exit code {code}", exit_code=code
                )
        return found

    def _by_number(self, found: Iterable[tuple[str, JobStatus]]) -> dict[int | None, JobStatus]:
        """Parse words such as ``ArrayTaskId=1`` or ``4711_[2-5%2]`` into the numbers in the array."""
        array = self._reference.get("array")
        known: dict[int | None, JobStatus] = {}
        for words, status in found:
            named = re.search(r"(?:ArrayTaskId=|_)\[?(\d(?:[\d,:-]*\d)?)", words)
            numbers = _array_indices(named[1] if named is not None and array is not None else None)
            known.update(dict.fromkeys(numbers, status))
        return known

    def _log_files(self) -> list[Path]:
        numbers = _array_indices(self._reference.get("array"))
        files: list[Path] = []
        for pattern in self._reference["logs"]:
            for number in numbers:
                files += _expanded(pattern, self._id, self._reference["name"], number)
        return list(dict.fromkeys(files))


def _from_scontrol(line: str) -> JobStatus:
    values = dict(re.findall(r"(\w+)=(\S+)", line.partition(" Command=")[0]))
    state, reason = values["JobState"], values.get("Reason", "None")
    return _status(
        state,
        f"{state} ({reason})" if reason != "None" else state,
        values.get("ExitCode", "0:0"),
        int(values.get("Restarts", "0")),
    )


def _from_sacct(line: str) -> JobStatus:
    words, code = line.split("|")[1:3]
    return _status(words.split()[0], words, code, 0)


def _status(slurm_state: str, detail: str, exit_code: str, restarts: int) -> JobStatus:
    state = _STATES.get(slurm_state, "unknown")
    code, _, number = exit_code.partition(":")
    known = 128 + int(number) if number not in ("", "0") else int(code)
    return JobStatus(
        state=state,
        detail=detail,
        # A job that was lost or timed out has no code of its own.
        exit_code=(known or (0 if state == "succeeded" else 1)) if state in ENDED else None,
        restarts=restarts,
    )


def _together(tasks: Sequence[JobStatus]) -> JobStatus:
    """Return the status of an array: running while one task runs, failed if one has, succeeded if all have."""
    if len(tasks) == 1:
        return tasks[0]
    order: tuple[State, ...] = ("running", "pending", "failed", "unknown", "cancelled", "succeeded")
    worst = min(tasks, key=lambda task: order.index(task.state))
    counts = Counter(task.detail for task in tasks)
    return JobStatus(
        state=worst.state,
        detail=", ".join(f"{number} {detail}" for detail, number in counts.items()),
        exit_code=worst.exit_code,
        restarts=sum(task.restarts for task in tasks),
    )


def _array_indices(array: str | None) -> list[int | None]:
    """0, 1, 2, 5 of ``0-2,5%2``."""
    if array is None:
        return [None]
    indices: list[int | None] = []
    for part in array.partition("%")[0].split(","):
        first, last, step = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part).groups()  # type: ignore[union-attr]
        indices += range(int(first), int(last or first) + 1, int(step or 1))
    return indices


def _expanded(pattern: str, job: str, name: str, index: int | None) -> list[Path]:
    """Return the file that Slurm writes for a pattern; the existing ones if only Slurm knows a part of it."""
    known = {"%": "%", "x": name, "A": job}
    with suppress(KeyError, OSError):  # a container's user may have no name
        known["u"] = getpass.getuser()
    known |= {"j": job} if index is None else {"a": str(index)}

    def value(field: str) -> str | None:
        # Slurm pads numbers only, and to ten digits at most.
        width = min(10, int(field[1:-1] or 0)) if field[-1] in "Aaj" else 0
        found = known.get(field[-1])
        return None if found is None else found.zfill(width)

    parts = re.split(r"(%\d*.)", pattern)
    texts = [value(part) if number % 2 else part for number, part in enumerate(parts)]
    if None not in texts:
        return [Path("".join(text for text in texts if text is not None))]
    return sorted(Path(found) for found in glob.glob("".join("*" if t is None else glob.escape(t) for t in texts)))


# --- ``--on slurm``: a batch script for sbatch; inside of an allocation, the same steps at once ---


class Slurm(ClusterLauncher):
    """Slurm. Where this runs in an allocation (``salloc``), a job ends with its command."""

    name = "slurm"
    rank_launchers: ClassVar[tuple[RankLauncher, ...]] = tuple(BODIES)
    env_styles = ("torch", "tensorflow", "none", "mpi", "horovod")

    def __init__(self) -> None:
        self.allocated = allocation_nodes()
        self.attached = self.allocated is not None

    def render(self, spec: LaunchSpec, options: SlurmOptions | None = None) -> RenderedJob:
        """Write the script, and the command that submits it; in an allocation, that runs it."""
        options = options or SlurmOptions()
        _check(spec, options, is_allocated=self.allocated is not None)
        if options.container is not None or options.conda is not None or options.venv is not None:
            spec = _with_its_python(spec)
        script = spec.directory / SCRIPT
        if self.allocated is None:
            files = batch_files(spec, options)
            command = Command(title="submit it", argv=("sbatch", "--parsable", str(script)), env=spec.env)
        else:
            least, most = spec.nodes
            if least > self.allocated:
                raise ConfigError(
                    f"--nodes {least}, but this allocation of Slurm's has {self.allocated}. Ask "
                    "salloc for more; or, for a job of its own, begin with: env -u SLURM_JOB_ID paceline"
                )
            if not spec.outlives_nodes:
                spec = dataclasses.replace(spec, nodes=(least, min(most, self.allocated)))
            files = {SCRIPT: allocation_script(spec, options)}
            bash = ("bash", "-l") if needs_login_shell(options) else ("bash",)
            command = Command(title="in this allocation", argv=(*bash, str(script)), env=spec.env)
        return RenderedJob(spec=spec, options=options, files=files, commands=(command,))

    def resolve_sizes(
        self, nodes: tuple[int, int], nproc: tuple[int, ...] | None, options: Any
    ) -> tuple[tuple[int, int], tuple[int, ...] | None]:
        """Return, for ``--nproc auto`` in an allocation, its own tasks, such as those of ``salloc --nodes 2 -n 4``.

        Without tasks they are its GPUs, of which its nodes may have different numbers. ``--nodes 1``, the default, then
        means all its nodes.
        """
        least, most = nodes
        is_open = nproc is None and least == most
        tasks = (allocation_tasks() or self._allocated_gpus()) if is_open else None
        if tasks is None or most > len(tasks):
            return nodes, nproc
        if most > 1:
            tasks = tasks[:most]
        return (len(tasks), len(tasks)), tasks if len(set(tasks)) > 1 else tasks[:1]

    def _allocated_gpus(self) -> tuple[int, ...] | None:
        """Return the allocation's GPUs on each node; None without GPUs on every node, or without Slurm's commands."""
        if self.allocated is None or shutil.which("scontrol") is None:
            return None
        shown = run_slurm("scontrol", "--details", "--oneliner", "show", "job", os.environ["SLURM_JOB_ID"]).stdout
        counts: dict[str, int] = {}
        for hosts, gres in re.findall(r"\sNodes=(\S+) CPU_IDs=\S+ Mem=\S+ GRES=(\S*)", shown):
            gpus = sum(map(int, re.findall(r"\bgpu:(?:[^:,(]+:)?(\d+)", gres)))
            counts |= dict.fromkeys(expand_hosts(hosts), gpus)
        return tuple(counts.values()) if counts and all(counts.values()) else None

    def submit(self, rendered: RenderedJob) -> JobHandle:
        """Have sbatch take the script; in an allocation, start it."""
        spec, options = rendered.spec, rendered.options
        if self.allocated is not None:
            starter = RankStarter(name=SCRIPT, says_why=True)  # srun and what it starts have
            return ForegroundJob(SupervisedJob(rendered.commands, starter=starter), spec.directory)
        logs = tuple(
            str(spec.workdir / pattern)
            for pattern in (log_pattern(spec, options), options.error)
            if pattern is not None
        )
        for pattern in logs:
            _check_writable(Path(pattern).parent)
        [command] = rendered.commands
        done = run_slurm(*command.argv, env=command.env)
        if done.returncode != 0:
            raise refusal(done.stderr, spec, options)
        return SlurmJob(
            {
                "id": done.stdout.strip().partition(";")[0],
                "name": spec.name,
                "directory": str(spec.directory),
                "logs": logs,
                "array": options.array,
            }
        )

    def reopen(self, reference: Mapping[str, Any]) -> JobHandle:
        """Find a job by its number, or the process that has started one in an allocation."""
        return BackgroundJob(reference) if "pid" in reference else SlurmJob(reference)


def _check(spec: LaunchSpec, options: SlurmOptions, *, is_allocated: bool) -> None:
    """Refuse before the queue what would fail after it."""
    refuse_unsupported(spec, "slurm")
    if spec.starts_each_rank and len(spec.nproc) > 1 and not (is_allocated and spec.rank_launcher == "srun"):
        raise ConfigError(
            f"--nproc {','.join(map(str, spec.nproc))}: under --rank-launcher {spec.rank_launcher} every node starts "
            "as many tasks. Give one number, or use --rank-launcher torchrun."
        )
    if spec.rank_launcher == "ray" and options.signal_before is not None:
        raise ConfigError(
            "--signal-before: Slurm sends its warning to all of a job's processes, and Ray's own would end "
            "of it. Leave it out with --rank-launcher ray."
        )
    if options.container is not None and spec.rank_launcher in ("mpi", "horovod"):
        raise ConfigError(
            f"--container: --rank-launcher {spec.rank_launcher} starts its ranks outside. Use --rank-launcher srun, "
            "torchrun or agent."
        )
    words = (*spec.command, str(spec.run or ""))
    indexed = any(map(has_array_index, words))
    if indexed and options.array is None:
        raise ConfigError(f"{ARRAY_INDEX} needs --array, which says which numbers it stands for.")
    if options.array is not None:
        if not re.fullmatch(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?", options.array):
            raise ConfigError(f"--array must be such as 0-9, 1,3,7 or 0-99%4, but is {options.array!r}.")
        if spec.is_task and ARRAY_INDEX not in str(spec.run):
            raise ConfigError(
                f"--array: the jobs of an array need a run each. Give --run-dir such as runs/sweep-{ARRAY_INDEX}."
            )


def _check_writable(folder: Path) -> None:
    if "%" not in str(folder) and not (folder.is_dir() and os.access(folder, os.W_OK)):
        problem = "cannot be written" if folder.is_dir() else "does not exist"
        raise ConfigError(
            f"--output: the folder {folder} {problem}, and Slurm would end the job without an error message."
        )


def _with_its_python(spec: LaunchSpec) -> LaunchSpec:
    """Return the interpreter: that of the activated environment or the container, unless --python names another."""
    if spec.python != sys.executable:
        return spec

    def changed(command: tuple[str, ...]) -> tuple[str, ...]:
        return ("python", *command[1:]) if command[:1] == (spec.python,) else command

    return dataclasses.replace(spec, python="python", command=changed(spec.command), preflight=changed(spec.preflight))
