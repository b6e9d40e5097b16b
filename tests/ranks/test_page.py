"""docs/parallelism.md runs, on two ranks: every block, in order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"


def snippets() -> int:
    text = PAGE.read_text()
    space: dict[str, Any] = {"__name__": "__page__"}
    blocks = list(re.finditer(r"^```python no-run\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    for m in blocks:
        exec(compile("\n" * text[: m.start(1)].count("\n") + m[1], str(PAGE), "exec"), space)
    return len(blocks)


def test_the_page_runs(ranks: Any) -> None:
    assert ranks(2, snippets) == [7, 7]
