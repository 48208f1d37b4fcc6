"""``--on horovod``: horovodrun starts every rank, here or on the hosts that it is given, also elastically.

With the horovod env style, the default, the command starts as it is: it calls ``hvd.init()``. A rank of a
Paceline task, or of a script for torch, also gets its rank variables from :mod:`paceline.launch.rank`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from paceline.core.errors import ConfigError, LaunchError
from paceline.launch.hosts import Host, read_hosts
from paceline.launch.launcher import (
    Command,
    JobHandle,
    LaunchSpec,
    RenderedJob,
    option,
    refuse_unsupported,
)
from paceline.launch.local import ForegroundJob, ProcessGroup
from paceline.launch.mpi import (
    MpiLauncher,
    MpiOptions,
    command_of_a_rank,
    host_list,
    place_on_hosts,
    variables,
)
from paceline.launch.rendering import refuse_secrets
from paceline.launch.slurm_script import command_of_shielded_rank, fixed_size, quoted, run_shielded, shielded
from paceline.launch.submit import MachinesLauncher
from paceline.launch.supervisor import RankStarter, SupervisedJob
from paceline.runs.directory import RunDirectory

_INSTALL = "build it against this PyTorch: scripts/build-horovod, as docs/launchers/horovod.md says"
_DISCOVERY_S = 30.0
_IN_SHELL = (
    "horovodrun starts each rank by a shell command with all its variables in it. Have the program read it from a file."
)


@dataclass(frozen=True, kw_only=True)
class HorovodOptions:
    """Where horovodrun starts the ranks, and how."""

    hosts: str | None = option("Machines and their processes, such as a:2,b:2, or a file with one per line.")
    controller: str = option("How Horovod's processes coordinate: gloo, or mpi (with mpirun).", "gloo")
    min_np: int | None = option("Elastic: continue with at least this many processes.")
    max_np: int | None = option("Elastic: use at most this many processes.")
    host_discovery_script: str | None = option(
        "Elastic: a program that prints the available machines, one host:slots per line."
    )
    horovod_args: str | None = option("More options for horovodrun, such as --horovod-args='-v'.")


class HorovodLauncher(MachinesLauncher):
    """Starts the ranks with horovodrun."""

    name = "horovod"
    rank_launchers = ("horovod",)
    env_styles = ("horovod", "torch", "tensorflow", "none")

    def render(self, spec: LaunchSpec, options: HorovodOptions | None = None) -> RenderedJob:
        options = options or HorovodOptions()
        refuse_unsupported(spec, self.name, resources=True, walltime=options.controller == "gloo")
        hosts = read_hosts(options.hosts) if options.hosts is not None else ()
        spec = place_on_hosts(spec, hosts)
        elastic = _elastic(spec, hosts, options)
        if options.controller == "mpi":
            if options.horovod_args is not None:
                raise ConfigError(
                    "--horovod-args are for horovodrun, but --controller mpi starts mpirun. Use --on mpi --mpi-args."
                )
            # What horovodrun would run, without its shell, which ignores signals.
            return MpiLauncher().render(spec, MpiOptions(hosts=options.hosts))
        if options.controller != "gloo":
            raise ConfigError(f"--controller must be gloo or mpi, but is {options.controller!r}.")
        refuse_secrets(spec.env, _IN_SHELL)
        argv = [find_horovodrun(spec.python), "-np", str(spec.world_size), "--gloo"]
        if hosts:
            argv += ["-H", host_list(spec, hosts)]
        if spec.interface is not None:
            argv += ["--network-interface", spec.interface]
        elif not hosts and not elastic:
            argv += ["--network-interface", "lo"]
        argv += [*elastic, *shlex.split(options.horovod_args or ""), *command_of_a_rank(spec, hosts)]
        title = f"Horovod starts {spec.world_size} ranks"
        command = Command(title=title, argv=tuple(argv), env=variables(spec))
        return RenderedJob(spec=spec, options=options, commands=(command,))

    def submit(self, rendered: RenderedJob) -> JobHandle:
        if isinstance(rendered.options, MpiOptions):
            if not check_build(rendered.spec.python).controllers["MPI"]:
                raise LaunchError(
                    "--controller mpi: this Horovod was built without MPI. Build it where mpicxx is on PATH "
                    "(scripts/build-horovod), or use --controller gloo."
                )
            return MpiLauncher().submit(rendered)
        _require_horovodrun(rendered.commands[0].argv[0])
        commands = (_on_loopback(rendered.commands[0], rendered.spec, rendered.options),)
        return HorovodJob(SupervisedJob(commands, starter=RankStarter(name="horovodrun")), rendered.spec)


class HorovodJob(ForegroundJob):
    """A job of horovodrun's, whose exit code is 1 however its ranks have ended."""

    def __init__(self, processes: ProcessGroup, spec: LaunchSpec) -> None:
        super().__init__(processes, spec.directory)
        self._run = None if spec.run is None else RunDirectory(spec.run)
        self._events = 0 if self._run is None else len(self._run.read_events())

    def wait(self) -> int:
        """Supervise the job to its end; a task that was stopped and has saved its state exits with 75."""
        code = super().wait()
        if code != 0 and self._run is not None:
            new = self._run.read_events()[self._events :]
            if new and new[-1]["event"] == "stopped":
                return self.ended_with(130 if code == 130 else 75)
        return code


