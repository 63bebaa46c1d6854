"""Under CI a skipped test counts as failed, unless its marker says it needs special hardware.

A skip that nobody sees is a test that nobody runs. Locally skips stay skips and are listed by -ra.
"""

import os

import pytest

EXCUSED = frozenset({"gpu", "io_uring"})


def _is_ci() -> bool:
    return os.environ.get("CI", "").lower() in {"1", "true"}


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def _fail(report: pytest.TestReport | pytest.CollectReport) -> None:
    report.longrepr = (
        f"{report.nodeid}: skipped under CI ({_reason(report)}); a test that a CPU can run may "
        f"not be skipped: make it run, or mark it {' or '.join(sorted(EXCUSED))}"
    )
    report.outcome = "failed"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    is_expected_failure = hasattr(report, "wasxfail")
    is_excused = any(item.get_closest_marker(name) for name in EXCUSED)
    if report.skipped and _is_ci() and not is_expected_failure and not is_excused:
        _fail(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """A module that skips itself while it is imported has no markers yet: never excused."""
    report = yield
    if report.skipped and _is_ci():
        _fail(report)
    return report
