"""A pytest plugin: to which layer a test belongs, what it may cost, and in which order tests are run.

What a test uses decides its layer; ``-m LAYER`` selects one:

``system``
    bears the mark of a real system or of much training (``slurm``, ``docs``, ...; see ``SYSTEMS``), or uses a
    fixture that starts such a system (``SYSTEM_FIXTURES``);
``integration``
    starts processes (it uses one of ``PROCESS_FIXTURES``) or computes for longer; the latter is marked so;
``unit``
    all others.

A unit test may take one second, an integration test ten; on a busy machine more, by the load of each core.
The time in which a test could have run, and another process had the core, is not counted. A test that takes
longer is measured once more, since any moment may be a slow one, and fails if it takes too long again; what
several tests share is there by then, and not counted. A unit test may not start a process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from tests.plugins.ci_skips import in_ci

SYSTEMS = {
    "slurm": "runs jobs on a Slurm cluster of its own",
    "ray": "runs jobs on Ray",
    "mpi": "starts processes with mpirun",
    "horovod": "starts processes with horovodrun",
    "tensorflow": "trains with TensorFlow",
    "ssh": "starts processes through a real sshd",
    "k8s": "submits to a Kubernetes API server of its own",
    "aws": "submits to moto's SageMaker",
    "machines": "runs on machines in network namespaces of their own",
    "browser": "looks at pages in a real browser",
    "docs": "runs the code blocks of the documentation",
    "chaos": "trains under faults, and proves that nothing is lost",
    "matrix": "trains under many strategies or on many numbers of processes, and compares",
}
SYSTEM_FIXTURES = {"machines", "slurm_cluster", "ssh_machines", "ray_server", "reports"}
PROCESS_FIXTURES = {"run_processes", "module_processes", "session_processes"}
BUDGETS_S = {"unit": 1.0, "integration": 10.0}

_layer = pytest.StashKey[str]()
_started_processes: list[str] = []
_reported: set[str] = set()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let all tests be ``cold``."""
    parser.addoption("--cold", action="store_true", help="start each process from nothing, in every test")


def pytest_configure(config: pytest.Config) -> None:
    """Name the marks, for ``--strict-markers``."""
    for name, meaning in SYSTEMS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    config.addinivalue_line("markers", "unit: starts no process (no test needs this mark: it is found)")
    config.addinivalue_line("markers", "integration: starts processes")
    config.addinivalue_line("markers", "system: needs a real system, or trains a lot")
    sys.addaudithook(_note_process)  # for good: Python has no way to take one back
    _note_multiprocessing()


def _note_process(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"):
        _started_processes.append(" ".join(map(str, arguments[:2])))


def _note_multiprocessing() -> None:
    # What it starts raises no audit event.
    start = BaseProcess.start

    def noted(process: BaseProcess) -> None:
        _started_processes.append(repr(process))
        start(process)

    BaseProcess.start = noted  # type: ignore[assignment]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its layer; what starts processes is run first, so that short tests fill the end."""
    for item in items:
        item.stash[_layer] = _layer_of(item)
        item.add_marker(item.stash[_layer])
    layers: dict[Path, set[str]] = {}
    for item in items:
        layers.setdefault(item.path, set()).add(item.stash[_layer])
    order = ("system", "integration", "unit")
    items.sort(key=lambda item: min(map(order.index, layers[item.path])))


def _layer_of(item: pytest.Item) -> str:
    marks = {mark.name for mark in item.iter_markers()}
    fixtures = set(getattr(item, "fixturenames", ()))
    if marks & {*SYSTEMS, "system"} or fixtures & SYSTEM_FIXTURES:
        return "system"
    return "integration" if "integration" in marks or fixtures & PROCESS_FIXTURES else "unit"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test of the fast layers, and hold it to what these promise."""
    layer = item.stash[_layer]
    unlimited = item.get_closest_marker("slow") or any(map(item.config.getoption, ("usepdb", "--cold")))
    if layer == "system" or unlimited:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    _started_processes.clear()
    reports, waited_s = _run_once(item, nextitem)
    if _passed(reports) and time_over(reports, layer, waited_s):
        again, waited_s = _run_once(item, nextitem)
        if _passed(again):  # what cannot be run twice has passed once
            reports = again
            _fail(reports, time_over(reports, layer, waited_s))
    if layer == "unit" and _started_processes:
        _fail(reports, f"a unit test starts a process; mark it `integration`: {_started_processes[0]}")
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _run_once(item: pytest.Item, nextitem: pytest.Item | None) -> tuple[list[pytest.TestReport], float]:
    """Run a test; return its reports, and for how many seconds of it another process had the core."""
    before_s = _waited_for_a_core_s()
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    return reports, _waited_for_a_core_s() - before_s


def _waited_for_a_core_s() -> float:
    """The seconds that this thread was ready to run and did not; 0 where the kernel does not count them."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def _passed(reports: list[pytest.TestReport]) -> bool:
    return all(report.passed for report in reports)


def time_over(reports: list[pytest.TestReport], layer: str, waited_s: float = 0.0) -> str:
    """What took longer than the layer allows; empty where nothing did."""
    busy = max(os.getloadavg()[0], float(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))
    limit_s = BUDGETS_S[layer] * (1 + busy / len(os.sched_getaffinity(0)))
    slow = [f"{r.when} took {r.duration:.1f} s" for r in reports[:2] if r.duration - waited_s > limit_s]
    if not slow:
        return ""
    allowed = f"{BUDGETS_S[layer]:g} s, {limit_s:.1f} s at this load"
    return f"{' and '.join(slow)}, and that twice; {layer} tests may take {allowed}"


def _fail(reports: list[pytest.TestReport], reason: str) -> None:
    if reason and _passed(reports):
        call = reports[1]
        call.outcome, call.longrepr = "failed", reason


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note which tests were run, in whichever process."""
    _reported.add(report.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Generator[None, None, None]:
    """In CI, leave nothing to be tried again where not every test was run: that is no unsteady test."""
    yield
    if hasattr(session.config, "workerinput") or not in_ci():
        return
    ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    if not ended or len(_reported) < session.testscollected:
        session.config.cache.set("cache/lastfailed", {})


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Name what failed at first, and passed when it was run again alone."""
    second_try = config.getoption("lf") and config.getoption("last_failed_no_failures") == "none"
    if second_try and (passed := terminalreporter.stats.get("passed")):
        terminalreporter.section("unsteady: failed, and passed when run again alone")
        for report in passed:
            if report.when == "call":
                terminalreporter.line(report.nodeid)
