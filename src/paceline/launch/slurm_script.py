"""The batch script of a Slurm job."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.built_in import SLURM_BODIES
from paceline.core.environment import HOSTS, JOB_ID, NODE_RANK, NODES
from paceline.core.errors import ConfigError
from paceline.core.options import flag, parse_duration_s
from paceline.core.plugins import import_object
from paceline.launch.launcher import LaunchSpec, RankLauncher, fixed_nodes
from paceline.launch.local import EXIT_CODE
from paceline.launch.mpi import command_of_a_rank, mpirun_in_allocation
from paceline.launch.node import node_command
from paceline.launch.rank import rank_command
from paceline.launch.stop_codes import STOP_CODES, stop_codes_command

if TYPE_CHECKING:
    from paceline.launch.launcher import SlurmOptions


# --- Replacements of ``ssh`` and ``srun`` for mpirun and horovodrun, in a directory ``$starters`` for their PATH ---


_STARTERS = r"""
starters="$(mktemp -d)"
trap 'rm -r "$starters"' EXIT
"""

_SRUN = r"""
# mpirun starts its daemons by srun. By Slurm's signals they would end, and kill ranks that save.
cat >"$starters/srun" <<END
#!/bin/bash
words=()
for word in "\$@"; do
  case "\${word##*/}" in
    prted | orted | hydra_pmi_proxy | hydra_bstrap_proxy) words+=({shield}) ;;
  esac
  words+=("\$word")
done
exec "$(command -v srun)" "\${words[@]}"
END
chmod +x "$starters/srun"
"""

_LISTENERS = r"""
# A step on all nodes passes Slurm's signals to the ranks, until the end of its input.
exec {ears}> >(exec srun --overlap --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 {name}--gres=none \
  {listen})
listeners=$!
"""


def shielded(spec: LaunchSpec, shim: str, batch: bool) -> Iterator[str]:
    """Yield shell code that has the ranks, and not the program that starts them, hear Slurm's signals."""
    yield from _stop_codes_directory(spec)
    yield (_STARTERS.strip() + shim.rstrip()).replace("{shield}", _shell_words(spec, "--shield"))
    name = "" if batch else '--job-name="paceline-$$" '
    listeners = _LISTENERS.strip().replace("{nodes}", str(spec.nodes[1])).replace("{name}", name)
    yield listeners.replace("{listen}", _shell_words(spec, "--listen"))


def _shell_words(spec: LaunchSpec, mode: str) -> str:
    return " ".join(quoted(stop_codes_command(spec.python, (), mode)))


def command_of_shielded_rank(spec: LaunchSpec) -> tuple[str, ...]:
    """Return the command that mpirun or horovodrun starts for each rank; it writes the rank's exit code to a file."""
    command = command_of_a_rank(spec)
    return stop_codes_command(spec.python, command) if command == spec.command else command


# --- The ``#SBATCH`` directives of a job ---


_REPLACEMENTS = {
    "job-name": "--name",
    "chdir": "the current directory",
    "nodes": "--nodes",
    "ntasks": "--nodes and --nproc",
    "ntasks-per-node": "--nproc",
    "cpus-per-task": "--cpus-per-task",
    "time": "--walltime",
    "signal": "--signal-before",
    "open-mode": "no option: logs are always appended",
    "export": "--env, in addition to the present variables",
    **{
        name: f"--{name}"
        for name in (
            *("partition", "account", "qos", "constraint", "exclude", "exclusive", "mem", "comment"),
            *("output", "error", "requeue", "no-requeue", "array"),
        )
    },
}


def requeues(spec: LaunchSpec, options: SlurmOptions) -> bool:
    """Return whether the job is requeued automatically."""
    return options.requeue or (spec.is_task and not options.no_requeue)


def log_pattern(spec: LaunchSpec, options: SlurmOptions) -> str:
    """Return the pattern of the log file, with sbatch's %."""
    if options.output is not None:
        return str(spec.workdir / options.output)
    name = "slurm-%A_%a.log" if options.array else "slurm-%j.log"
    return f"{str(spec.directory).replace('%', '%%')}/{name}"


