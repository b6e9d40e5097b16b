"""How many examples: few and always the same ones by default, many and new ones with --slow.

$EXAMPLES says how many.  With $PROPERTIES set to a name, what was drawn is counted and written to
benchmarks/results/<name>.json.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "distill")]  # proof, teaching

BEGIN = time.monotonic()


def pytest_configure(config: pytest.Config) -> None:
    every = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
    if os.environ.get("HEADLOSS_NO_SHRINK"):  # where only whether a test fails is of interest
        every["phases"] = [Phase.explicit, Phase.generate]
    settings.register_profile("fast", max_examples=8, derandomize=True, **every)
    settings.register_profile("slow", max_examples=int(os.environ.get("EXAMPLES", "400")), print_blob=True, **every)
    settings.load_profile("slow" if config.getoption("--slow", False) else "fast")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    name = os.environ.get("PROPERTIES")
    if name:
        import drawn

        from proof.record import environment, write

        counted = {what: dict(sorted(counter.items())) for what, counter in drawn.TALLY.items()}
        slow = " --slow" if session.config.getoption("--slow") else ""
        many = f"EXAMPLES={os.environ['EXAMPLES']} " if "EXAMPLES" in os.environ else ""
        result = {
            "command": f"{many}PROPERTIES={name} python -m pytest tests/properties{slow}",
            **environment(),
            "minutes": round((time.monotonic() - BEGIN) / 60, 1),
            "tests": session.testscollected,
            "failed": session.testsfailed,
            "examples": sum(counted.get("examples", {}).values()),
            "drawn": counted,
        }
        write(name, result)
