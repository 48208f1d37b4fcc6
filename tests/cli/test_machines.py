"""A battery of odd machines: on each, a user who is not root has an ordinary machine's bits, or one sentence.

Each machine is a set of namespaces of its own, in which the shell that arranges it has the rights of root; what the
user runs there has none.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_train import TASK
from tests.processes import OWN_FOLDERS

pytestmark = [pytest.mark.system, pytest.mark.cold]  # it needs namespaces of the kernel; and starting is what is odd

SEALING = """

@dataclass
class Sealing(Small):
    def loss(self, model, batch):
        if os.path.exists("seal"):
            open("sealing", "w").close()
            while not os.path.exists("sealed"):
                pass
        return super().loss(model, batch)
"""
NEW = (
    *("unshare", "--user", "--map-user=12345", "--map-group=12345", "--keep-caps"),
    *("--mount", "--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"),
)
ROOT = Path(__file__).parents[2]
CODE = shlex.quote(str(ROOT))
# The code may lie in /tmp itself.
BUILT = f"""ip link set lo up; mount --rbind {CODE} /media; mount --bind . /mnt; cd /mnt; mount -o remount,bind,ro /
for folder in /tmp /dev/shm; do mount -t tmpfs none $folder; done
[ -e {CODE} ] || {{ mkdir -p {CODE} && mount --rbind /media {CODE}; }}"""
USER = "exec setpriv --inh-caps=-all --ambient-caps=-all"
SRC = ROOT / "src"
SIZE = "--max-steps 3 --threads 1 --seed 3"
ONE = f'paceline train small.py:Small {SIZE} --nproc 1 --run-dir="$RUN"'
TWO = f'paceline train small.py:Small {SIZE} --nproc 2 --run-dir="$RUN"'
RESUME = """cp -r ended "$RUN.2"; rm -r "$RUN.2/result.json" "$RUN.2"/checkpoints/step-00000003-*
paceline resume "$RUN.2" --nproc 2; cat "$RUN.2"/result.json"""
AUDIT = "paceline audit ended"
RUNS = "paceline runs . | head -1"
EXPORT = "paceline export ended --name small"
PREDICT = "paceline predict small rows.csv --output predictions.csv"
SERVE = """paceline serve small --port 0 >served & until grep -q ready served; do kill -0 $! || exit; sleep 0.2; done
kill $!; wait $!"""
LAUNCH = "paceline launch --on spawn --nproc 2 -- true"
DOCTOR = "paceline doctor --nproc 2"


@dataclass(frozen=True)
class Machine:
    """What is odd about a machine, and what is run there.

    Attributes:
        name: says it.
        runs: the user's commands, for a shell.
        built: shell commands that make the machine, with the rights of root.
        shell: the user's shell commands before each.
        code: the exit code of the last.
        says: a pattern of its only line on stderr, if it fails.
    """

    name: str
    runs: tuple[str, ...]
    built: str = ""
    shell: str = ""
    code: int = 0
    says: str = ""


MACHINES = (
    # Whose user has no home, or one that takes nothing.
    Machine("a user without a name and a home", (EXPORT, PREDICT, SERVE, RUNS, LAUNCH), shell="unset HOME"),
    Machine("HOME=/, which cannot be written", (TWO, EXPORT, LAUNCH), shell="export HOME=/"),
    Machine("a read-only home", (ONE, EXPORT), "mount -t tmpfs -o ro none home"),
    Machine(
        "a full home",
        (ONE, EXPORT),
        "mount -t tmpfs -o size=64k none home; cat /dev/zero >home/all 2>/dev/null",
        code=1,
        says="No space left on device. Free some space",
    ),
    # Whose folders for temporary files and shared memory are not as usual.
    Machine("TMPDIR is missing", (TWO,), shell="export TMPDIR=$PWD/missing"),
    Machine("TMPDIR cannot be written", (TWO, DOCTOR), "mkdir -m 500 tight", "export TMPDIR=$PWD/tight"),
    Machine(
        "TMPDIR is full",
        (TWO,),
        "mkdir full; mount -t tmpfs -o size=64k none full; cat /dev/zero >full/all 2>/dev/null",
        "export TMPDIR=$PWD/full",
    ),
    Machine("TMPDIR is noexec", (TWO, EXPORT), "mount -o remount,noexec none /tmp", "export TMPDIR=/tmp"),
    Machine(
        "TMPDIR has 130 characters",
        (TWO,),
        shell="TMPDIR=$(printf /tmp/%0125d 0); export TMPDIR; mkdir -p $TMPDIR",
    ),
    Machine(
        "/tmp is read-only", (TWO, EXPORT), "mount -o remount,ro none /tmp", "unset TMPDIR TORCHINDUCTOR_CACHE_DIR"
    ),
    Machine(
        "/dev/shm has 64 KiB", (TWO, DOCTOR), "mount -o remount,size=64k none /dev/shm", code=1, says="64 KiB for 2"
    ),
    Machine("/dev/shm cannot be written", (TWO,), "mount -o remount,ro none /dev/shm"),
    Machine(
        "no /dev/shm",
        (TWO,),
        """mkdir dev; mount --rbind /dev dev; mount -t tmpfs none /dev
        for name in null zero full random urandom tty; do touch /dev/$name; mount --bind dev/$name /dev/$name; done""",
    ),
    # That limit a process.
    Machine("64 open files", (TWO, RESUME), shell="ulimit -n 64"),
    Machine("256 open files", (TWO,), shell="ulimit -n 256"),
    Machine("2 GiB of addresses", (ONE,), shell="ulimit -v 2097152"),
    Machine("files of at most 512 bytes", (ONE,), shell="ulimit -f 1", code=2, says="ulimit -f unlimited"),
    Machine(
        "no locked memory, an endless stack, one CPU",
        (TWO,),
        shell="ulimit -l 0; ulimit -s unlimited; taskset -cp 0 $$ >/dev/null",
    ),
    # Whose environment is another's.
    Machine("umask 077", (TWO, AUDIT), shell="umask 077"),
    Machine("umask 000", (ONE,), shell="umask 000"),
    Machine("LC_ALL=POSIX, without UTF-8", (TWO, RUNS), shell="export LC_ALL=POSIX PYTHONUTF8=0 PYTHONCOERCECLOCALE=0"),
    Machine("a locale that is not there", (TWO, AUDIT), shell="export LC_ALL=xx_YY.UTF-8 RUN=Übung"),
    Machine(
        "Python without assertions, byte code, the current directory",
        (TWO,),
        shell="export PYTHONOPTIMIZE=2 PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1 PYTHONHASHSEED=0",
    ),
    Machine("PYTHONWARNINGS=error", (TWO, EXPORT), shell="export PYTHONWARNINGS=error"),
    Machine(
        "a foreign PYTHONPATH, with a sitecustomize that prints",
        (TWO,),
        "mkdir site; echo 'print(\"hello\")' >site/sitecustomize.py; echo 'raise SystemExit(9)' >site/config.py",
        "export PYTHONPATH=$PWD/site",
    ),
    Machine(
        "unusual variables of libraries",
        (TWO,),
        shell="export CUDA_VISIBLE_DEVICES=nonsense OMP_NUM_THREADS=0 MALLOC_ARENA_MAX=1",
    ),
    Machine("OMP_NUM_THREADS=garbage, no GPU", (TWO,), shell="export CUDA_VISIBLE_DEVICES=-1 OMP_NUM_THREADS=garbage"),
    Machine("LD_PRELOAD of a library that is not there", (TWO,), shell="export LD_PRELOAD=/missing/libjemalloc.so"),
    Machine("RANK is left over", (TWO,), shell="export RANK=0", code=2, says="WORLD_SIZE is not set, but RANK=0"),
    Machine(
        "the shell of an allocation of Slurm",
        (TWO,),
        shell="export SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NNODES=2 SLURM_STEP_ID=0",
    ),
    # Whose kernel tells little.
    Machine("the processes of others are hidden", (TWO, RUNS), "mount -t proc -o hidepid=2 none /proc"),
    Machine("no /proc", (TWO,), "mount -t tmpfs -o ro none /proc", code=2, says="/proc, by which"),
    Machine("no /sys", (TWO,), "mount -t tmpfs -o ro none /sys"),
    # Whose network is not as usual.
    Machine("a name of 64 characters with _", (TWO,), "printf my_%061d 0 >/proc/sys/kernel/hostname"),
    Machine("no name", (TWO,), "printf '\\n' >/proc/sys/kernel/hostname"),
    Machine(
        "the name (none)",
        (TWO, "paceline train small.py:Small --on torchrun --nproc 2 --max-steps 3 --run-dir again"),
        "printf '(none)' >/proc/sys/kernel/hostname",
    ),
    Machine("no loopback, one process", (ONE,), "ip link set lo down"),
    Machine("no loopback, two processes", (TWO,), "ip link set lo down", code=2, says="loopback"),
    Machine("no loopback, doctor", (DOCTOR,), "ip link set lo down", code=2, says="ip link set lo up"),
    Machine("no IPv6", (TWO,), "echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6"),
    Machine(
        "dead proxies",
        (TWO,),
        shell="for p in http_proxy HTTPS_PROXY ALL_PROXY; do export $p=http://127.0.0.1:9; done",
    ),
    Machine("GLOO_SOCKET_IFNAME of no interface", (TWO,), shell="export GLOO_SOCKET_IFNAME=ib7"),
    # Whose terminal is none.
    Machine("stdin and stderr are closed", (f"{TWO} <&- 2>&-",)),
    Machine("stdout is a full disk", (f"{TWO} >/dev/full",)),
    Machine("nohup and setsid", (f"setsid -w {TWO}",), shell="trap '' INT HUP"),
    Machine(
        "SIGCHLD is ignored by the parent",
        (f"env --ignore-signal=CHLD {TWO}", "env --ignore-signal=CHLD paceline launch --on spawn --nproc 2 -- false"),
        code=1,
    ),
    Machine("a terminal of no columns", (ONE, RUNS), shell="unset TERM; export COLUMNS=0 NO_COLOR=1"),
    # Whose folders have unusual names, and owners.
    Machine(
        "a run below a link and ..",
        (TWO, RESUME),
        "mkdir -p far/away; ln -s far/away link",
        "export RUN='link/../a run'",
    ),
    Machine(
        "a newline, quotes and % in a name",
        (TWO, 'paceline audit "$RUN"'),
        shell="export RUN='it'\"'\"'s \"50%s\"\n{run}'",
    ),
    Machine(
        "a backup that is the run, behind a link",
        (f"{ONE} --backup-to link",),
        "mkdir far; ln -s far link",
        "export RUN=far",
        code=2,
        says="--backup-to link is inside of the run",
    ),
    Machine("a decomposed accent after a dash", (TWO, 'paceline audit -- "$RUN"'), shell="export RUN=-e\u0301"),
    Machine(
        "a sticky folder of another's",
        (TWO, RESUME),
        "[ $(stat -c %u sticky) = 65534 ] || exit 77",
        "RUN=sticky/run",
    ),
    Machine(
        "a disk that becomes read-only",
        (TWO.replace("Small", "Sealing"),),
        """mkdir disk; mount -t tmpfs none disk; touch seal
        (until [ -e sealing ]; do sleep 0.1; done; mount --bind -o ro disk disk; touch sealed) &""",
        "RUN=disk/run",
        code=1,
        says="Read-only file system.*no checkpoint of this run is on disk",
    ),
    # Whose clock, and whose files of Python, are odd.
    Machine("the year 1975", (ONE, AUDIT), shell="paceline() { faketime -f '@1975-03-01 12:00:00' paceline \"$@\"; }"),
    Machine("the year 2040", (TWO, AUDIT), shell="paceline() { faketime -f '@2040-03-01 12:00:00' paceline \"$@\"; }"),
    Machine(
        "a package that is read-only, without byte code",
        (TWO,),
        f"cp -r {SRC} src; find src -name __pycache__ | xargs -r rm -r; mount --bind -o ro src src",
        "export PYTHONPATH=$PWD/src",
    ),
    Machine(
        "a task in a read-only file behind a link",
        (TWO,),
        "mkdir tasks; mv small.py tasks/it.py; chmod 400 tasks/it.py; chmod 500 tasks; ln -s tasks/it.py small.py",
    ),
    Machine(
        "a task in a zip",
        (TWO.replace("small.py:", "small:"),),
        "python -m zipfile -c tasks.zip small.py; rm small.py",
        "export PYTHONPATH=tasks.zip",
    ),
)


ALWAYS = {
    "a user without a name and a home",
    "/tmp is read-only",
    "/dev/shm has 64 KiB",
    "64 open files",
    "a locale that is not there",
    "PYTHONWARNINGS=error",
    "RANK is left over",
    "no /proc",
    "stdout is a full disk",
    "SIGCHLD is ignored by the parent",
    "a newline, quotes and % in a name",
    "a disk that becomes read-only",
    "a task in a zip",
}
"""Code of our own deals with these; the others are slow tests."""


@pytest.fixture(scope="module")
def ordinary(module_processes: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """An ordinary machine's folder, with a run that ended, and the hash of the model."""
    folder = tmp_path_factory.mktemp("ordinary")
    (folder / "small.py").write_text(TASK.replace('split != "train"', 'split == "val"') + SEALING)
    (folder / "rows.csv").write_text("0,1,2,3,4,5,6,7\n" + "0.5,1,0,0,0,0,0,1\n" * 3)
    words = ("-m", "paceline", "train", "small.py:Small", *SIZE.split(), "--checkpoint-every", "1steps", "--nproc", "1")
    done = module_processes.run((sys.executable, *words, "--quiet", "--run-dir", "ended"), cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder, json.loads((folder / "ended/result.json").read_text())["model_sha256"]


@pytest.mark.parametrize(
    "machine",
    [
        pytest.param(machine, id=machine.name, marks=() if machine.name in ALWAYS else pytest.mark.slow)
        for machine in MACHINES
    ],
)
def test_what_ends_has_the_bits_of_an_ordinary_machine_and_what_does_not_says_why(
    machine: Machine, ordinary: tuple[Path, str], run_processes: Any, tmp_path: Path
) -> None:
    if (refused := run_processes.run((*NEW, "true"))).returncode:
        pytest.skip(f"namespaces are not allowed here: {refused.stderr}")
    here = tmp_path / "here"
    shutil.copytree(ordinary[0], here)
    for folder, mode in (("home", 0o700), ("temporary", 0o700), ("sticky", 0o1777)):
        (here / folder).mkdir()
        (here / folder).chmod(mode)
    if os.getuid() == 0:
        os.chown(here / "sticky", 54321, 54321)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    env = {"PATH": path, "HOME": "/mnt/home", "TMPDIR": "/mnt/temporary", "LC_ALL": "C.UTF-8", "RUN": "run"}
    without = (f"--unset={name}" for name in ("OMP_NUM_THREADS", "PYTHONHASHSEED", *OWN_FOLDERS))
    unset = ("env", *without, *(f"{name}={value}" for name, value in env.items()))
    for command in machine.runs:
        # The run may lie where only this machine sees it.
        user = f'{machine.shell}\n({command})\ncode=$?; cat -- "$RUN/result.json" 2>/dev/null; exit $code'
        built = f'{BUILT}\n{machine.built}\n{USER} sh -c "$USER_SHELL"'
        words = (*unset, f"USER_SHELL={user}", *NEW, "sh", "-c", built)
        done = run_processes.run(words, cwd=here, timeout_s=250)
        output = f"$ {command}\n--- exit code {done.returncode}, stdout\n{done.stdout}\n--- stderr\n{done.stderr}"
        if done.returncode == 77:
            pytest.skip("this machine cannot be made here")
        assert "Traceback" not in done.stdout + done.stderr, output
        assert set(re.findall(r'"model_sha256": "(\w+)"', done.stdout)) <= {ordinary[1]}, output
        assert done.returncode == (machine.code if command is machine.runs[-1] else 0), output
    if machine.says:
        assert re.search(machine.says, done.stdout + done.stderr), output
    if done.returncode == 0 and any("train" in command for command in machine.runs):
        assert ordinary[1] in done.stdout, output
