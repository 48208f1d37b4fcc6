"""``--on torchrun``: torchrun's agent on this node, ``python -m torch.distributed.run``, starts the ranks."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial

from paceline.core.environment import is_loopback, parse_endpoint
from paceline.core.errors import ConfigError
from paceline.core.job import Command, LaunchSpec, split_python
from paceline.core.sockets import address_beside, interface_of
from paceline.launch import torchrun_agent
from paceline.launch.launcher import RenderedJob, RendezvousOptions, TorchrunOptions
from paceline.launch.local import LocalLauncher, process_command, process_variables
from paceline.launch.rank_output import shared_outputs
from paceline.launch.rank_variables import names_rank
from paceline.launch.stop_codes import signal_ranks, stop_codes_command
from paceline.launch.supervisor import RankStarter, SupervisedJob, check_program
from paceline.runs.directory import RunDirectory
from paceline.runs.failures import read_failure

_MODULE = "torch.distributed.run"
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
_REACHING_RANKS = ("TERM", "USR1")
_LOCAL_RANK = "${local_rank}"
"""torchrun replaces it in the arguments of each rank."""


class Torchrun(LocalLauncher):
    """Starts torchrun's agent here; on several nodes the user runs it on each.

    The agent serves its store on every interface, as torchrun always does; the workers' own sockets
    are on loopback if all are on one node.
    """

    name = "torchrun"
    rank_launchers = ("torchrun",)
    env_styles = ("torch",)

    def _with_placement(self, spec: LaunchSpec, options: RendezvousOptions | None) -> LaunchSpec:
        """Return the job with this node's place; a script's ``--max-restarts`` are torchrun's."""
        spec = super()._with_placement(spec, options)
        if isinstance(options, TorchrunOptions):
            if options.rdzv_backend not in ("c10d", "static"):
                raise ConfigError(f"--rdzv-backend must be c10d or static, but is {options.rdzv_backend!r}.")
            if options.rdzv_backend == "static" and options.node_rank is None:
                raise ConfigError("--rdzv-backend static needs --node-rank: this node's number is fixed.")
        if spec.is_task or not spec.recovery.max_restarts:
            return spec
        return replace(spec, recovery=replace(spec.recovery, recover="restart"))

    def _commands(self, spec: LaunchSpec, options: RendezvousOptions | None) -> tuple[Command, ...]:
        backend = options.rdzv_backend if isinstance(options, TorchrunOptions) else "c10d"
        if names_rank(spec.command) and not spec.is_task:
            # torchrun itself replaces the local rank alone, and numbers the nodes in an order of its own.
            command_of_rank = ("-m", "paceline.launch.rank", "--", *process_command(spec, None))
            script_command = (sys.executable, "-P", *command_of_rank)
        else:
            script_command = process_command(spec, _LOCAL_RANK)
        python, arguments = split_python(script_command)
        signals, shell = _SIGNALS, []
        if spec.placement.leaves_stop_codes:
            # torchrun would kill ranks that save for longer than 30 s: it ignores Slurm's signals.
            shell = ["sh", "-c", f"trap '' {' '.join(_REACHING_RANKS)}; exec \"$@\"", "sh"]
            signals = ",".join(name for name in _SIGNALS.split(",") if name.removeprefix("SIG") not in _REACHING_RANKS)
            python, arguments = split_python(stop_codes_command(sys.executable, script_command))
        # torchrun's parser drops a -- that is the script's first argument.
        script = 2 if arguments[:1] == ("-m",) else 1
        if arguments[script : script + 1] == ("--",):
            arguments = (*arguments[:script], "--", *arguments[script:])
        nproc, restarts_workers = spec.local_world_size, spec.recovery.recover == "restart"
        restarts = [f"--max-restarts={spec.recovery.max_restarts}"] if restarts_workers else []
        # A store that agents share with their workers is made once: an agent that joins later, or replaces a dead one,
        # does not get its address, and would wait forever (torch 2.13). A variable number of nodes changes without
        # --max-restarts too.
        least, most = spec.nodes
        own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if most > (1 if restarts_workers else least) else {}
        command = Command(
            title=f"torchrun, {nproc} processes",
            argv=(
                *(*shell, python or sys.executable, "-m", _MODULE),
                *(*_meeting(spec, backend), f"--nproc-per-node={nproc}"),
                # Its default omits SIGUSR1, Slurm's warning, which would kill it and its workers.
                f"--signals-to-handle={signals}",
                *(*restarts, *([] if python else ["--no-python"]), *arguments),
            ),
            env={**spec.thread_variables(), **own_store, **_gloo_variables(spec), **process_variables(spec)},
        )
        return (command,)

    def _start(self, rendered: RenderedJob) -> SupervisedJob:
        """Start the agent; where several ranks print here, the one that gives each a pipe of its own."""
        spec, commands = rendered.spec, rendered.commands
        check_program(spec.command[0])
        verdict = (
            None
            if spec.placement.log_directory is None
            else partial(_verdict, spec.placement.log_directory, time.time())
        )
        starter = RankStarter(name="torchrun", verdict=verdict)
        if spec.placement.leaves_stop_codes:
            starter = replace(starter, death_signal=signal.SIGINT, signal_ranks=signal_ranks)
        if spec.local_world_size > 1 and shared_outputs():
            starter = replace(starter, piped_ranks=spec.local_world_size)
            command, module = commands[0], commands[0].argv.index(_MODULE)
            argv = (*command.argv[: module - 1], torchrun_agent.__file__, *command.argv[module + 1 :])
            commands = (replace(command, argv=argv),)
        return SupervisedJob(
            commands,
            starter=starter,
            directory=spec.placement.log_directory,
            grace_s=spec.recovery.grace_s,
        )


