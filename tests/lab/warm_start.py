"""Fork Python processes from one that has imported torch, in place of starting each from nothing.

A process that trains imports for three seconds before it does anything; forking one that has imported takes
some fifty milliseconds. So :mod:`subprocess` forks each program of this interpreter that a test starts, and
those that such a program starts in turn: the launcher its agent, the server its replicas. All else
is as after ``exec``: a process of its own, whose parent is the one that started it, with the arguments,
environment, directory, descriptors, signals and limits that were asked for.

A *template* is such a process, one for each process that may start others::

    starter (pytest) ── its template ── (a moment) ── the new process ── its template
                 └───────── becomes its parent ──────────┘

The template forks a process that forks the new one and ends; the orphan goes to its nearest ancestor that
adopts orphans, which the starter does meanwhile (``PR_SET_CHILD_SUBREAPER``).

A program that is started on a node of :mod:`tests.lab.machines`, by ``nsenter``, is forked likewise: the process in
between enters the node's namespaces first.

What is odd about a start (another interpreter, ``-I``, a preload, limits) is left to ``exec``. A test that is
about starting, about memory or about what is imported is marked ``cold``.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import gc
import io
import json
import os
import platform
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from paceline.core import parent_death

_PATH = sys.path[1:]
_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 15, 36, 37
_TEMPLATE = "tests-template"
_TETHER = Path(parent_death.__file__).resolve()
_LONGEST = 1 << 19
_MOST_FDS = 64
_ROOM = "PACELINE_TESTS_ROOM_FOR_AN_ENVIRONMENT"
# These start no Python of their own: some count their children, and none needs a template.
START_NONE = frozenset(
    {
        "paceline.training.worker",
        "paceline_serving.fork_server",
        "paceline_serving.replica",
        "paceline_tune.trial",
    }
)

# What the interpreter and the libraries read once, as they are loaded.
_READ_AT_LOADING = (
    "LD_",
    "PYTHON",
    "MALLOC_",
    "GLIBC_",
    "LC_",
    "LANG",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "TORCHDYNAMO_",
)
_READ_LATER = {"PYTHONPATH", "PYTHONUNBUFFERED"}


@dataclass(frozen=True)
class Program:
    """What Python runs: ``kind`` is "module", "code" or "script"."""

    kind: str
    name: str
    arguments: Sequence[str]
    tether: Sequence[int] = ()  # a signal, and the process with whose end it comes
    unbuffered: bool = False  # ``-u``
    safe_path: bool = False  # ``-P``


@dataclass(frozen=True)
class Place:
    """Where a program runs, if not where its starter does: on a node, in a directory.

    Attributes:
        node: a process of it.
        namespaces: of the node, to be entered; the options of ``nsenter``.
    """

    node: int
    namespaces: Sequence[str]
    directory: str


CHANGE_DIRECTORY = ("sh", "-c", 'cd "$1" && shift && exec "$@"', "sh")
"""What runs a command elsewhere, given a directory and the command: ``nsenter`` leaves a process in its root."""


def parse_place(argv: Sequence[str]) -> tuple[Place | None, Sequence[str]]:
    """Where a command runs, and the command itself."""
    if not argv or argv[0] != "nsenter" or CHANGE_DIRECTORY[0] not in argv:
        return None, argv
    end = list(argv).index(CHANGE_DIRECTORY[0])
    directory = end + len(CHANGE_DIRECTORY)
    if tuple(argv[end:directory]) != CHANGE_DIRECTORY or "--pid" not in argv[:end]:
        return None, argv
    node, *namespaces = argv[1:end]
    return Place(int(node.removeprefix("--target=")), namespaces, argv[directory]), argv[directory + 1 :]


def parse(argv: Sequence[str]) -> Program | None:
    """The program of a command of this interpreter; None where it is one for ``exec``."""
    if not argv or argv[0] != sys.executable:
        return None
    words = list(argv[1:])
    before = len(words)
    while words and words[0] in ("-I", "-S"):
        del words[0]
    isolated = len(words) != before
    if len(words) >= 4 and Path(words[0]).resolve() == _TETHER:
        inner = parse(words[3:])
        if inner is None or inner.tether:
            return None
        return replace(inner, tether=(int(words[1]), int(words[2])))
    if isolated or not words:
        return None
    if words[0] in ("-u", "-P"):
        inner = parse([sys.executable, *words[1:]])
        if inner is None or inner.tether:
            return None
        return replace(inner, unbuffered=True) if words[0] == "-u" else replace(inner, safe_path=True)
    if words[0] == "-m" and len(words) > 1:
        return Program("module", words[1], words[2:])
    if words[0] == "-c" and len(words) > 1:
        return Program("code", words[1], words[2:])
    if not words[0].startswith("-") and words[0].endswith(".py"):
        return Program("script", words[0], words[1:])
    return None


@dataclass(frozen=True)
class _Start:
    """A request to a template; its descriptors come beside it."""

    program: Mapping[str, Any]
    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str]
    fds: Sequence[int]  # the numbers that the descriptors are to have
    new_session: bool
    group: int
    umask: int
    nice: int
    affinity: Sequence[int]
    namespaces: Sequence[str] = ()  # files under /proc
    ignored: Sequence[int] = field(default_factory=tuple)
    blocked: Sequence[int] = field(default_factory=tuple)


class Template:
    """The starter's end of a template of its own.

    Args:
        channel: connected to the template.
        env: the variables with which it was started.
    """

    def __init__(self, channel: socket.socket, env: Mapping[str, str]) -> None:
        self._channel = channel
        self._owner = os.getpid()
        self._env = dict(env)
        self._limits = _limits()
        self._place = (os.getpgid(0), os.getsid(0))
        self._turn = threading.Lock()

    def serves(self, env: Mapping[str, str]) -> bool:
        """Whether it can stand for a process with these variables, started here and now."""
        same = all(
            env.get(name) == self._env.get(name)
            for name in env.keys() | self._env.keys()
            if name.startswith(_READ_AT_LOADING) and name not in _READ_LATER
        )
        # It has the limits, group and session of when it was forked. A fork of the starter is not its parent.
        return (
            same
            and os.getpid() == self._owner
            and _limits() == self._limits
            and (os.getpgid(0), os.getsid(0)) == self._place
        )

    def start(self, start: _Start, descriptors: Sequence[int]) -> int | None:
        """Fork a process whose parent is this one; return its number. None where the template has ended."""
        answer = b""
        with self._turn, _adopting(), suppress(OSError):
            try:
                socket.send_fds(self._channel, [json.dumps(asdict(start)).encode()], list(descriptors))
                answer = self._channel.recv(64)
            except BaseException:
                self._channel.close()  # the answer would be taken for that to the next request
                raise
        return int(answer or 0) or None

    def fileno(self) -> int:
        """The descriptor of the connection to it."""
        return self._channel.fileno()

    def move_channel(self) -> None:
        """Use a high descriptor, out of the way of those that a program is started with."""
        high = fcntl.fcntl(self._channel, fcntl.F_DUPFD_CLOEXEC, 512)
        self._channel.close()
        self._channel = socket.socket(fileno=high)

    def close(self) -> None:
        """End the template; the processes that it has started keep running."""
        self._channel.close()


@contextmanager
def _adopting() -> Iterator[None]:
    """Meanwhile, orphans below this process become its children."""
    libc = ctypes.CDLL(None)
    before = ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def _limits() -> list[tuple[int, int]]:
    return [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")]


class WarmStarts:
    """Has :mod:`subprocess` fork Python processes from a template, which is started with the first of them.

    Args:
        started: called with the template's number.
    """

    def __init__(self, started: Callable[[int], None]) -> None:
        self._started = started
        self._template: Template | None = None
        self._popen: subprocess.Popen[bytes] | None = None
        self._exec = _ask_first(self._find)
        self._resting = 0

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Meanwhile, every process is started from nothing."""
        self._resting += 1
        try:
            yield
        finally:
            self._resting -= 1

    def close(self) -> None:
        """Start processes from nothing again; those that were forked keep running."""
        subprocess._fork_exec = self._exec  # type: ignore[attr-defined]
        if self._template is not None and self._popen is not None:
            self._template.close()
            self._popen.wait()

    def _find(self) -> Template | None:
        died = self._popen is not None and self._popen.poll() is not None
        if (self._template is None or died) and not self._resting:
            with self.resting():
                self._template = self._start()
        return None if self._resting else self._template

    def _start(self) -> Template:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), "x" * 8192],
                env={**env, _ROOM: "x" * 32768},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        self._started(self._popen.pid)
        if not ours.recv(64):
            self._popen.wait()
            raise RuntimeError("the process that the tests' processes are forked from has died; see above")
        return Template(ours, env)