def directives(spec: LaunchSpec, options: SlurmOptions) -> Iterator[tuple[str, str | None]]:
    """Yield the directives' names and values; None if a directive has no value.

    Raises:
        ConfigError: an option has a wrong form, or conflicts with another.
    """
    least, most = spec.nodes
    yield "job-name", spec.name
    yield "chdir", str(spec.workdir)
    yield "output", log_pattern(spec, options)
    if options.error is not None:
        yield "error", str(spec.workdir / options.error)
    yield "open-mode", "append"
    yield "export", "ALL"
    yield "nodes", str(least) if least == most else f"{least}-{most}"
    cpus = cpus_per_task(spec)
    # For Slurm a task is one process each, also if a single task starts them: it gives CPUs by task.
    is_by_task = spec.starts_each_rank or (cpus is None and not options.exclusive)
    tasks = max(spec.nproc) if is_by_task else 1
    # Asked for 1 to N nodes and one task on each, Slurm takes that for one task in all, and gives one node.
    if tasks > 1 or least > 1 or least == most:
        yield "ntasks-per-node", str(tasks)
    if cpus is not None:
        yield "cpus-per-task", str(cpus)
    if spec.gpus_per_node:
        yield "gres", spec.gres
    if spec.walltime_s is not None:
        yield "time", slurm_time(spec.walltime_s)
    for name in ("partition", "account", "qos", "constraint", "exclude", "mem", "comment", "array"):
        if (value := getattr(options, name)) is not None:
            yield name, value
    if options.exclusive:
        yield "exclusive", None
    if (before_s := _signal_before_s(spec, options)) is not None:
        yield "signal", f"USR1@{before_s}"
    if spec.outlives_nodes:
        yield "no-kill", None
    if requeues(spec, options):
        yield "requeue", None
    elif options.no_requeue:
        yield "no-requeue", None
    for text in options.slurm:
        name, equals, value = text.removeprefix("--").partition("=")
        if not re.fullmatch(r"[a-z][a-z-]*", name):
            raise ConfigError(f"--slurm must be KEY=VALUE with a long option of sbatch's, but is {text!r}.")
        if name in _REPLACEMENTS:
            raise ConfigError(f"--slurm {name} is not allowed, since Paceline sets it. Use {_REPLACEMENTS[name]}.")
        if name == "gres" and spec.gpus_per_node:
            raise ConfigError(
                f"--slurm gres={value} and --gpus-per-node, which asks for gres={spec.gres}. Give one of them, such as "
                f"--slurm gres={spec.gres},{value}"
            )
        yield name, value if equals else None


def cpus_per_task(spec: LaunchSpec) -> int | None:
    """Return the CPUs of each Slurm task; None: all CPUs of the node, or the site's default."""
    if spec.cpus_per_task is None:
        return None
    return spec.cpus_per_task if spec.starts_each_rank else spec.cpus_per_task * max(spec.nproc)


def _signal_before_s(spec: LaunchSpec, options: SlurmOptions) -> int | None:
    if options.signal_before is not None:
        before_s = parse_duration_s(options.signal_before, "signal_before")
        if spec.walltime_s is not None and before_s >= spec.walltime_s:
            raise ConfigError(
                f"--signal-before {options.signal_before} must be shorter than --walltime, which is "
                f"{spec.walltime_s:g} s."
            )
        return max(1, round(before_s))
    if spec.is_task and spec.walltime_s is not None:
        return max(1, round(min(120, spec.walltime_s / 10)))
    return None


