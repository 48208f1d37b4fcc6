"""What every test gets: processes that end with their test, and a check that nothing leaks."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import util
from pathlib import Path
from types import ModuleType

import hypothesis
import psutil
import pytest
from tests.lab import sshd
from tests.lab.machines import Lab, Machines, Node, why_not
from tests.lab.slurm_cluster import SlurmCluster
from tests.lab.slurm_cluster import why_not as why_no_slurm
from tests.lab.warm_start import WarmStarts, is_template

from paceline.core.ownership import SHARED_MEMORY, remove_leftovers
from paceline.launch.local_run import bound_loopback_socket

# A shell starts what it runs in the background with SIGINT and SIGQUIT ignored, and every process of these tests
# would inherit that: Ctrl-C and Ctrl-\ could not be tried.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)

# A process without buffers writes a line in pieces, between which those of other processes fall.
os.environ.pop("PYTHONUNBUFFERED", None)

# A process that trains, and was started without a seed for its hashes, starts once more from nothing.
os.environ.setdefault("PYTHONHASHSEED", "0")

# TensorBoard reads files with TensorFlow where there is one, whose import takes long and sets variables.
sys.modules["tensorboard.compat.notf"] = ModuleType("tensorboard.compat.notf")

# Without a deadline: any moment may be a slow one. `make test-all` chooses the long profile.
hypothesis.settings.register_profile("short", max_examples=100, deadline=None)
hypothesis.settings.register_profile("long", max_examples=400, deadline=None)
hypothesis.settings.load_profile("short")

_shared_pids: set[int] = set()


def share(pid: int) -> None:
    """Let a process, and what it starts, outlive the test that it was started in; its fixture ends it."""
    _shared_pids.add(pid)


class Processes:
    """Starts commands; all of them, and all that they started, end with the test."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._started: list[subprocess.Popen[str]] = []
        self._ports: list[socket.socket] = []

    def free_port(self) -> int:
        """A port of loopback where these processes can listen; nobody else is given it until they end.

        Who listens there sets SO_REUSEADDR, as torch and Paceline do.
        """
        self._ports.append(bound_loopback_socket())
        port: int = self._ports[-1].getsockname()[1]
        return port

    def start(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        pass_fds: Sequence[int] = (),
        shared: bool = False,
    ) -> subprocess.Popen[str]:
        """Start a command in a process group of its own; its stdout and stderr are pipes.

        What is ``shared`` by several tests does not end with each of them.
        """
        popen = subprocess.Popen(
            [str(word) for word in argv],
            env={**os.environ, **(env or {})},
            cwd=cwd or self._directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            pass_fds=tuple(pass_fds),
        )
        self._started.append(popen)
        if shared:
            share(popen.pid)
        return popen

    def finish(self, popen: subprocess.Popen[str], *, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Wait for a command; past its limit, fail with all Python stacks of its ranks."""
        try:
            stdout, stderr = popen.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            stacks = _dump_stacks(popen)
            _kill_tree(popen)
            for writer in _writers_of(popen):
                writer.kill()
            stdout, stderr = popen.communicate()
            pytest.fail(f"{popen.args} took over {timeout_s} s.\n--- stdout\n{stdout}\n--- stderr\n{stderr}\n{stacks}")
        return subprocess.CompletedProcess(popen.args, popen.returncode, stdout, stderr)

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout_s: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        """Start a command and wait for it."""
        return self.finish(self.start(argv, env=env, cwd=cwd), timeout_s=timeout_s)

    def paceline(
        self, *arguments: str | Path, env: Mapping[str, str] | None = None, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run ``paceline ARGUMENTS``."""
        return self.run([sys.executable, "-m", "paceline", *arguments], env=env, timeout_s=timeout_s)

    def end_all(self) -> None:
        """Kill what still runs, and close the pipes."""
        for popen in self._started:
            _kill_tree(popen)
            for pipe in (popen.stdout, popen.stderr):
                if pipe is not None:
                    pipe.close()
        for reserved in self._ports:
            reserved.close()


@contextmanager
def processes_in(directory: Path) -> Iterator[Processes]:
    """Start commands in a directory, which end with the context."""
    processes = Processes(directory)
    try:
        yield processes
    finally:
        processes.end_all()


@pytest.fixture
def run_processes(tmp_path: Path) -> Iterator[Processes]:
    """Start commands under ``tmp_path``; see :class:`Processes`."""
    with processes_in(tmp_path) as processes:
        yield processes


@pytest.fixture(scope="module")
def module_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """The same for a whole module, whose tests look at what one run did."""
    with processes_in(tmp_path_factory.mktemp("module")) as processes:
        yield processes


@pytest.fixture(scope="session")
def session_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """The same for all tests, as of a server that many of them ask."""
    with processes_in(tmp_path_factory.mktemp("session")) as processes:
        yield processes


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    """Start machines that end with the test; see :mod:`tests.lab.machines`."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    labs: list[Lab] = []

    def start(count: int) -> list[Node]:
        directory = tmp_path / f"lab{len(labs)}"
        directory.mkdir()
        labs.append(Lab(directory, count))
        return labs[-1].nodes

    try:
        yield start
    finally:
        for lab in labs:
            lab.end()


_shared_labs: list[Lab] = []


@pytest.fixture(scope="session")
def _shared_slurm_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    reason = why_not() or why_no_slurm()
    if reason is not None:
        pytest.skip(reason)
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    _shared_labs.append(cluster.lab)
    try:
        yield cluster
    finally:
        cluster.end()
        _shared_labs.remove(cluster.lab)


@pytest.fixture
def slurm_cluster(_shared_slurm_cluster: SlurmCluster, tmp_path: Path) -> Iterator[SlurmCluster]:
    """A Slurm cluster of three idle nodes; it is started once, and each test has it for itself.

    Commands run in ``tmp_path``. What a test leaves there is ended, and the nodes that it killed come back.
    """
    cluster = _shared_slurm_cluster
    cluster.workdir = tmp_path
    try:
        yield cluster
    finally:
        cluster.restore()


@pytest.fixture
def ssh_machines(machines: Machines, wait_until: Callable[..., None]) -> Callable[[int], sshd.SshLab]:
    """Start machines that reach each other by ssh; see :mod:`tests.lab.sshd`."""
    reason = sshd.why_not()
    if reason is not None:
        pytest.skip(reason)
    return lambda count: sshd.SshLab(machines(count)[0].lab, wait_until)


@pytest.fixture
def wait_until() -> Callable[..., None]:
    """Wait for a condition that another process brings about."""

    def wait(condition: Callable[[], object], what: str, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
            time.sleep(0.01)

    return wait


@pytest.fixture
def plain_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Be somebody whom permissions stop, as root is not; files in ``tmp_path`` are named from there."""
    monkeypatch.chdir(tmp_path)
    if os.geteuid() != 0:
        yield
        return
    tmp_path.chmod(0o777)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


# pytest's own, and what torch sets when an optimizer is first stepped, and accelerate when it is imported.
_SET_FOR_GOOD = {
    *("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "PYTORCH_NVML_BASED_CUDA_CHECK"),
    "HF_DEACTIVATE_ASYNC_LOAD",  # by paceline_lm.transformers
}


_warm_starts = WarmStarts(share)


OWN_FOLDERS = ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME")
"""Packages, records of jobs and what is trusted are the tests' own, not the user's."""

_temporary = Path(tempfile.mkdtemp(prefix="pt-"))  # short: names of sockets begin with it


def pytest_sessionstart(session: pytest.Session) -> None:
    """Where workers share the cores, threads that wait for each other can take a hundred times as long.

    The temporary directory of these processes distinguishes what they name from what another worker's do.
    """
    # Under nohup a test's processes would ignore the signal too; of a handler, those that are started know nothing.
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    if session.config.getoption("numprocesses", None):
        _warm_starts.close()  # a worker of xdist that was forked warm could not start a process from nothing
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    os.environ["TMPDIR"] = tempfile.tempdir = str(_temporary)
    os.environ |= {name: str(_temporary / name) for name in OWN_FOLDERS} | {"PACELINE_SITE_CONFIG": os.devnull}
    if "PYTEST_XDIST_WORKER" in os.environ:
        import torch

        torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool | None, bool | None]:
    """A test that is marked ``cold`` starts each process from nothing, and so do its fixtures."""
    cold = item.get_closest_marker("cold") or (item.config.getoption("--cold") and not item.get_closest_marker("warm"))
    with _warm_starts.resting() if cold else nullcontext():
        return (yield)


def pytest_sessionfinish() -> None:
    """Nothing outlives the tests."""
    _warm_starts.close()
    # After multiprocessing has removed its own folder there.
    util.Finalize(None, shutil.rmtree, (_temporary, True), exitpriority=-200)


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Fail a test that leaves a variable, a child process, a thread or a file in ``/dev/shm`` behind."""
    variables = dict(os.environ)
    threads = set(threading.enumerate())
    yield
    problems = []
    changed = {
        name
        for name in variables.keys() | os.environ.keys()
        if variables.get(name) != os.environ.get(name) and name not in _SET_FOR_GOOD
    }
    if changed:
        problems.append(f"environment variables: {sorted(changed)}")
        os.environ.clear()
        os.environ.update(variables)
    started = [t for t in threading.enumerate() if t not in threads and not t.daemon]
    for thread in started:
        thread.join(timeout=5.0)  # transformers does not wait for those with which it has loaded a model
    left = [t.name for t in started if t.is_alive()]
    if left:
        problems.append(f"threads: {left}")
    for child in _descendants():
        with suppress(psutil.NoSuchProcess):
            command = child.cmdline()
            # multiprocessing keeps these helpers for the interpreter's life. What the fork server
            # forks has its command line too, but not this process as its parent.
            helper = any("resource_tracker" in word for word in command) or (
                any("multiprocessing.forkserver" in word for word in command) and child.ppid() == os.getpid()
            )
            if not helper:
                problems.append(f"process {child.pid}: {command}")
                child.kill()
    shared_memory = [path.name for path in remove_leftovers() if path.parent == SHARED_MEMORY]
    if shared_memory:
        problems.append(f"files in /dev/shm: {shared_memory}")
    assert not problems, f"this test leaks {'; '.join(problems)}"


def _descendants() -> list[psutil.Process]:
    """What this process has started, but for labs and processes that several tests share."""
    shared = _shared_pids | {pid for lab in _shared_labs for pid in lab.pids()}
    found = []
    for child in psutil.Process().children():
        if child.pid in shared:
            continue
        if is_template(child):  # of a process that was killed while this one adopted orphans
            with suppress(psutil.NoSuchProcess):
                child.kill()
            with suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)
            continue
        found.append(child)
        with suppress(psutil.NoSuchProcess):
            found += children(child.pid, recursive=True)
    return found


def _tree(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _dump_stacks(popen: subprocess.Popen[str]) -> str:
    """Ask the processes of a tree for their stacks, and describe those that write none.

    Those that registered faulthandler on SIGUSR2 write into their own standard error, without taking part in anything
    that could be waited for; py-spy reads the stacks of the others. A tree that has ended and is waited for all the
    same has left its pipes to a process: that is described too.
    """
    described = []
    for process in list(filter(runs, _tree(popen.pid))) or _writers_of(popen):
        with suppress(OSError, psutil.NoSuchProcess):
            status = Path(f"/proc/{process.pid}/status").read_text()
            caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1], 16)
            if caught >> (signal.SIGUSR2 - 1) & 1:
                os.kill(process.pid, signal.SIGUSR2)
                continue
            shown = subprocess.run(
                [Path(sys.executable).with_name("py-spy"), "dump", "--nonblocking", "--pid", str(process.pid)],
                capture_output=True,
                text=True,
                timeout=30,
            )
            waits_in = Path(f"/proc/{process.pid}/wchan").read_text()
            described.append(
                f"--- process {process.pid}, {process.status()} in {waits_in}\n{shown.stdout}{shown.stderr}"
            )
    time.sleep(1)
    return "\n".join(described)


def _writers_of(popen: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes that hold the other end of a command's pipes."""
    pipes = {os.readlink(f"/proc/self/fd/{pipe.fileno()}") for pipe in (popen.stdout, popen.stderr) if pipe is not None}
    found = []
    for process in psutil.process_iter():
        with suppress(OSError):
            opened = {os.readlink(fd) for fd in Path(f"/proc/{process.pid}/fd").iterdir()}
            if opened & pipes and process.pid != os.getpid():
                found.append(process)
    return found


def children(pid: int, recursive: bool = False) -> list[psutil.Process]:
    """The children of a process, or all below it, but for the templates that processes are forked from."""
    return [each for each in psutil.Process(pid).children(recursive) if not is_template(each)]


def runs(process: psutil.Process | int) -> bool:
    """Whether a process, or one of that number, has not ended, of whomever it is the child."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(process) if isinstance(process, int) else process
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _kill_tree(popen: subprocess.Popen[str]) -> None:
    if popen.poll() is None:
        for process in _tree(popen.pid):
            with suppress(psutil.NoSuchProcess):
                process.kill()
    elif psutil.pid_exists(popen.pid):
        return  # its number is another's by now
    with suppress(ProcessLookupError):
        os.killpg(popen.pid, signal.SIGKILL)
    popen.wait()
