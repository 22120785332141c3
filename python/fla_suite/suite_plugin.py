"""pytest plugin of run.py: refuses to run when the shim is not in force, and counts results by test function.

With pytest-xdist (run.py ... -n 8) each worker checks the shim; results come to the first process by themselves, and
what was left out, which only workers know, with their farewell.
"""

from __future__ import annotations

import collections
import json
import os
from typing import Any

import pytest
from sitecustomize import MODULE, NAMES

counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
reasons: dict[str, set[str]] = collections.defaultdict(set)


def pytest_collection_finish(session: pytest.Session) -> None:
    import importlib

    if not os.environ.get("GDN_DROPIN"):
        return
    module = importlib.import_module(MODULE)
    ours = importlib.import_module(os.environ["GDN_DROPIN"])
    holders = {MODULE: module, **{item.module.__name__: item.module for item in session.items}}
    for holder_name, holder in holders.items():
        for name in NAMES:
            if hasattr(holder, name) and getattr(holder, name) is not getattr(ours, name):
                pytest.exit(f"fla_suite: {holder_name}.{name} is not {ours.__name__}'s; the shim did not act", 4)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and not (report.when == "setup" and report.outcome != "passed"):
        return
    test = report.nodeid.split("::")[-1].split("[")[0]
    counts[test][report.outcome] += 1
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        reasons[test].add(report.longrepr[2].removeprefix("Skipped: "))


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        counts[item.nodeid.split("::")[-1].split("[")[0]]["left out"] += 1


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A worker of pytest-xdist has ended. All of them left out the same."""
    for test, count in getattr(node, "workeroutput", {}).get("left out", {}).items():
        counts[test]["left out"] = count


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = os.environ.get("GDN_DROPIN_RECORD")
    if hasattr(session.config, "workeroutput"):
        left_out = {test: count["left out"] for test, count in counts.items() if count["left out"]}
        session.config.workeroutput["left out"] = left_out
    elif path:
        record = {
            test: dict(count, **({"why": sorted(reasons[test])} if reasons[test] else {}))
            for test, count in counts.items()
        }
        with open(path, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=2)
            file.write("\n")