def _elastic(spec: LaunchSpec, hosts: tuple[Host, ...], options: HorovodOptions) -> list[str]:
    """Return horovodrun's options for an elastic job; none for others."""
    words: list[str] = []
    if options.host_discovery_script is not None:
        words += ["--host-discovery-script", options.host_discovery_script]
    for name, number in (("--min-np", options.min_np), ("--max-np", options.max_np)):
        if number is not None:
            words += [name, str(number)]
    if not words:
        return words
    if options.host_discovery_script is None and len(hosts) < 2:
        raise ConfigError(
            "--min-np and --max-np need --host-discovery-script, a program that prints which machines there "
            "are, or at least two --hosts."
        )
    if options.host_discovery_script is not None and hosts:
        raise ConfigError("--host-discovery-script says which machines there are; leave --hosts out.")
    if options.controller != "gloo":
        raise ConfigError("--controller mpi cannot be elastic. Use --controller gloo, or leave --min-np out.")
    if spec.env_style != "horovod":
        raise ConfigError(
            f"--env-style {spec.env_style} numbers the ranks once, but an elastic job renumbers them. "
            + (
                "A Paceline task grows and shrinks with --on spawn --nodes MIN:MAX."
                if spec.is_task
                else "Use --env-style horovod."
            )
        )
    if not (options.min_np or 1) <= spec.world_size <= (options.max_np or spec.world_size):
        raise ConfigError(f"--nproc {spec.world_size}, with which the job begins, must be from --min-np to --max-np.")
    return words


def _on_loopback(command: Command, spec: LaunchSpec, options: HorovodOptions) -> Command:
    """Add loopback to the command of an elastic job whose discovery script lists no other node.

    Without an interface horovodrun looks for one that two hosts share: with one host it waits 10 minutes, and fails.
    The script runs when the job starts, not when it is rendered.
    """
    script = options.host_discovery_script
    if script is None or spec.interface is not None or "--network-interface" in " ".join(command.argv):
        return command
    hosts = _discovered(script, command.env)
    if hosts and all(map(_is_this_machine, hosts)):
        print(
            f"paceline: {script} lists only this machine, so Horovod uses the network interface lo; others cannot "
            "join later.",
            file=sys.stderr,
        )
        index = command.argv.index("--gloo") + 1
        return replace(command, argv=(*command.argv[:index], "--network-interface", "lo", *command.argv[index:]))
    if len(hosts) == 1:
        print(
            f"paceline: {script} lists only {hosts[0]}, and without --interface horovodrun waits for a second one.",
            file=sys.stderr,
        )
    return command


def _discovered(script: str, env: Mapping[str, str]) -> list[str]:
    """Return the hosts that a discovery script prints now; none if it fails, which horovodrun reports."""
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            ["sh", "-c", script],
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_DISCOVERY_S,
            check=False,
        )
        if done.returncode == 0:
            return list(dict.fromkeys(line.partition(":")[0] for line in done.stdout.split()))
    return []


