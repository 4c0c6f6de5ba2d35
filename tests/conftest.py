"""For all tests: how many wanted a GPU."""

from __future__ import annotations

import re

_GPU = re.compile(r"\b(GPU|CUDA|Hopper|Blackwell|H100|H200|B200|sm_\d+)", re.IGNORECASE)


def pytest_terminal_summary(terminalreporter):
    """One line that continuous integration reads: skipped tests whose mark or reason names a GPU."""
    skipped = terminalreporter.stats.get("skipped", [])
    # a module that is skipped as a whole is a report without keywords
    marked = [report for report in skipped if "gpu" in getattr(report, "keywords", ())]
    count = len(marked) + sum(1 for r in skipped if r not in marked and _GPU.search(str(r.longrepr)))
    terminalreporter.write_line(f"GPU tests skipped: {count} (no GPU here that they can run on)")