def _ask_first(find: Callable[[], Template | None]) -> Any:
    """Have :mod:`subprocess` ask a template first; return what it asked before."""
    fork_exec = subprocess._fork_exec  # type: ignore[attr-defined]

    @functools.wraps(fork_exec)
    def fork(
        args: Sequence[str | bytes],
        executables: Sequence[bytes],
        close_fds: bool,
        pass_fds: Sequence[int],
        cwd: str | bytes | None,
        env: Sequence[bytes] | None,
        p2cread: int,
        p2cwrite: int,
        c2pread: int,
        c2pwrite: int,
        errread: int,
        errwrite: int,
        errpipe_read: int,
        errpipe_write: int,
        restore_signals: bool,
        start_new_session: bool,
        process_group: int,
        gid: int | None,
        gids: Sequence[int] | None,
        uid: int | None,
        umask: int,
        preexec_fn: object,
        *more: object,
    ) -> int:
        def from_nothing() -> int:
            return int(
                fork_exec(
                    *(args, executables, close_fds, pass_fds, cwd, env, p2cread, p2cwrite, c2pread, c2pwrite),
                    *(errread, errwrite, errpipe_read, errpipe_write, restore_signals, start_new_session),
                    *(process_group, gid, gids, uid, umask, preexec_fn, *more),
                )
            )

        words = [os.fsdecode(word) for word in args]
        place, words = parse_place(words)
        program = parse(words)
        if program is None or (place is None and list(executables) != [os.fsencode(sys.executable)]):
            return from_nothing()
        if not close_fds or preexec_fn or not restore_signals or umask != -1:
            return from_nothing()
        if any(value is not None for value in (gid, gids, uid)) or os.geteuid() != os.getuid():
            return from_nothing()
        directory = os.getcwd() if cwd is None else os.path.abspath(os.fsdecode(cwd))
        if place is not None:
            directory = place.directory
        variables = dict(os.environ) if env is None else dict(os.fsdecode(line).split("=", 1) for line in env)
        template = find()
        if template is None or not os.access(directory, os.X_OK) or not template.serves(variables):
            return from_nothing()
        wanted = {
            0: p2cread if p2cread >= 0 else 0,
            1: c2pwrite if c2pwrite >= 0 else 1,
            2: errwrite if errwrite >= 0 else 2,
            **{fd: fd for fd in pass_fds if fd > 2 and fd != errpipe_write},
        }
        start = _Start(
            program=asdict(program),
            argv=words,
            cwd=directory,
            env=variables,
            fds=list(wanted),
            new_session=bool(start_new_session),
            group=process_group,
            umask=_umask(),
            nice=os.nice(0),
            affinity=sorted(os.sched_getaffinity(0)),
            namespaces=() if place is None else _namespace_files(place),
            ignored=_ignored(),
            blocked=sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        )
        return template.start(start, list(wanted.values())) or from_nothing()

    subprocess._fork_exec = fork  # type: ignore[attr-defined]
    return fork_exec


