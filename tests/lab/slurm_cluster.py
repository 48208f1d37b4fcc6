"""A Slurm cluster of three nodes for tests: real daemons on the machines of a lab.

``node0`` is where users log in and where the controller, munge and the accounting database run; ``node1``,
``node2`` and ``node3`` are compute nodes of 4 CPUs, 2 GPUs (two character devices) and 4000 MB each. Jobs run
as root in the partition ``main``; those of ``high`` preempt them, after 20 s of grace and with a requeue.

The fixture ``slurm_cluster`` gives it: :meth:`SlurmCluster.run` runs what users type, and
:meth:`SlurmCluster.wait_for` waits for jobs. Every process lives in the lab's namespaces, so that all of it
ends with the test process, however that ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.lab.machines import Lab, Node, NodeProcess

_CONF = """\
ClusterName=lab
SlurmctldHost=node0(10.77.0.1)
AuthType=auth/munge
AuthInfo=socket={base}/munge/sock,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool/%n
SlurmctldPidFile={base}/run/slurmctld.pid
SlurmdPidFile={base}/run/slurmd-%n.pid
SlurmctldLogFile={base}/log/slurmctld.log
SlurmdLogFile={base}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
ReturnToService=2
SlurmdTimeout=4
MessageTimeout=5
KillWait=2
MinJobAge=3600
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=10.77.0.1
AccountingStoragePass={base}/munge/sock
{nodes}
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""
_NODE_CONF = "NodeName={name} NodeAddr={address} CPUs=4 RealMemory=4000 Gres=gpu:2"
_GRES_CONF = "AutoDetect=off\nName=gpu File=/dev/null,/dev/zero\n"
_DBD_CONF = """\
DbdHost=node0
DbdAddr=10.77.0.1
AuthType=auth/munge
AuthInfo=socket={base}/munge/sock
SlurmUser=root
PidFile={base}/run/slurmdbd.pid
LogFile={base}/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=3306
StorageUser=slurm
StoragePass=slurm
"""
_DATABASE = """
CREATE DATABASE slurm_acct_db;
CREATE USER slurm@localhost IDENTIFIED BY 'slurm';
CREATE USER slurm@'127.0.0.1' IDENTIFIED BY 'slurm';
GRANT ALL ON slurm_acct_db.* TO slurm@localhost;
GRANT ALL ON slurm_acct_db.* TO slurm@'127.0.0.1';
"""
_ENDED = {
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "PREEMPTED",
    "OUT_OF_MEMORY",
    "DEADLINE",
}


