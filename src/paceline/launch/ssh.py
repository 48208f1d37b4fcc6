"""A job on machines that are reached by ssh."""

from __future__ import annotations

import hashlib
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType, MappingProxyType

from paceline.core.environment import HOSTS, JOB_ID, NODE_RANK, NODES
from paceline.core.errors import ConfigError, LaunchError
from paceline.core.options import at_least, require_form
from paceline.core.parent_death import kill_with_parent_command
from paceline.core.signals import (
    STOP_SIGNALS,
    StopRequests,
    forwarded_signal,
    handle_signals,
    interrupt_at_exit,
)
from paceline.launch.hosts import Host, nodes_of, read_hosts
from paceline.launch.launcher import (
    Command,
    JobHandle,
    LaunchSpec,
    RenderedJob,
    option,
    refuse_unsupported,
)
from paceline.launch.local import ForegroundJob
from paceline.launch.node import node_command
from paceline.launch.rank_output import LinesOfRank, RankOutputs
from paceline.launch.ssh_remote import READY
from paceline.launch.submit import MachinesLauncher
from paceline.runs.failures import STOPPED

# --- One remote machine: the ssh client, and its messages ---


LOST = 255
"""ssh's exit code when its connection fails; remote commands never use it."""


class SshMachine:
    """An ssh client. The kernel kills it if this process dies; then the remote command ends too.

    Args:
        on_ready: called, in another thread, once :mod:`paceline.launch.ssh_remote` waits there for the start.

    Attributes:
        pidfd: readable once the client has ended.
        said: the output before it was ready.

    Raises:
        LaunchError: the client could not be started.
    """

    def __init__(self, name: str, command: Command, prefix: str, on_ready: Callable[[], None]) -> None:
        self.name = name
        self.ready = False
        self.started = False
        self.code: int | None = None
        self.said: list[str] = []
        self._prefix = prefix.encode()
        self._on_ready = on_ready
        self._unsent = command.stdin.encode()
        self._outputs = RankOutputs((1, 2), partial(_LinesOfMachine, self))
        ends = self._outputs.open()
        # In a session of its own: Ctrl-C in a terminal reaches only the launcher, which passes it on.
        try:
            self._popen = subprocess.Popen(
                kill_with_parent_command(command.argv),
                stdin=subprocess.PIPE,
                stdout=ends[1],
                stderr=ends[2],
                start_new_session=True,
            )
        except OSError as error:
            self._outputs.close()
            raise LaunchError(f"ssh could not be started for {name}: {error}.") from error
        finally:
            for end in ends.values():
                os.close(end)
        self._outputs.start()
        self.pidfd = os.pidfd_open(self._popen.pid)
        assert self._popen.stdin is not None
        self._stdin = self._popen.stdin
        os.set_blocking(self._stdin.fileno(), False)

    @property
    def writable(self) -> tuple[int, ...]:
        """The descriptor with unsent data, if there is any."""
        return (self._stdin.fileno(),) if self._unsent and not self._stdin.closed else ()

    def send(self, word: str) -> None:
        """Send a line, as far as it is taken; the rest with the next :meth:`write`."""
        if len(self._unsent) < 4096:  # one that takes nothing is lost, and ssh will find that out
            self._unsent += f"{word}\n".encode()

    def start(self) -> None:
        """Have the command start; the machine is ready."""
        self.started = True
        self.send("go")

    def write(self) -> None:
        if not self.writable:
            return
        try:
            self._unsent = self._unsent[os.write(self._stdin.fileno(), self._unsent) :]
        except BlockingIOError:
            return
        except OSError:
            self._unsent = b""  # the client has ended, and says so

    def detach(self) -> None:
        """End its input, and with it what runs there."""
        with suppress(OSError):
            self._stdin.close()

    def kill(self) -> None:
        self._popen.kill()

    def reap(self) -> int:
        """Wait for the client's end, and take its last words; return its exit code, LOST if it was killed."""
        code = self._popen.wait()
        self.code = LOST if code < 0 else code
        os.close(self.pidfd)
        self._outputs.close()
        self.detach()
        return self.code

    def take(self, line: bytes) -> bytes:
        """Return what to show of a line of its output."""
        if self.ready:
            return self._prefix + line
        # Start-up files of a shell may print as well, and ssh itself does.
        text = line.decode(errors="replace").rstrip()
        if text == READY:
            self.ready = True
            self._on_ready()
        else:
            self.said.append(text)
        return b""