def slurm_time(seconds: float) -> str:
    """Format seconds as ``D-HH:MM:SS``, rounded up."""
    minutes, second = divmod(-int(-seconds // 1), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days}-" if days else "") + f"{hour:02}:{minute:02}:{second:02}"


def directive_value(name: str, value: str) -> str:
    """Quote a value for a directive."""
    if "\n" in value or "\0" in value:
        raise ConfigError(f"--{name} must be one line, but is {value!r}.")
    if re.fullmatch(r"[\w@%+,./:=|&*!()\[\]{}^~-]+", value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


# --- The script: sbatch's directives, and the shell code that starts the ranks ---
#
# Each of Paceline's agents is a step of its own, since a step ends as a whole and agents must survive each other; so is
# each torchrun of an elastic job. Other rank launchers are one step on all nodes, which Slurm ends when a part of it
# fails.


SCRIPT, MACHINE_SCRIPT = "job.sh", "machine.sh"
ARRAY_INDEX = "{array_index}"
_ARRAY_INDEX = re.compile(r"(\{\{array_index\}\}|\{array_index\})")

_WAIT = """\
# Bash returns from wait on a signal, although the step continues.
steps=()
signalled=
{traps}
wait_for() {
  local code
  signalled=1
  while [ -n "$signalled" ]; do
    signalled=
    wait "$1"
    code=$?
  done
  return "$code"
}
"""
# Slurm signals the steps of a batch job itself.
_TRAPS_OF_BATCH = "trap 'signalled=1' INT TERM USR1"
# On SIGTERM, srun kills its tasks at once.
_TRAPS_OF_ALLOCATION = """\
pass_on() {
  signalled=1
  squeue --steps --noheader --jobs="$SLURM_JOB_ID" --format='%i %j' |
    awk -v name="paceline-$$" '$2 == name { print $1 }' | xargs --no-run-if-empty scancel --signal="$1"
}
trap 'pass_on TERM' INT TERM
trap 'pass_on USR1' USR1"""

# The SLURM_JOB_ID of one job in each array names the whole array.
_IN_ARRAY = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"

_REQUEUE = """\
# 75: saved, to be restarted. A cancelled job is no longer RUNNING, and must not be requeued.
if [ "$code" -eq 75 ] && ! command -v scontrol >/dev/null; then
  echo "paceline: saved; no scontrol here. Give: scontrol requeue {job}" >&2
elif [ "$code" -eq 75 ] &&
  [ "$(squeue --noheader --jobs="{job}" --format=%T)" = RUNNING ]; then
  echo "paceline: saved; back into the queue" >&2
  scontrol requeue "{job}"
fi
"""

_IMAGE_FILE = """\
if [ ! -e {image} ]; then
  echo "paceline: --container: $(hostname) has no file" {image} >&2
  {give_up}
fi
"""

_CONTAINER = """\
# The image is run by pyxis, a plug-in of srun, or else by apptainer.
if srun --help | grep --quiet -e --container-image; then
  container=({pyxis})
elif runtime="$(command -v apptainer || command -v singularity)"; then
  container=("$runtime" exec {apptainer})
else
  echo "paceline: --container needs pyxis (srun --container-image) or apptainer, and $(hostname) has neither." \\
    "Load the site's module with --module apptainer, choose nodes that have it, or leave --container out." >&2
  {give_up}
fi
"""

_ALL_CPUS = "# CPUs: all of each node. --cpus-per-task N sets another number."
_DEFAULT_CPUS = (
    "# CPUs: the site's default per GPU (DefCpuPerGPU), if any; else one per process. --cpus-per-task N sets another."
)
_BEFORE_MODULES = re.compile(r"\s*(module|ml)\s+(purge|reset|restore|use|unuse)\b")

_CPUS = """\
# The tasks on a node get its CPUs in equal parts; they share them where nodes differ, or have too few.
share=0
case "$SLURM_JOB_CPUS_PER_NODE" in
  *,*) ;;
  *) share=$((${SLURM_JOB_CPUS_PER_NODE%%[!0-9]*} / {each})) ;;
esac
cpus="--cpus-per-task=$share"
if [ "$share" -eq 0 ]; then
  unset SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK
  cpus=--overcommit
fi
"""

_LAYOUT = """\
layout="$(scontrol show hostnames "$SLURM_JOB_NODELIST" |
  awk -v counts='{counts}' 'NR <= split(counts, of) { for (i = 0; i < of[NR]; i++) print }' | paste -sd, -)"
"""

_STOP_CODES = """\
# The code is that of the rank that failed first. One that ends after a signal leaves its code, so that the others have
# time to save too.
if [ "$code" -ne 0 ]; then
  for failed in "$stopped"/failed-*; do
    [ ! -s "$failed" ] || code=$(cat "$failed")
  done
{killed}else
  for code_of_rank in $(cat "$stopped"/code-* 2>/dev/null); do
    [ "$code" -eq 75 ] || code=$code_of_rank
  done
fi
rm -r "$stopped"
"""
_KILLED = """\
elif [ -n "$(find "$stopped" -name 'rank-*')" ]; then
  echo "paceline: ranks were killed before they could end" >&2
  code=1
"""

_MACHINE = """\
#!/bin/bash
# Runs what starts a node's ranks. A job that may lose nodes survives the loss of job.sh's node, but would then not end:
# so wait until that node answers, or Slurm has removed it from the job.
trap : TERM USR1
"$@"
code=$?
setting() { scontrol show config | awk -v name="$1" '$1 == name { print $3 }'; }
port=$(setting SlurmdPort)
for ((attempt = 0; attempt * 5 < $(setting SlurmdTimeout) + 60; attempt++)); do
  read -r script_host nodes <<<"$(squeue --noheader --jobs="{job}" --format='%B %N')"
  [ -n "$nodes" ] || break
  if ! scontrol show hostnames "$nodes" | grep --quiet --line-regexp "$script_host"; then
    echo "paceline: $script_host was lost, where job.sh ran: back into the queue, or the end" >&2
    # A requeue is refused if another node was first, and where no job may return to the queue.
    if ! scontrol requeue "{job}"; then
      [ "$(squeue --noheader --jobs="{job}" --format=%T)" != RUNNING ] || scancel "{job}"
    fi
    break
  fi
  timeout 5 bash -c "</dev/tcp/$script_host/$port" 2>/dev/null && break
  sleep 5
done
exit "$code"
"""


def batch_files(spec: LaunchSpec, options: SlurmOptions) -> dict[str, str]:
    """Return the batch script, and, if the job outlives nodes, the script that each of them runs, by file name.

    Raises:
        ConfigError: an option has a wrong form, or conflicts with another.
    """
    files = {SCRIPT: batch_script(spec, options)}
    if spec.outlives_nodes:
        files[MACHINE_SCRIPT] = _MACHINE.replace("{job}", _this_job(options))
    return files


def batch_script(spec: LaunchSpec, options: SlurmOptions) -> str:
    """Return the script for sbatch.

    Raises:
        ConfigError: an option has a wrong form, or conflicts with another.
    """
    lines = [_shebang(options)]
    for name, value in directives(spec, options):
        lines.append(f"#SBATCH --{name}" + ("" if value is None else f"={directive_value(name, value)}"))
    if cpus_per_task(spec) is None:
        lines.append(_ALL_CPUS if options.exclusive else _DEFAULT_CPUS)
    return "\n".join([*lines, "", *_shell(spec, options, batch=True), ""])


def allocation_script(spec: LaunchSpec, options: SlurmOptions) -> str:
    """Return the script of the job's steps for an existing allocation."""
    given = [field.name for field in fields(options) if getattr(options, field.name)]
    queue_options = [flag(name) for name in given if name not in _OPTIONS_OF_STEPS]
    if queue_options:
        raise ConfigError(
            f"{', '.join(queue_options)}: only for submission, but this shell is in a Slurm allocation (SLURM_JOB_ID "
            "is set), in which --on slurm starts steps. Leave them out; or submit a job of its own with: "
            "env -u SLURM_JOB_ID paceline"
        )
    limits = ["--gpus-per-node"] if spec.gpus_per_node else []
    # A task enforces its time limit itself.
    limits += ["--walltime"] if spec.walltime_s is not None and not spec.is_task else []
    if limits and spec.rank_launcher in ("mpi", "horovod"):
        raise ConfigError(
            f"{', '.join(limits)}: in an existing Slurm allocation, --rank-launcher {spec.rank_launcher} starts no "
            "step for which Slurm could enforce it. Leave it out; or submit a job of its own with: "
            "env -u SLURM_JOB_ID paceline"
        )
    return "\n".join([_shebang(options), *_shell(spec, options, batch=False), ""])


def needs_login_shell(options: SlurmOptions) -> bool:
    """Return whether the script uses module or conda, which are functions of login shells."""
    return bool(options.module or options.conda or any(map(_BEFORE_MODULES.match, options.setup)))


def _shebang(options: SlurmOptions) -> str:
    return "#!/bin/bash -l" if needs_login_shell(options) else "#!/bin/bash"


_OPTIONS_OF_STEPS = ("module", "conda", "venv", "container", "container_mount", "setup")


def _shell(spec: LaunchSpec, options: SlurmOptions, *, batch: bool) -> Iterator[str]:
    """Yield the lines after the directives."""
    setup = [line for line in options.setup if _BEFORE_MODULES.match(line)]
    setup += [f"module load {shlex.quote(name)}" for name in options.module]
    if options.conda is not None:
        setup += ['source "$(conda info --base)/etc/profile.d/conda.sh"']
        setup += [f"conda activate {shlex.quote(options.conda)}"]
    if options.venv is not None:
        activate = Path(options.venv).expanduser() / "bin" / "activate"
        setup += [f"source {shlex.quote(str(activate))}"]
    setup += [line for line in options.setup if not _BEFORE_MODULES.match(line)]
    if setup:
        yield from ("set -e", *setup, "set +e")
    result = shlex.quote(str(spec.directory / EXIT_CODE))
    if options.array is not None:
        result += f'-"{_IN_ARRAY}"'
    if batch:
        yield f"rm -f {result}"
    if options.container is not None:
        give_up = f"echo 1 >{result}\n  exit 1" if batch else "exit 1"
        yield _container(spec, options, options.container).replace("{give_up}", give_up).rstrip()
    yield _WAIT.replace("{traps}", _TRAPS_OF_BATCH if batch else _TRAPS_OF_ALLOCATION).rstrip()
    yield ""
    if _gpus_of_ranks(spec, options):
        yield "unset SLURM_GPUS_PER_TASK SLURM_TRES_PER_TASK"
    if _requested_cpus(spec, options, batch=batch) is None and spec.rank_launcher != "mpi":
        yield _CPUS.replace("{each}", str(max(spec.nproc) if spec.starts_each_rank else 1)).rstrip()
    yield from BODIES[spec.rank_launcher](spec, _step_options(spec, options, batch=batch), batch)
    if batch and requeues(spec, options):
        yield _REQUEUE.replace("{job}", _this_job(options)).rstrip()
    if batch:
        yield f'echo "$code" >{result}'
    yield 'exit "$code"'


def _container(spec: LaunchSpec, options: SlurmOptions, image: str) -> str:
    """Return the shell code that sets ``container``: srun's last options, or the first words of its command."""
    check = ""
    if image.startswith((".", "/", "~")) or image.endswith((".sif", ".sqsh")):
        # Only the nodes need to see it.
        by_pyxis = by_apptainer = str(spec.workdir / Path(image).expanduser())
        check = _IMAGE_FILE.replace("{image}", shlex.quote(by_pyxis))
    else:
        scheme, _, name = image.rpartition("://")
        registry, slash, rest = name.partition("/")
        has_registry = slash and ("." in registry or ":" in registry or registry == "localhost")
        by_pyxis = f"{registry}#{rest}" if has_registry else name
        by_apptainer = f"{scheme or 'docker'}://{name}"
    own = [spec.workdir, spec.directory, *([] if spec.run is None else [spec.run.parent])]
    paths = [str(path) for path in dict.fromkeys(own) if not any(path.is_relative_to(p) and path != p for p in own)]
    mounts = [mount if ":" in mount else f"{mount}:{mount}" for mount in (*paths, *options.container_mount)]
    for mount in mounts:
        if "," in mount or not re.fullmatch(r"/[^:]*:/[^:]*(:r[ow])?", mount):
            raise ConfigError(
                f"--container-mount takes PATH or SOURCE:TARGET, absolute and without commas, not {mount}."
            )
    pyxis = [f"--container-image={by_pyxis}", f"--container-mounts={','.join(mounts)}"]
    apptainer = [*(["--nv"] if spec.gpus_per_node else []), "--bind", ",".join(mounts), "--pwd", str(spec.workdir)]
    return check + _CONTAINER.replace("{pyxis}", shlex.join([*pyxis, f"--container-workdir={spec.workdir}"])).replace(
        "{apptainer}", shlex.join([*apptainer, by_apptainer])
    )


def _this_job(options: SlurmOptions) -> str:
    """Return a job's reference to itself in Slurm's commands, for double quotes."""
    # Only for arrays: a job that is submitted from an array inherits its variables.
    return "$SLURM_JOB_ID" if options.array is None else _IN_ARRAY


def _step_on_each_node(spec: LaunchSpec, step_options: str, batch: bool, job_id: str) -> Iterator[str]:
    """Yield a step for each node, none of which ends with another."""
    yield f'hosts=($(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n {spec.nodes[1]}))'
    yield f'export {JOB_ID}="{job_id}" {NODES}="${{#hosts[@]}}"'
    yield f'export {HOSTS}="$(IFS=,; echo "${{hosts[*]}}")"'
    yield 'for rank in "${!hosts[@]}"; do'
    srun = ["srun", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--nodes=1", "--ntasks=1"]
    srun += ["--ntasks-per-node=1", '--nodelist="${hosts[rank]}"', step_options]
    wrapper = ["bash", str(spec.directory / MACHINE_SCRIPT)] if batch else []
    yield f"  export {NODE_RANK}=$rank"
    yield wrapped([*srun, *quoted([*wrapper, *node_command(spec)]), "&"], indent="  ")
    yield '  steps+=("$!")'
    yield "done"


def _torchrun(spec: LaunchSpec, step_options: str, batch: bool) -> Iterator[str]:
    """Yield torchrun on all nodes, as one step; in steps of their own if it continues on those that are left."""
    if not spec.outlives_nodes:
        yield from _one_step(spec, step_options, batch)
        return
    yield from _stop_codes_directory(spec)
    # Another job's nodes may join under this name. An allocation may have several jobs at once.
    yield from _step_on_each_node(spec, step_options, batch, "$SLURM_JOB_ID" if batch else "$SLURM_JOB_ID-$$")
    yield "code=1"
    yield 'for step in "${steps[@]}"; do'
    yield '  wait_for "$step"'
    yield "  ended=$?"
    yield "  # The step of a lost node fails, but the others may have finished without it."
    yield '  [ "$code" -eq 0 ] || code=$ended'
    yield "done"
    yield _STOP_CODES.replace("{killed}", "").rstrip()


def _agents(spec: LaunchSpec, step_options: str, batch: bool) -> Iterator[str]:
    """Yield a step for each node, in which an agent starts the processes."""
    assert spec.run is not None
    [finished] = quoted([str(spec.run / "result.json")])
    yield from _step_on_each_node(spec, step_options, batch, "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}-$$")
    yield "code=1"
    yield "finished= stopped="
    yield 'for step in "${steps[@]}"; do'
    yield '  wait_for "$step"'
    yield "  ended=$?"
    yield '  case "$ended" in'
    yield "    0) finished=1 ;;"
    yield "    75) stopped=1 ;;"
    yield "    *) code=$ended ;;"
    yield "  esac"
    yield "done"
    yield "# The step of a lost node fails, but the others may have finished without it."
    yield f'if [ -n "$finished" ] && [ -e {finished} ]; then code=0'
    yield 'elif [ -n "$stopped" ]; then code=75; fi'


def _one_step(spec: LaunchSpec, step_options: str, batch: bool) -> Iterator[str]:
    """Yield one step on all nodes: a task per rank, or one per node that starts its ranks."""
    least, most = spec.nodes
    # sbatch allocates the required number; an existing allocation may have more nodes.
    is_known = least == most or not batch
    nodes = str(most) if is_known else '"$SLURM_JOB_NUM_NODES"'
    counts = [spec.processes_on(node_rank) if spec.starts_each_rank else 1 for node_rank in range(most)]
    tasks = str(sum(counts)) if is_known else f"$((SLURM_JOB_NUM_NODES * {counts[0]}))"
    srun = ["srun", "--kill-on-bad-exit=1", "--wait=0", f"--nodes={nodes}", f"--ntasks={tasks}"]
    if spec.starts_each_rank and not batch:
        # Slurm fills the first node as far as salloc's layout allows; --ntasks-per-node does not change that.
        yield _LAYOUT.replace("{counts}", " ".join(map(str, counts))).rstrip()
        srun += ["--distribution=arbitrary", '--nodelist="$layout"', step_options]
    else:
        srun += [f"--ntasks-per-node={counts[0]}", step_options]
    command = rank_command(spec) if spec.starts_each_rank else node_command(spec)
    yield from _stop_codes_directory(spec)
    yield from _run_step([*srun, *quoted(command)])
    yield _STOP_CODES.replace("{killed}", "").rstrip()


def _stop_codes_directory(spec: LaunchSpec) -> Iterator[str]:
    yield f'stopped={shlex.quote(str(spec.directory))}/"stopped-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}-$$"'
    yield 'mkdir -p "$stopped"'
    yield f'export {STOP_CODES}="$stopped"'


def run_shielded(spec: LaunchSpec, texts: list[str]) -> Iterator[str]:
    """Yield a program that starts the ranks, after :func:`shielded`."""
    yield from _run_step(['PATH="$starters:$PATH"', _shell_words(spec, "--shield"), *texts])
    yield 'exec {ears}>&- && wait "$listeners"'
    yield _STOP_CODES.replace("{killed}", _KILLED).rstrip()


def _run_step(texts: list[str]) -> Iterator[str]:
    yield wrapped([*texts, "&"])
    yield 'steps+=("$!")'
    yield 'wait_for "$!"'
    yield "code=$?"


def _step_options(spec: LaunchSpec, options: SlurmOptions, *, batch: bool) -> str:
    """Return a step's CPU options; in an allocation also its GPUs, time limit, and a name to find it by."""
    words = [] if batch else ['--job-name="paceline-$$"']
    if not batch and spec.gpus_per_node:
        words.append(f"--gres={spec.gres}")
    if (gpus := _gpus_of_ranks(spec, options)) is not None:
        words.append(f"--gres=gpu:{gpus}")
    if not batch and spec.walltime_s is not None:
        words.append(f"--time={slurm_time(spec.walltime_s)}")
    cpus = _requested_cpus(spec, options, batch=batch)
    # Since Slurm 22.05 srun does not inherit this from sbatch.
    words.append("$cpus" if cpus is None else f"--cpus-per-task={cpus}")
    if options.container is not None:
        words.append('"${container[@]}"')
    return " ".join(words)


def _gpus_of_ranks(spec: LaunchSpec, options: SlurmOptions) -> int | None:
    """Return the GPUs of a node whose ranks have some each, but are one task, to which srun would give one rank's."""
    found = (re.fullmatch(r"(?:--)?gpus-per-task=(?:.*:)?(\d+)", text) for text in options.slurm)
    each = next((int(match[1]) for match in found if match is not None), None)
    return None if each is None or spec.starts_each_rank else each * max(spec.nproc)


def _requested_cpus(spec: LaunchSpec, options: SlurmOptions, *, batch: bool) -> int | None:
    """Return the CPUs of each task of a step; None: all CPUs of the job on each node."""
    # The nodes of an allocation may have different numbers of CPUs, as of processes.
    if not batch and (spec.cpus_per_task is None or len(spec.nproc) > 1):
        return None
    return cpus_per_task(spec)


def quoted(words: Iterable[str]) -> list[str]:
    """Quote words for a shell; ``{array_index}`` becomes the index in a job array, with doubled braces itself."""
    expanded = {ARRAY_INDEX: '"$SLURM_ARRAY_TASK_ID"', f"{{{ARRAY_INDEX}}}": shlex.quote(ARRAY_INDEX)}
    return [
        "".join(expanded.get(piece, shlex.quote(piece) if piece else "") for piece in _ARRAY_INDEX.split(word)) or "''"
        for word in words
    ]


def has_array_index(word: str) -> bool:
    """Return whether :func:`quoted` puts the index in a job array into a word."""
    return ARRAY_INDEX in _ARRAY_INDEX.findall(word)


def wrapped(texts: Iterable[str], indent: str = "") -> str:
    """Break a command into readable lines."""
    lines = [indent]
    for text in texts:
        if len(lines[-1]) + len(text) > 96 and lines[-1].strip():
            lines.append(indent + "  ")
        lines[-1] += text + " "
    return "\\\n".join(lines).rstrip()


def _mpirun(spec: LaunchSpec, step_options: str, batch: bool) -> Iterator[str]:
    """Yield ``mpirun`` in the allocation, which it detects itself."""
    nodes, each = fixed_size(spec)
    yield 'export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"'
    yield from shielded(spec, _SRUN, batch)
    yield from run_shielded(spec, quoted([*mpirun_in_allocation(nodes, each), *command_of_shielded_rank(spec)]))


def fixed_size(spec: LaunchSpec) -> tuple[int, int]:
    """Return the number of nodes and the processes on each."""
    by = f"--rank-launcher {spec.rank_launcher}"
    return fixed_nodes(spec, by, "Use --rank-launcher agent or torchrun."), spec.nproc[0]


Body = Callable[[LaunchSpec, str, bool], Iterator[str]]


def _of_plug_in(reference: str) -> Body:
    return lambda spec, step_options, batch: import_object(reference)(spec, step_options, batch)


BODIES: dict[RankLauncher, Body] = {
    "torchrun": _torchrun,
    "spawn": _one_step,
    "srun": _one_step,
    "ray": _one_step,
    "mpi": _mpirun,
    **{name: _of_plug_in(reference) for name, reference in SLURM_BODIES.items()},
    "agent": _agents,
}
"""Shell code by rank launcher, the default first: it starts the ranks, waits (``wait_for``) and sets ``code``.

Its arguments are the job, further options for srun, and whether sbatch runs it.
"""
