"""A pytest plugin: to which layer a test belongs, what it may cost, and in which order tests are run.

What a test uses decides its layer; ``-m LAYER`` selects one:

``system``
    bears the mark of a real system or of much training (``slurm``, ``docs``, ...; see ``SYSTEMS``), or uses a
    fixture that starts such a system (``SYSTEM_FIXTURES``);
``integration``
    starts processes (it uses one of ``PROCESS_FIXTURES``) or computes for longer; the latter is marked so;
``unit``
    all others.

A unit test should take at most one second, an integration test ten; on a busy machine more, by the load of each core.
The time in which a test could have run, and another process had the core, is not counted. The summary names the tests
that took longer. They do not fail: a slow machine must not reject a change. A unit test that starts a process fails.
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
    "monarch": "runs jobs on Monarch, here and on hosts that it is attached to",
    "mpi": "starts processes with mpirun",
    "horovod": "starts processes with horovodrun",
    "tensorflow": "trains with TensorFlow",
    "ssh": "starts processes through a real sshd",
    "k8s": "submits to a Kubernetes API server of its own",
    "aws": "uses moto's SageMaker or S3",
    "machines": "runs on machines in network namespaces of their own",
    "browser": "looks at pages in a real browser",
    "docs": "runs the code blocks of the documentation",
    "chaos": "trains under faults, and proves that nothing is lost",
    "matrix": "trains under many strategies or on many numbers of processes, and compares",
}
SYSTEM_FIXTURES = {"machines", "slurm_cluster", "ssh_machines", "ray_server", "reports"}
PROCESS_FIXTURES = {"run_processes", "module_processes", "session_processes"}
BUDGETS_S = {"unit": 1.0, "integration": 10.0}
# The files that take over a minute: were one of them begun last, a single worker would run it at the end.
LONG_FILES = (
    "plugins/ray/tests/test_ray.py",
    "plugins/tune/tests/test_population.py",
    "plugins/tune/tests/test_tune.py",
    "tests/docs/test_code_blocks.py",
    "tests/elastic/recovery_nodes/test_agents.py",
    "tests/elastic/recovery_nodes/test_network_file_system.py",
    "tests/launch/test_slurm.py",
    "tests/runs/test_owner_of_a_run.py",
)

_layer = pytest.StashKey[str]()
_started_processes: list[str] = []
_reported: set[str] = set()
_over_budget: dict[str, str] = {}
_OVER_BUDGET = "over_budget"


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
    """Mark each test with its layer; what takes long is run first, so that short tests fill the end."""
    for item in items:
        item.stash[_layer] = _layer_of(item)
        item.add_marker(item.stash[_layer])
    layers: dict[Path, set[str]] = {}
    for item in items:
        layers.setdefault(item.path, set()).add(item.stash[_layer])
    order = ("system", "integration", "unit")

    def place(item: pytest.Item) -> tuple[int, bool]:
        return min(map(order.index, layers[item.path])), item.nodeid.partition("::")[0] not in LONG_FILES

    items.sort(key=place)


def _layer_of(item: pytest.Item) -> str:
    marks = {mark.name for mark in item.iter_markers()}
    fixtures = set(getattr(item, "fixturenames", ()))
    if marks & {*SYSTEMS, "system"} or fixtures & SYSTEM_FIXTURES:
        return "system"
    return "integration" if "integration" in marks or fixtures & PROCESS_FIXTURES else "unit"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test of the fast layers, and compare it with the rules of its layer."""
    layer = item.stash[_layer]
    unlimited = item.get_closest_marker("slow") or any(map(item.config.getoption, ("usepdb", "--cold")))
    if layer == "system" or unlimited:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    _started_processes.clear()
    before_s = _waited_for_a_core_s()
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    over_budget = time_over(reports, layer, _waited_for_a_core_s() - before_s)
    if over_budget:
        reports[-1].user_properties.append((_OVER_BUDGET, over_budget))  # reaches the main process of xdist
    if layer == "unit" and _started_processes:
        _fail(reports, f"a unit test starts a process; mark it `integration`: {_started_processes[0]}")
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _waited_for_a_core_s() -> float:
    """The seconds that this thread was ready to run and did not; 0 where the kernel does not count them."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def _passed(reports: list[pytest.TestReport]) -> bool:
    return all(report.passed for report in reports)


def time_over(reports: list[pytest.TestReport], layer: str, waited_s: float = 0.0) -> str:
    """Name the phases that took longer than the layer's budget; return "" if there is none."""
    busy = max(os.getloadavg()[0], float(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))
    limit_s = BUDGETS_S[layer] * (1 + busy / len(os.sched_getaffinity(0)))
    slow = [f"{r.when} took {r.duration:.1f} s" for r in reports[:2] if r.duration - waited_s > limit_s]
    if not slow:
        return ""
    allowed = f"{BUDGETS_S[layer]:g} s, {limit_s:.1f} s at this load"
    return f"{' and '.join(slow)}; {layer} tests may take {allowed}"


def _fail(reports: list[pytest.TestReport], reason: str) -> None:
    if reason and _passed(reports):
        call = reports[1]
        call.outcome, call.longrepr = "failed", reason


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record the tests that ran, and those that were too slow, in whichever process."""
    _reported.add(report.nodeid)
    if _OVER_BUDGET in (properties := dict(report.user_properties)):
        _over_budget[report.nodeid] = str(properties[_OVER_BUDGET])


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Generator[None, None, None]:
    """In CI, leave nothing to be tried again where not every test was run: that is no unsteady test."""
    yield
    if hasattr(session.config, "workerinput") or not in_ci():
        return
    ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    has_cache = session.config.pluginmanager.hasplugin("cacheprovider")
    if has_cache and (not ended or len(_reported) < session.testscollected):
        session.config.cache.set("cache/lastfailed", {})


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Name the tests over their budget, and those that failed at first and passed when they were run again alone."""
    if _over_budget:
        terminalreporter.section("over the budget of their layer")
        for test, text in _over_budget.items():
            terminalreporter.line(f"{test}: {text}")
    second_try = config.getoption("lf", False) and config.getoption("last_failed_no_failures") == "none"
    if second_try and (passed := terminalreporter.stats.get("passed")):
        terminalreporter.section("unsteady: failed, and passed when run again alone")
        for report in passed:
            if report.when == "call":
                terminalreporter.line(report.nodeid)