_writing = threading.Lock()  # each machine has a thread that writes its lines, and a pipe may take a part of one


class _LinesOfMachine(LinesOfRank):
    def __init__(self, machine: SshMachine, output: int) -> None:
        super().__init__(output)
        self._machine = machine

    def write(self, content: bytes) -> None:
        shown = b"".join(map(self._machine.take, content.splitlines(keepends=True)))
        with _writing:
            super().write(shown)


# --- One ssh for each machine: reached first, then started together, watched, and ended together ---


_START_S = 60.0  # to start Python there, over a slow file system too
_GRACE_S = 10.0
_KILL_S = 5.0
_RETRY_S = 10.0


class SshJob:
    """The machines of a job, each with an ssh client.

    Args:
        commands: one for each; its ``stdin`` ends in starting :mod:`paceline.launch.ssh_remote`.
        outlives_machines: the job continues when a machine is lost, and succeeds if one succeeds.
        connect_timeout_s: time limit for each to answer.
        least: this number of machines is enough to begin, with the first one among them.
        rejoining: by its number, the command of each machine that is tried again when it was not reached or is lost.

    Raises:
        LaunchError: not all could be reached and prepared; nothing runs anywhere.
    """

    def __init__(
        self,
        *,
        names: Sequence[str],
        commands: Sequence[Command],
        outlives_machines: bool,
        connect_timeout_s: float,
        heartbeat_s: float,
        least: int | None = None,
        rejoining: Mapping[int, Command] = MappingProxyType({}),
    ) -> None:
        if shutil.which("ssh") is None:
            raise LaunchError(
                "there is no ssh here. Install OpenSSH's client (on Debian: apt-get install openssh-client)."
            )
        self._outlives_machines = outlives_machines
        self._least = len(names) if least is None else least
        self._rejoining = rejoining
        self._retry_at: dict[int, float] = {}
        self._heartbeat_s = heartbeat_s
        self._beat_at = time.monotonic()
        self._requests = StopRequests()
        self._heard: list[int] = []
        self._cancelled = False
        self._signal: int | None = None
        self._failed: list[SshMachine] = []
        self._stopping = False
        self._deadline: float | None = None
        self._killing = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._machines: list[SshMachine] = []
        self._width = max(map(len, names)) if len(names) > 1 else 0
        try:
            for name, command in zip(names, commands, strict=True):
                with interrupt_at_exit():
                    self._machines.append(self._connect(name, command))
            self._reach_all(connect_timeout_s + _START_S)
        except BaseException:
            self._end_all()
            raise

    def wait(self) -> int:
        """Watch the job to its end; say what failed; return its exit code."""
        with handle_signals(STOP_SIGNALS, self._on_signal):
            try:
                self._start_ready()
                while any(machine.started for machine in self._running):
                    self._poll(min((at for at in (self._deadline, *self._due_retries) if at is not None), default=None))
                    self._retry()
                    for machine in self._start_ready():
                        print(f"paceline: {machine.name} joins.", file=sys.stderr)
                    self._obey()
                    if self._deadline is not None and time.monotonic() >= self._deadline:
                        self._hurry()
            finally:  # one more Ctrl-C must not interrupt this
                self._end_all()
        return self._conclude()

    def cancel(self) -> None:
        """Ask the job to stop, and kill what remains; may be called from another thread than :meth:`wait`."""
        self._cancelled = True
        self._awake()

    @property
    def _running(self) -> list[SshMachine]:
        return [machine for machine in self._machines if machine.code is None]

    def _connect(self, name: str, command: Command) -> SshMachine:
        return SshMachine(name, command, f"{name:{self._width}} | " if self._width else "", self._awake)

    def _start_ready(self) -> list[SshMachine]:
        """Start the command on machines that have become ready since; return them."""
        ready = [machine for machine in self._running if machine.ready and not machine.started]
        for machine in ready:
            machine.start()
        return ready

    @property
    def _needed(self) -> list[SshMachine]:
        """The machines that no other one replaces in an elastic job: the one with torchrun's store."""
        return [machine for n, machine in enumerate(self._machines) if self._rejoining and n not in self._rejoining]

    @property
    def _is_ending(self) -> bool:
        """Whether a machine that comes back would find nothing to join."""
        return self._stopping or self._signal is not None or any(machine.code == 0 for machine in self._machines)

    @property
    def _due_retries(self) -> tuple[float, ...]:
        return () if self._is_ending else tuple(self._retry_at.values())

    def _retry(self) -> None:
        """Connect again to machines that were not reached, or were lost."""
        for index, at in tuple(self._retry_at.items()):
            if time.monotonic() >= at and not self._is_ending:
                del self._retry_at[index]
                self._machines[index] = self._connect(self._machines[index].name, self._rejoining[index])

    def _reach_all(self, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline and any(not machine.ready for machine in self._running):
            self._poll(deadline)
        missing = [machine for machine in self._machines if not machine.ready or machine.code is not None]
        if not missing:
            return
        if len(self._machines) - len(missing) >= self._least and self._machines[0] not in missing:
            for machine in missing:
                why = _why(machine, within_s).splitlines()[0]
                print(f"paceline: {machine.name} joins once it can be reached: {why}", file=sys.stderr)
            return
        lines = [f"  {machine.name}: {_why(machine, within_s)}" for machine in missing]
        others = "; nothing runs on the others" if len(missing) < len(self._machines) else ""
        needed = f" The first one is needed; {self._least} can begin." if self._least < len(self._machines) else ""
        raise LaunchError(
            f"{len(missing)} of {len(self._machines)} machines cannot be used{others}.{needed}\n" + "\n".join(lines)
        )

    def _poll(self, until: float | None) -> None:
        """Send what there is, and handle ends, waiting for it until ``until`` or the next heartbeat."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        running = self._running
        for machine in running:
            poll.register(machine.pidfd, select.POLLIN)
            for fd in machine.writable:
                poll.register(fd, select.POLLOUT)
        next_beat = self._beat_at + self._heartbeat_s
        wait_s = max(0.0, min(next_beat, until or next_beat) - time.monotonic())
        ready = {fd for fd, _ in poll.poll(wait_s * 1000)}
        if self._wake in ready:
            os.eventfd_read(self._wake)
        for machine in running:
            machine.write()
            if machine.pidfd in ready:
                self._ended(machine)
        if time.monotonic() >= next_beat:
            self._beat_at = time.monotonic()
            self._tell("")

    def _tell(self, word: str) -> None:
        """Send it to the ready machines: the others' shells still read their commands."""
        for machine in self._running:
            if machine.ready:
                machine.send(word)

    def _ended(self, machine: SshMachine) -> None:
        code = machine.reap()
        index = self._machines.index(machine)
        was_lost = self._rejoining and (code == LOST or not machine.ready) and not self._is_ending
        if was_lost and index in self._rejoining:
            self._retry_at[index] = time.monotonic() + _RETRY_S
            if machine.started and any(other.started for other in self._running):
                print(f"paceline: {_end_of(machine)}. It rejoins once it can be reached.", file=sys.stderr)
        if not machine.ready or code in (0, *STOPPED):
            return
        if not self._stopping and self._signal is None:
            self._failed.append(machine)
        if was_lost and machine in self._needed:
            self._failed = [machine]  # it is the cause, where others have failed besides
            self._stop_within_grace()
        elif not self._outlives_machines:
            self._stop_within_grace()

    def _stop_within_grace(self) -> None:
        if not self._stopping:
            self._stopping = True
            self._deadline = time.monotonic() + _GRACE_S
            self._tell(f"signal {int(signal.SIGTERM)}")

    def _hurry(self) -> None:
        """Kill processes that did not stop on request, remote ones first, then local ones."""
        self._deadline = time.monotonic() + _KILL_S
        if self._killing:
            for machine in self._running:
                machine.kill()
        self._killing = True
        self._tell("kill")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._heard.append(number)
        self._awake()

    def _awake(self) -> None:
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def _obey(self) -> None:
        """Do what signals and other threads ask for, where nothing is being written."""
        if self._cancelled:
            self._signal = self._signal or signal.SIGTERM
            self._stop_within_grace()
        while self._heard:
            number = self._heard.pop(0)
            match self._requests.hear(number):
                case "first":
                    self._signal = number
                    self._tell(f"signal {int(forwarded_signal(number))}")
                case "end":
                    self._hurry()

    def _end_all(self) -> None:
        """Close the input of each machine, which ends its command."""
        running = self._running
        for machine in running:
            machine.detach()
        deadline = time.monotonic() + _KILL_S
        for machine in running:
            wait_s = max(0.0, deadline - time.monotonic()) if machine.ready else 0.0
            if not select.select([machine.pidfd], [], [], wait_s)[0]:
                machine.kill()
            machine.reap()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    def _conclude(self) -> int:
        codes = {machine.code for machine in self._machines}
        if 0 in codes and (self._outlives_machines or codes == {0}):
            for machine in self._machines:
                if machine.code:
                    print(f"paceline: {_end_of(machine)}; the others have finished.", file=sys.stderr)
            return 0
        # Where machines may be lost, what has failed on another one is the cause, or the request to stop.
        culprits = [m for m in self._failed if m.code != LOST or not self._outlives_machines]
        if not culprits and self._signal is None:
            culprits = self._failed
        if culprits:
            lost = culprits[0].code == LOST
            if self._width or lost:
                had_store = lost and culprits[0] in self._needed
                store = " It had torchrun's store, which the others need." if had_store else ""
                print(f"paceline: {_end_of(culprits[0])}.{store}", file=sys.stderr)
            return 1 if lost else culprits[0].code or 1
        for code in STOPPED:
            if code in codes:
                return code
        # Stopped on request, by processes that died of the signal.
        return 128 + (self._signal or signal.SIGTERM)


def _why(machine: SshMachine, within_s: float) -> str:
    """Return a machine's message about why it is not ready."""
    said = [line for line in machine.said if line.strip()][-3:]
    if machine.code is None:
        return ": ".join([f"Paceline has not come up there within {within_s:.0f} s", *said[-1:]])
    if not said:
        who = "ssh" if machine.code == LOST else "its shell"
        return f"{who} exited with {machine.code} and said nothing. Try: ssh {machine.name} true"
    advice = f"\n    Try: ssh {machine.name} true" if machine.code == LOST else ""
    return "\n    ".join(line.removeprefix("paceline: ").strip() for line in said) + advice


def _end_of(machine: SshMachine) -> str:
    if not machine.started:
        return f"{machine.name} did not join"
    if machine.code == LOST:
        return f"{machine.name} was lost: its ssh has ended"
    return f"{machine.name} failed, with exit code {machine.code}"


# --- ``--on ssh``: machines that are reached by OpenSSH's own client, so that ``~/.ssh/config`` holds ---


@dataclass(frozen=True, kw_only=True)
class SshOptions:
    """Which machines, and how they are reached."""

    hosts: str | None = option("Machines and their processes, such as a:2,b:2, or a file with one per line.")
    user: str | None = option("User name on the machines. Default: from ssh's configuration.")
    ssh_option: tuple[str, ...] = option("An option for ssh's -o, such as Port=2222; may be repeated.", ())
    setup: tuple[str, ...] = option("Shell line to run first, on each machine; may be repeated.", ())
    connect_timeout: int = option("Seconds for each machine to answer. Default: 10.", 10)
    lost_after: int = option("Seconds of silence after which a connection counts as lost. Default: 60.", 60)

    def __post_init__(self) -> None:
        for name in ("connect_timeout", "lost_after"):
            at_least(name, getattr(self, name), 1)
        for text in self.ssh_option:
            require_form("--ssh-option", ".*=.*", text, "NAME=VALUE, such as Port=2222")

    @property
    def machines(self) -> tuple[Host, ...]:
        """The hosts, read from where they are."""
        if self.hosts is None:
            raise ConfigError("--on ssh needs --hosts, such as --hosts node0:2,node1:2, or a file of hosts.")
        return read_hosts(self.hosts)


class Ssh(MachinesLauncher):
    """One ssh a machine, for as long as the job lasts."""

    name = "ssh"
    rank_launchers = ("torchrun", "spawn", "agent")

    def resolve_sizes(
        self, nodes: tuple[int, int], nproc: tuple[int, ...] | None, options: SshOptions | None
    ) -> tuple[tuple[int, int], tuple[int, ...] | None]:
        return nodes_of((options or SshOptions()).machines, nodes, nproc)

    def render(self, spec: LaunchSpec, options: SshOptions | None = None) -> RenderedJob:
        """Render one ssh for each machine, and the script that it sends there."""
        options = options or SshOptions()
        refuse_unsupported(spec, self.name, resources=True, walltime=True)
        hosts = options.machines[: spec.nodes[1]]
        if len(hosts) < spec.nodes[0]:
            raise ConfigError(f"--nodes {spec.nodes[0]} needs as many hosts, but --hosts names {len(hosts)}.")
        commands = tuple(
            Command(
                title=f"{host.name}; its processes end with the script's input, which stays open",
                argv=_ssh(host, options),
                stdin=_script(spec, hosts, node_rank, options),
            )
            for node_rank, host in enumerate(hosts)
        )
        return RenderedJob(spec=spec, options=options, commands=commands, request=hosts)

    def submit(self, rendered: RenderedJob) -> JobHandle:
        """Connect to each machine, then start the command on each.

        Raises:
            LaunchError: some cannot be reached or lack something; all of them are named, and nothing runs.
        """
        spec, options = rendered.spec, rendered.options
        least, most = spec.nodes
        rejoining: dict[int, Command] = {}
        if spec.outlives_nodes and least < most:
            # Preflight is for the job's first nodes. Of torchrun's machines the first one has its store, and is needed.
            later = self.render(replace(spec, preflight=()), options).commands
            rejoining = {n: command for n, command in enumerate(later) if n or spec.rank_launcher == "agent"}
        job = SshJob(
            names=[host.name for host in rendered.request],
            commands=rendered.commands,
            outlives_machines=spec.outlives_nodes,
            connect_timeout_s=options.connect_timeout,
            heartbeat_s=options.lost_after / 4,
            least=least if rejoining and not spec.preflight else None,
            rejoining=rejoining,
        )
        return ForegroundJob(job, spec.directory)


def _ssh(host: Host, options: SshOptions) -> tuple[str, ...]:
    settings = (
        *options.ssh_option,  # of two, ssh takes the first
        "BatchMode=yes",
        f"ConnectTimeout={options.connect_timeout}",
        f"ServerAliveInterval={max(1, options.lost_after // 3)}",
        "ServerAliveCountMax=3",
        # A connection of the user's own may be shared, but none is left behind.
        "ControlMaster=no",
        "ClearAllForwardings=yes",
    )
    words = [word for setting in settings for word in ("-o", setting)]
    user = ("-l", options.user) if options.user is not None else ()
    # Whatever the login shell is, it understands this; and what follows is seen in no list of processes.
    return ("ssh", "-T", *words, *user, host.name, "exec sh")


def _script(spec: LaunchSpec, hosts: tuple[Host, ...], node_rank: int, options: SshOptions) -> str:
    """Return the input of a machine's shell."""
    variables = {
        NODE_RANK: str(node_rank),
        NODES: str(len(hosts)),
        HOSTS: ",".join(host.reached_at for host in hosts),
        JOB_ID: f"{spec.name}-{hashlib.sha256(str(spec.directory).encode()).hexdigest()[:8]}",
        **spec.env,
    }
    python, workdir = shlex.quote(spec.python), shlex.quote(str(spec.workdir))
    remote = ["-P", "-m", "paceline.launch.ssh_remote", "--silence", str(options.lost_after)]
    if spec.run is not None and len(hosts) > 1:
        remote += ["--shared", str(spec.directory)]
    no_directory = shlex.quote(
        f"paceline: there is no directory {spec.workdir}, where the command should run. The machines of a job "
        "must share it: start from one that they all have."
    )
    no_paceline = shlex.quote(
        f"paceline: {spec.python} is not a Python with Paceline. Install it there, in the same version; "
        "paceline launch takes another interpreter as --python."
    )
    lines = [
        f"cd {workdir} 2>/dev/null || {{ echo {no_directory} >&2; exit 2; }}",
        # A shell that reads its commands from its input must not have that eaten.
        *(f"{{ {line}\n}} </dev/null || exit" for line in options.setup),
        *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
        f"{python} -c 'import paceline.launch' </dev/null || {{ echo {no_paceline} >&2; exit 2; }}",
        f"exec {python} {shlex.join([*remote, '--', *node_command(spec)])}",
    ]
    return "".join(f"{line}\n" for line in lines)
