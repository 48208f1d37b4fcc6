"""What --dry-run prints, compared whole; ssh is not asked for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.launch.launcher import LaunchSpec, get_launcher
from paceline.launch.ssh import SshOptions

SPEC = LaunchSpec(
    command=("python", "train.py", "--at", "{master_addr}"),
    name="train",
    directory=Path("/state/train-1"),
    workdir=Path("/home/my code"),
    nodes=(2, 2),
    nproc=(2,),
    env={"NOTE": "it's\nEND\n"},
    python="python",
)


def test_a_script() -> None:
    options = SshOptions(
        hosts="node0,me@node1",
        user="me",
        ssh_option=("Port=2222",),
        setup=(". /etc/profile.d/modules.sh",),
        lost_after=30,
    )
    rendered = get_launcher("ssh").render(SPEC, options)
    machine = """\
# {name}; its processes end with the script's input, which stays open
ssh -T -o Port=2222 -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=10 -o ServerAliveCountMax=3 \
-o ControlMaster=no -o ClearAllForwardings=yes -l me {name} 'exec sh' <<'END_'
cd '/home/my code' 2>/dev/null || {{ echo 'paceline: there is no directory /home/my code, where the command \
should run. The machines of a job must share it: start from one that they all have.' >&2; exit 2; }}
{{ . /etc/profile.d/modules.sh
}} </dev/null || exit
export PACELINE_NODE_RANK={rank}
export PACELINE_NODES=2
export PACELINE_HOSTS=node0,node1
export PACELINE_JOB_ID=train-484e2c5c
export NOTE='it'"'"'s
END
'
python -c 'import paceline.launch' </dev/null || {{ echo 'paceline: python is not a Python with \
Paceline. Install it there, in the same version; paceline launch takes \
another interpreter as --python.' >&2; exit 2; }}
exec python -P -m paceline.launch.ssh_remote --silence 30 -- \
python -P -m paceline.launch.node --rank-launcher torchrun --nodes 2 --nproc 2 -- \
python train.py --at '{{master_addr}}'
END_
"""
    assert rendered.text == "\n".join(
        machine.format(name=name, rank=rank) for rank, name in enumerate(("node0", "me@node1"))
    )


@pytest.mark.integration
def test_a_task(tmp_path: Path) -> None:
    """By the command line, where there is no ssh."""
    command = [sys.executable, "-m", "paceline", "train", "fashion-mnist", "--on", "ssh"]
    options = ["--hosts", "node0:2,node1:2", "--run-dir", "a", "--dry-run"]
    done = subprocess.run(
        [*command, *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": "/none"},
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())
    last = [line for line in done.stdout.splitlines() if line.startswith("exec ")]
    assert last == 2 * [
        f"exec {sys.executable} -P -m paceline.launch.ssh_remote --silence 60 --shared {tmp_path}/a/job -- "
        f"{sys.executable} -P -m paceline.launch.node --rank-launcher agent --nodes 2 --nproc 2 -- "
        f"{sys.executable} -m paceline train fashion-mnist --run-dir {tmp_path}/a"
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "--on ssh needs --hosts"),
        ({"hosts": "a,b", "connect_timeout": 0}, "--connect-timeout must be at least 1"),
        ({"hosts": "a,b", "ssh_option": ("Port",)}, "--ssh-option must be NAME=VALUE"),
        ({"hosts": "a"}, "--nodes 2 needs as many hosts"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        get_launcher("ssh").render(SPEC, SshOptions(**options))


@pytest.mark.parametrize("nproc", [None, (2,)], ids=["auto", "2"])
def test_a_job_without_hosts_has_no_sizes(nproc: tuple[int, ...] | None) -> None:
    with pytest.raises(ConfigError, match="--on ssh needs --hosts"):
        get_launcher("ssh").resolve_sizes((1, 1), nproc, SshOptions())
