"""``--on ssh``: machines that are reached by OpenSSH's own client, so that ``~/.ssh/config`` holds."""

from __future__ import annotations

import hashlib
import shlex
from dataclasses import dataclass

from paceline.distributed.environment import JOB_ID
from paceline.distributed.machine_place import HOSTS, NODE_RANK, NODES
from paceline.errors import ConfigError
from paceline.launchers.attached import AttachedJob, AttachedLauncher
from paceline.launchers.base import Command, JobHandle, JobSpec, Rendered, option
from paceline.launchers.hosts import Host, machines_of, read_hosts
from paceline.launchers.node import node_command
from paceline.launchers.refusals import refuse_restarts, refuse_walltime, refuse_what_is_for_clusters
from paceline.launchers.ssh.job import SshJob


@dataclass(frozen=True, kw_only=True)
class SshOptions:
    """Which machines, and how they are reached."""

    hosts: str | None = option("Machines and the processes on each, such as a:2,b:2; or a file of them.")
    user: str | None = option("Who to be on the machines. Default: as ssh's configuration says.")
    ssh_option: tuple[str, ...] = option("An option for ssh's -o, such as Port=2222; may be repeated.", ())
    setup: tuple[str, ...] = option("A shell line to run first on each machine; may be repeated.", ())
    connect_timeout: int = option("Seconds within which each machine must answer. Default: 10.", 10)
    lost_after: int = option("Seconds of silence after which either side is taken for lost. Default: 60.", 60)

    def __post_init__(self) -> None:
        for name in ("connect_timeout", "lost_after"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"--{name.replace('_', '-')} must be at least 1, but is {getattr(self, name)}."
                )
        for text in self.ssh_option:
            if "=" not in text:
                raise ConfigError(f"--ssh-option must be NAME=VALUE, such as Port=2222, but is {text!r}.")

    @property
    def machines(self) -> tuple[Host, ...]:
        """The hosts, read from where they are."""
        if self.hosts is None:
            raise ConfigError("--on ssh needs --hosts, such as --hosts node0:2,node1:2, or a file of hosts.")
        return read_hosts(self.hosts)


@dataclass(frozen=True, kw_only=True)
class RenderedSsh(Rendered):
    """A command for each machine, in the order of their ranks."""

    hosts: tuple[Host, ...]


class Ssh(AttachedLauncher):
    """One ssh a machine, for as long as the job lasts."""

    name = "ssh"
    inners = ("torchrun", "spawn", "agent")
    machines_given = True

    def sizes(
        self, nodes: tuple[int, int], nproc: tuple[int, ...] | None, options: SshOptions | None
    ) -> tuple[tuple[int, int], tuple[int, ...] | None]:
        """All hosts, with as many processes as their slots."""
        return machines_of((options or SshOptions()).machines, nodes, nproc)

    def render(self, spec: JobSpec, options: SshOptions | None = None) -> RenderedSsh:
        """Render one ssh for each machine, and the script that it sends there."""
        options = options or SshOptions()
        refuse_what_is_for_clusters(spec, self.name)
        refuse_walltime(spec, self.name)
        refuse_restarts(spec, self.name)
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
        return RenderedSsh(spec=spec, options=options, commands=commands, hosts=hosts)

    def submit(self, rendered: Rendered) -> JobHandle:
        """Reach all machines, then start the command on each.

        Raises:
            LaunchError: some cannot be reached or lack something; all of them are named, and nothing runs.
        """
        assert isinstance(rendered, RenderedSsh)
        spec, options = rendered.spec, rendered.options
        least, most = spec.nodes
        job = SshJob(
            names=[host.name for host in rendered.hosts],
            commands=rendered.commands,
            outlives_machines=spec.inner == "agent" or (spec.inner == "torchrun" and least < most),
            connect_timeout_s=options.connect_timeout,
            heartbeat_s=options.lost_after / 4,
        )
        return AttachedJob(job, spec.directory)


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


def _script(spec: JobSpec, hosts: tuple[Host, ...], node_rank: int, options: SshOptions) -> str:
    """What a machine's shell is sent."""
    variables = {
        NODE_RANK: str(node_rank),
        NODES: str(len(hosts)),
        HOSTS: ",".join(host.reached_at for host in hosts),
        JOB_ID: f"{spec.name}-{hashlib.sha256(str(spec.directory).encode()).hexdigest()[:8]}",
        **spec.env,
    }
    python, workdir = shlex.quote(spec.python), shlex.quote(str(spec.workdir))
    remote = ["-m", "paceline.launchers.ssh.remote", "--silence", str(options.lost_after)]
    if spec.run is not None and len(hosts) > 1:
        remote += ["--shared", str(spec.directory)]
    no_directory = shlex.quote(
        f"paceline: there is no directory {spec.workdir}, where the command is to run. The machines of a job "
        "must share it: start from one that they all have."
    )
    no_paceline = shlex.quote(
        f"paceline: {spec.python} is no Python that has Paceline. Install it there, in the same version; "
        "paceline launch takes another interpreter as --python."
    )
    lines = [
        f"cd {workdir} 2>/dev/null || {{ echo {no_directory} >&2; exit 2; }}",
        # A shell that reads its commands from its input must not have that eaten.
        *(f"{{ {line}\n}} </dev/null || exit" for line in options.setup),
        *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
        f"{python} -c 'import paceline.launchers' </dev/null || {{ echo {no_paceline} >&2; exit 2; }}",
        f"exec {python} {shlex.join([*remote, '--', *node_command(spec)])}",
    ]
    return "".join(f"{line}\n" for line in lines)