def _meeting(spec: LaunchSpec, backend: str) -> list[str]:
    """Return torchrun's options for the rendezvous of the agents, and the user's own."""
    words = [f"--{text.removeprefix('--')}" for text in spec.torchrun]
    # Of several --rdzv-conf torchrun takes the last one.
    is_conf = [re.match("--rdzv[-_]conf=", word) is not None for word in words]
    conf = ",".join(word.partition("=")[2] for word, is_one in zip(words, is_conf, strict=True) if is_one)
    others = [word for word, is_one in zip(words, is_conf, strict=True) if not is_one]
    meeting = _rendezvous(spec, backend)
    if conf:
        ours = [word for word in meeting if word.startswith("--rdzv-conf=")]
        meeting = [word for word in meeting if word not in ours]
        meeting.append(",".join([*(ours or ["--rdzv-conf="]), conf]).replace("=,", "=", 1))
    return [*meeting, *others]


def _rendezvous(spec: LaunchSpec, backend: str) -> list[str]:
    least, most = spec.nodes
    if most == 1:
        if spec.master_port is None:
            return ["--standalone", "--local-addr=127.0.0.1"]  # not this machine's name, which may not resolve
        return ["--nnodes=1", "--master-addr=127.0.0.1", f"--master-port={spec.master_port}"]
    if backend == "static":
        assert spec.placement.rdzv_endpoint is not None
        host, port = parse_endpoint(spec.placement.rdzv_endpoint, "--rdzv-endpoint")
        return [
            f"--nnodes={least}",
            f"--node-rank={spec.placement.node_rank}",
            f"--master-addr={host}",
            f"--master-port={port}",
        ]
    # Workers meet at the address of one of the agents, which by default reports its hostname.
    address = _address_for_loopback_name(spec)
    is_host, local_addr = [], [] if address is None else [f"--local-addr={address}"]
    if spec.placement.node_rank is not None:
        is_host = [f"--rdzv-conf=is_host={int(spec.placement.node_rank == 0)}"]
        local_addr = [
            f"--local-addr={host}" for host in spec.placement.hosts[spec.placement.node_rank :][:1]
        ] or local_addr
    return [
        f"--nnodes={least}:{most}" if most > least else f"--nnodes={least}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={spec.placement.rdzv_endpoint}",
        f"--rdzv-id={spec.placement.rdzv_id}",
        *(*is_host, *local_addr),
    ]


def _address_for_loopback_name(spec: LaunchSpec) -> str | None:
    """Return this node's address for the others, if its own name is a loopback address, as 127.0.1.1 on Debian."""
    if spec.placement.rdzv_endpoint is None:
        return None
    host, port = parse_endpoint(spec.placement.rdzv_endpoint, "--rdzv-endpoint")
    with suppress(OSError):  # no such name, as on a machine that only prints the command
        if is_loopback(socket.gethostbyname(socket.gethostname())) and socket.gethostbyname(host):
            return address_beside(host, port)
    return None


def _gloo_variables(spec: LaunchSpec) -> dict[str, str]:
    """Have gloo announce that address, too."""
    address = None if "GLOO_SOCKET_IFNAME" in os.environ else _address_for_loopback_name(spec)
    return {} if address is None else {"GLOO_SOCKET_IFNAME": interface_of(address)}


def _verdict(directory: RunDirectory, began: float) -> str:
    """Describe the workers' progress when the last of torchrun's restarts failed; "" without a restart."""
    events = directory.read_events()
    starts = [event["step"] for event in events if event["event"] == "started" and event["time"] >= began]
    if len(starts) < 2:
        return ""
    step = starts[-1]
    same = len(list(itertools.takewhile(lambda start: start == step, reversed(starts))))
    lines = []
    if same > 1:
        lines.append(
            f"torchrun started the workers {len(starts)} times; the last {same} times they continued after "
            f"step {step}, and none came to the next checkpoint."
        )
    failures = [read_failure(path) for path in sorted(directory.logs.glob("rank-*.error.json"))]
    victims = [failure for failure in failures if failure is not None and failure.victim]
    lines += [f"rank {failure.rank}: {failure.message}" for failure in victims[:1]]
    return "\n  ".join(lines)
