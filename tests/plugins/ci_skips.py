"""A pytest plugin: in CI (``CI=true``) a test that is skipped is a test that failed.

What a developer's machine lacks is skipped there with its reason; CI installs everything, so
there a skip means that something was not tested and nobody would notice.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest


def in_ci() -> bool:
    """Whether skips are failures."""
    return os.environ.get("CI", "").lower() in ("true", "1")


def _fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    # An expected failure is reported as a skip, too; that one is meant.
    if report.outcome != "skipped" or "wasxfail" in vars(report):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"skipped in CI, where nothing may be skipped. {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skipped test into a failed one."""
    report = yield
    if in_ci():
        _fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn a file that skips itself into one that fails."""
    report = yield
    if in_ci():
        _fail_if_skipped(report)
    return report