class SlurmCluster:
    """A running cluster.

    Args:
        directory: for its state and logs; its path must leave room for that of a socket.
        accounting: whether there is a database, which ``sacct`` and submitit ask.

    Attributes:
        lab: the machines.
        login: where users type, and where the controller runs.
        nodes: the compute nodes.
        env: what a command needs in order to find the cluster; :meth:`run` and :meth:`start` set it.
        workdir: where commands run that say nothing else.
    """

    def __init__(self, directory: Path, *, accounting: bool = True) -> None:
        self.directory = directory
        self.workdir = directory
        self.accounting = accounting
        self.env = {"SLURM_CONF": str(directory / "slurm.conf")}
        self.lab = Lab(directory, 4)
        self.login, *self.nodes = self.lab.nodes
        self._daemons: dict[str, NodeProcess] = {}
        self._dead: set[str] = set()
        self._cut: set[str] = set()
        try:
            self._configure()
            self._start_munge()
            if accounting:
                self._start_database()
            self._daemon("slurmctld", self.login, "slurmctld", "-D", "-i")
            for node in self.nodes:
                self._daemon(node.name, node, "slurmd", "-D", "-N", node.name)
            self.wait_until_idle()
        except BaseException:
            self.end()
            raise

    def run(
        self,
        *argv: str | Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        node: Node | None = None,
        timeout_s: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, on the login node or another; ``env`` is added to the usual variables."""
        machine = node or self.login
        return machine.run(argv, env={**self.env, **(env or {})}, cwd=cwd or self.workdir, timeout_s=timeout_s)

    def start(
        self,
        *argv: str | Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        node: Node | None = None,
    ) -> NodeProcess:
        """Start a command there; what it prints is the process's ``text``."""
        machine = node or self.login
        return machine.start(argv, env={**self.env, **(env or {})}, cwd=cwd or self.workdir)

    def sbatch(self, *argv: str | Path, env: Mapping[str, str] | None = None) -> str:
        """Submit a job; return its number."""
        done = self.run("sbatch", "--parsable", *argv, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip().partition(";")[0]

    def state(self, job: str) -> str:
        """The state of a job, such as "RUNNING"; "" while it is not known."""
        done = self.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%T")
        return done.stdout.strip() if done.returncode == 0 else ""

    def show(self, job: str) -> dict[str, str]:
        """What ``scontrol show job`` says: ``{"JobState": "RUNNING", "Restarts": "0", ...}``."""
        done = self.run("scontrol", "-o", "show", "job", job)
        assert done.returncode == 0, done.stderr
        return dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)

    def wait_for(self, job: str, *states: str, timeout_s: float = 200) -> str:
        """Wait until a job is in one of these states; one that ends otherwise fails the test.

        Without states: until it has ended, however.
        """
        wanted = set(states) or _ENDED

        def there() -> bool:
            state = self.state(job)
            wrong = state in _ENDED and state not in wanted
            assert not wrong, f"job {job} is {state}, not {' or '.join(states)}\n{self.describe(job)}"
            return state in wanted

        self.wait_until(there, f"job {job} to be {' or '.join(sorted(wanted))}", timeout_s)
        return self.state(job)

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = 200) -> None:
        """Wait for a condition; past the limit the test fails, and shows the controller's log."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s\n{self.describe()}"
            time.sleep(0.05)

    def wait_until_idle(self) -> None:
        """Wait until every node can take a job."""

        def idle() -> bool:
            for name, daemon in self._daemons.items():
                assert daemon.poll() is None, f"{name} has ended\n{daemon.text}\n{self.describe()}"
            # Asked while the controller starts, sinfo tries for longer than that takes.
            listening = self.directory / "log" / "slurmctld.log"
            if not listening.exists() or "Running as primary controller" not in listening.read_text():
                return False
            done = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%T")
            return done.stdout.split() == ["idle"] * len(self.nodes)

        self.wait_until(idle, "idle nodes")

    def kill(self, node: Node) -> None:
        """Take a compute node's power: its processes are gone, and its network is silent."""
        node.cut()
        del self._daemons[node.name]
        node.kill()
        self._dead.add(node.name)

    def boot(self, node: Node) -> None:
        """Start a node again that was killed."""
        node.boot()
        self._dead.discard(node.name)
        self._cut.discard(node.name)
        self._daemon(node.name, node, "slurmd", "-D", "-N", node.name)

    def cut(self, node: Node) -> None:
        """Pull a compute node's cable; its processes live on."""
        node.cut()
        self._cut.add(node.name)

    def heal(self, node: Node) -> None:
        """Put the cable back."""
        node.heal()
        self._cut.discard(node.name)

    def restore(self) -> None:
        """End all jobs, and have all nodes idle again."""
        for node in self.nodes:
            if node.name in self._dead:
                self.boot(node)
            elif node.name in self._cut:
                self.heal(node)
        jobs = self.run("squeue", "-h", "-o", "%A").stdout.split()
        if jobs:
            self.run("scancel", "--signal=KILL", "--full", *jobs)
            self.run("scancel", *jobs)
        for machine in (self.login, *self.nodes):
            machine.end_processes(but_for=self._daemons.values())
        self.wait_until_idle()

    def describe(self, job: str | None = None) -> str:
        """What one wants to read after a failure."""
        log = self.directory / "log" / "slurmctld.log"
        lines = log.read_text(errors="replace").splitlines()[-25:] if log.exists() else []
        parts = ["--- slurmctld", *lines, "--- sinfo", self.run("sinfo", "-N", "-l").stdout]
        if job is not None:
            parts += ["--- job", self.run("scontrol", "show", "job", job).stdout]
        return "\n".join(parts)

    def end(self) -> None:
        """Kill all of it."""
        self.lab.end()

    def _configure(self) -> None:
        base = self.directory
        for name in ("munge", "state", "spool", "run", "log"):
            (base / name).mkdir(mode=0o755)
        nodes = "\n".join(_NODE_CONF.format(name=node.name, address=node.address) for node in self.nodes)
        conf = _CONF.format(base=base, nodes=nodes)
        if not self.accounting:
            conf = "".join(line for line in conf.splitlines(True) if not line.startswith("AccountingStorage"))
        (base / "slurm.conf").write_text(conf)
        (base / "gres.conf").write_text(_GRES_CONF)

    def _start_munge(self) -> None:
        munge = self.directory / "munge"
        (munge / "key").write_bytes(os.urandom(128))
        (munge / "key").chmod(0o400)
        files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
        self._daemon("munged", self.login, "munged", "--foreground", "--force", *files, f"--socket={munge}/sock")
        self.wait_until(lambda: (munge / "sock").exists(), "munged's socket")

    def _start_database(self) -> None:
        data, socket = self.directory / "db", self.directory / "run/db.sock"
        login = self.login
        made = login.run(
            [
                *("mariadb-install-db", "--no-defaults", "--auth-root-authentication-method=normal"),
                *("--skip-test-db", "--user=root", f"--datadir={data}"),
            ]
        )
        assert made.returncode == 0, made.stdout + made.stderr
        (self.directory / "database.sql").write_text(_DATABASE)
        self._daemon(
            *("mariadbd", login, "mariadbd", "--no-defaults", "--user=root", f"--datadir={data}"),
            *(f"--socket={socket}", "--bind-address=127.0.0.1", f"--pid-file={self.directory}/run/db.pid"),
        )
        ask = ("mariadb", "--no-defaults", f"--socket={socket}", "--user=root")
        self.wait_until(lambda: login.run([*ask, "-e", "select 1"]).returncode == 0, "mariadbd")
        done = login.run([*ask, "-e", f"source {self.directory / 'database.sql'}"])
        assert done.returncode == 0, done.stderr
        conf = self.directory / "slurmdbd.conf"
        conf.touch(mode=0o600)
        conf.write_text(_DBD_CONF.format(base=self.directory))
        self._daemon("slurmdbd", login, "slurmdbd", "-D")
        show = ("sacctmgr", "--noheader", "--immediate")
        self.wait_until(lambda: self.run(*show, "show", "cluster").returncode == 0, "slurmdbd")

    def _daemon(self, name: str, node: Node, *argv: str | Path) -> None:
        log = self.directory / "log" / f"{name}.out"
        self._daemons[name] = node.start(argv, env=self.env, log=log)


def why_not() -> str | None:
    """What this machine lacks for a cluster; None where it lacks nothing."""
    tools = ("slurmctld", "slurmd", "sbatch", "munged", "slurmdbd", "mariadbd", "mariadb-install-db")
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        return (
            f"a Slurm cluster needs {', '.join(missing)} (on Debian: apt-get install slurm-wlm munge "
            "slurmdbd slurm-wlm-mysql-plugin mariadb-server-core mariadb-client-core)"
        )
    return None