def _namespace_files(place: Place) -> list[str]:
    names = {"--mount": "mnt"}
    return [f"/proc/{place.node}/ns/{names.get(option, option.removeprefix('--'))}" for option in place.namespaces]


def _umask() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    raise AssertionError("the kernel says no umask")


def _ignored() -> list[int]:
    # Popen restores these two, which Python ignores.
    restored = {signal.SIGPIPE, signal.SIGXFSZ}
    numbers = signal.valid_signals() - restored
    return sorted(number for number in numbers if signal.getsignal(number) is signal.SIG_IGN)


# --- the template's side ------------------------------------------------------------------------


def is_template(process: psutil.Process) -> bool:
    """Whether a process is one that others are forked from, or was it; one that has gone since counts as one."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.name() == _TEMPLATE)
    return True  # a template ends with its starter, between a listing and this question, too


def _set_name(name: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


class _Titles:
    """Where the kernel reads a process's arguments and environment, as ``ps`` shows them."""

    def __init__(self) -> None:
        words = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        self._arguments, arguments_end, self._variables, variables_end = map(int, words[45:49])
        self._rooms = arguments_end - self._arguments, variables_end - self._variables

    def write(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        arguments = b"".join(os.fsencode(word) + b"\0" for word in argv)[: self._rooms[0] - 1]
        # A rest of zeros would be read as that many empty arguments; this is one of blanks.
        ctypes.memmove(self._arguments, arguments.ljust(self._rooms[0] - 1) + b"\0", self._rooms[0])
        variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
        variables = variables[: self._rooms[1] - 2]
        ctypes.memmove(self._variables, variables.ljust(self._rooms[1], b"\0"), self._rooms[1])


def _preload() -> None:
    """Import what the processes of tests need sooner or later, and nothing that starts a thread."""
    import paceline.cli.train
    import paceline.launch.local_run  # noqa: F401
    from paceline.training.worker import preload

    preload()


class _Server:
    """A template: forks processes until its starter has gone. One thread, and no state."""

    def __init__(self, channel: socket.socket, titles: _Titles) -> None:
        self._channel, self._titles = channel, titles

    def serve(self) -> tuple[Program, Sequence[int]] | None:
        """Fork what is asked for; in the new process, return what it must run, and the signals it blocks."""
        while True:
            content, descriptors, _, _ = socket.recv_fds(self._channel, _LONGEST, _MOST_FDS)
            if not content:
                return None
            start = _Start(**json.loads(content))
            pid = self._fork(start.namespaces)
            if pid:
                program = Program(**start.program)
                if start.new_session:
                    # What the old group was sent meanwhile is not for this process: to ignore is to forget.
                    signal.signal(signal.SIGINT, signal.SIG_IGN)
                    os.setsid()
                elif start.group >= 0:
                    os.setpgid(0, start.group)
                starts_none = program.kind == "module" and program.name in START_NONE
                template = None if starts_none else self._divide(start)
                if starts_none or template is not None:
                    # Its template keeps the name by which tests leave it out of the children of this process.
                    _set_name(Path(start.argv[0]).name)
                    self._channel.send(str(pid).encode())
                    self._become(start, descriptors, template)
                    return program, start.blocked
            for descriptor in descriptors:
                os.close(descriptor)

    def _fork(self, namespaces: Sequence[str]) -> int:
        """Fork a child of this process's parent; return, in the child alone, its number as the parent knows it."""
        starter = os.getppid()
        outside = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            between = os.fork()
        except OSError:
            between = -1
        if between:
            os.close(outside)
            if between < 0 or os.waitpid(between, 0)[1]:
                self._channel.send(b"0")  # none could be forked; the starter may try with exec
            return 0
        try:
            between = os.getpid()
            _enter(namespaces)
            pid = os.fork()
        except OSError:
            os._exit(1)
        if pid:
            os._exit(0)
        # In another namespace this process has another number, and its parent none.
        pid = int(os.readlink("self", dir_fd=outside))
        while (parent := _parent_of(pid, outside)) == between:
            os.sched_yield()
        os.close(outside)
        if parent != starter:
            os._exit(1)  # the starter has died
        return pid

    def _divide(self, start: _Start) -> Template | None:
        """Fork a template for this new process, and return it; in the template itself, None."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        starter = os.getpid()
        if os.fork():
            theirs.close()
            return Template(ours, start.env)
        ours.close()
        self._channel.close()
        self._channel = theirs
        parent_death.die_with_parent(parent=starter)
        self._titles.write([_TEMPLATE], {})
        return None

    def _become(self, start: _Start, descriptors: Sequence[int], template: Template | None) -> None:
        """Be as a process that was started with ``exec``."""
        if template is not None:
            template.move_channel()
            _ask_first(lambda: template)
        self._channel.close()
        _renumber(dict(zip(start.fds, descriptors, strict=True)), keep=template)
        os.chdir(start.cwd)
        os.umask(start.umask)
        os.nice(start.nice - os.nice(0))
        os.sched_setaffinity(0, start.affinity)
        sys.orig_argv[:] = start.argv
        # First they are taken from where the titles are, to which the C library points.
        os.environ.clear()
        os.environ.update(start.env)
        self._titles.write(start.argv, start.env)
        time.tzset()
        tempfile.tempdir = None
        platform._uname_cache = None  # type: ignore[attr-defined]  # has the name of another node
        for number in signal.valid_signals() - {
            signal.SIGKILL,
            signal.SIGSTOP,
            signal.SIGPIPE,
            signal.SIGXFSZ,
        }:
            with suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_IGN if number in start.ignored else signal.SIG_DFL)
        if signal.SIGINT not in start.ignored:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.stdin = sys.__stdin__ = _text(0, "r", line_buffering=False)
        unbuffered = bool(start.program["unbuffered"] or start.env.get("PYTHONUNBUFFERED"))
        sys.stdout = sys.__stdout__ = _text(1, "w", unbuffered, line_buffering=os.isatty(1))
        sys.stderr = sys.__stderr__ = _text(2, "w", unbuffered, line_buffering=True, errors="backslashreplace")
        _seed_and_count(start)


def _enter(namespaces: Sequence[str]) -> None:
    """Enter namespaces, that of processes for what this process forks."""
    libc = ctypes.CDLL(None, use_errno=True)
    opened = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in namespaces]  # before /proc is another one
    for fd in opened:
        if libc.setns(fd, 0):
            raise OSError(ctypes.get_errno(), "cannot enter a namespace")
        os.close(fd)


def _parent_of(pid: int, proc: int) -> int:
    """The number of a process's parent, by an open directory of processes."""
    fd = os.open(f"{pid}/stat", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    try:
        return int(os.read(fd, 1024).rpartition(b")")[2].split()[1])
    finally:
        os.close(fd)


def _renumber(wanted: Mapping[int, int], keep: Template | None) -> None:
    """Give descriptors the numbers that are wanted, and close all others but a template's."""
    kept = -1 if keep is None else keep.fileno()
    above = 1 + max(kept, *wanted, *wanted.values())
    moved = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for number, fd in wanted.items()}
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd != kept and fd not in moved.values():
            with suppress(OSError):
                os.close(fd)
    for number, fd in moved.items():
        os.dup2(fd, number)
        os.close(fd)


def _text(fd: int, mode: str, unbuffered: bool = False, **options: Any) -> io.TextIOWrapper:
    # The interpreter's own, for its life.
    stream = open(fd, mode + "b", buffering=0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    text = io.TextIOWrapper(stream, encoding="utf-8", write_through=unbuffered, **options)
    text.mode = mode
    return text


def _seed_and_count(start: _Start) -> None:
    """What libraries take from the environment or from chance as they are loaded."""
    import numpy as np
    import torch

    np.random.seed()
    threads = start.env.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(threads) if threads.isdecimal() else len(start.affinity))


def _run(program: Program) -> None:
    if program.tether:
        number, parent = program.tether
        parent_death.die_with_parent(number, parent)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    of_kind = {"module": os.getcwd(), "code": "", "script": os.path.dirname(os.path.realpath(program.name))}
    first = [] if program.safe_path else [of_kind[program.kind]]
    python_path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [*first, *python_path, *(entry for entry in _PATH if entry not in python_path)]
    for entry in python_path:  # what the interpreter imports as it starts
        if (site := Path(entry) / "sitecustomize.py").exists():
            runpy.run_path(str(site))
            break
    sys.argv[:] = [{"module": "-m", "code": "-c", "script": program.name}[program.kind], *program.arguments]
    if program.kind == "module":
        sys.modules.pop(program.name, None)
        runpy._run_module_as_main(program.name)  # type: ignore[attr-defined]  # as the interpreter itself does
    else:
        where = "<string>" if program.kind == "code" else os.path.abspath(program.name)
        text = program.name if program.kind == "code" else Path(where).read_bytes()
        if program.kind == "script":
            main.__file__ = where
        exec(compile(text, where, "exec", dont_inherit=True), main.__dict__)


def _main(channel: int) -> None:
    # A template heeds none; those that a new process is sent reach it once it handles them as it should.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    _set_name(_TEMPLATE)
    titles = _Titles()
    import numpy  # noqa: F401  # whose threads end before a fork and begin again after it

    threads = len(os.listdir("/proc/self/task"))
    _preload()
    assert len(os.listdir("/proc/self/task")) == threads, "a fork would lack the threads that an import starts"
    gc.collect()
    gc.freeze()
    starter = socket.socket(fileno=channel)
    starter.send(b"ready")
    born = _Server(starter, titles).serve()
    os._exit(0 if born is None else _exit_code_of(*born))


def _exit_code_of(program: Program, blocked: Sequence[int]) -> int:
    """Run a program, and end as the interpreter does, but for freeing each object."""
    code = 0
    try:
        # What came before an interpreter handles it ends its process, without a traceback.
        on_interrupt = signal.getsignal(signal.SIGINT)
        if on_interrupt is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGINT, on_interrupt)
        _run(program)
    except SystemExit as exit_:
        if isinstance(exit_.code, int) or exit_.code is None:
            code = exit_.code or 0
        else:
            print(exit_.code, file=sys.stderr)
            code = 1
    except BaseException as error:
        # Without this file's frames, as if the program had been run by itself.
        traceback = error.__traceback__
        while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
            traceback = traceback.tb_next
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if not stream.closed:
                stream.flush()
        except OSError as error:
            with suppress(OSError):
                print(f"Exception ignored in: {stream}\n{type(error).__name__}: {error}", file=sys.stderr)
            code = 120
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return code & 0xFF


if __name__ == "__main__":
    _main(int(sys.argv[1]))