def _is_this_machine(host: str) -> bool:
    own = {address.address for card in psutil.net_if_addrs().values() for address in card}
    try:
        return socket.gethostbyname(host) in own
    except OSError:
        return False


# --- In the script of a Slurm job ---


_SSH = r"""
# horovodrun starts ranks on other nodes over ssh. In a job, steps replace ssh, so no node needs an ssh server.
cat >"$starters/ssh" <<END
#!/bin/bash
host=
while [ "\$#" -gt 0 ]; do
  case "\$1" in
    -o | -p | -i) shift 2 ;;
    *) [ -z "\$host" ] || break; host="\$1"; shift ;;
  esac
done
exec srun --overlap --nodes=1 --ntasks=1 --nodelist="\$host" {of_step} {shield} sh -c "\$*" </dev/null
END
chmod +x "$starters/ssh"
"""


def slurm_body(spec: LaunchSpec, step_options: str, batch: bool) -> Iterator[str]:
    """Yield ``horovodrun`` with the hosts of the allocation; it reaches the other nodes by steps."""
    refuse_secrets(spec.env, _IN_SHELL)
    nodes, each = fixed_size(spec)
    yield 'export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"'
    yield f"""hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed 's/$/:{each}/' | paste -sd, -)\""""
    yield from shielded(spec, _SSH.replace("{of_step}", step_options) if nodes > 1 else "", batch)
    interface = [] if spec.interface is None else ["--network-interface", spec.interface]
    horovodrun = quoted([find_horovodrun(spec.python), "-np", str(nodes * each), "--gloo", *interface])
    # The ranks get the original PATH, in case they call ssh themselves.
    horovodrun += ["-H", '"$hosts"', "env", '"PATH=$PATH"']
    yield from run_shielded(spec, [*horovodrun, *quoted(command_of_shielded_rank(spec))])


# --- What is installed ---


def find_horovodrun(python: str = sys.executable) -> str:
    """Return the path of the horovodrun next to the interpreter, or else its name."""
    beside = shutil.which("horovodrun", path=str(Path(python).parent))
    on_path = shutil.which("horovodrun")
    return beside if beside is not None and beside != on_path else "horovodrun"


def _require_horovodrun(program: str) -> None:
    if shutil.which(program) is None:
        raise LaunchError(f"horovodrun is not installed. Horovod has no binary packages: {_INSTALL}.")


@dataclass(frozen=True, kw_only=True)
class HorovodBuild:
    """What an installed Horovod was built with.

    Attributes:
        version: such as "0.28.1".
        frameworks: TensorFlow, PyTorch and MXNet: whether it works with each.
        controllers: MPI and Gloo likewise.
        operations: its backends for tensors: NCCL, DDL, CCL, MPI and Gloo.
        text: all of it as horovodrun prints it.
    """

    version: str
    frameworks: Mapping[str, bool]
    controllers: Mapping[str, bool]
    operations: Mapping[str, bool]
    text: str


def check_build(python: str = sys.executable) -> HorovodBuild:
    """Parse the output of ``horovodrun --check-build``."""
    program = find_horovodrun(python)
    _require_horovodrun(program)
    done = subprocess.run([program, "--check-build"], capture_output=True, text=True, check=False)
    version = re.search(r"Horovod v(\S+):", done.stdout)
    if done.returncode != 0 or version is None:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise LaunchError(
            f"{program} --check-build failed: {last}. Perhaps it was built for another PyTorch: {_INSTALL}."
        )
    groups: dict[str, dict[str, bool]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("Available "):
            groups[line] = {}
        elif (box := re.fullmatch(r"\s*\[([X ])\] (\S+)\s*", line)) and groups:
            list(groups.values())[-1][box[2]] = box[1] == "X"
    return HorovodBuild(
        version=version[1],
        frameworks=groups["Available Frameworks:"],
        controllers=groups["Available Controllers:"],
        operations=groups["Available Tensor Operations:"],
        text=done.stdout.strip(),
    )
