"""What mkdocs needs besides plain pages: links that leave docs/ find their file, and every fence is one it knows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files  # type: ignore[import-not-found,unused-ignore]

ROOT = Path(__file__).parent.parent
OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)")


def on_files(files: Files, config: Any) -> Files:
    """Files of the repository that a page links to become part of the site, at the place they have there."""
    wanted = {m[1] for page in (ROOT / "docs").glob("*.md") for m in OUTSIDE.finditer(page.read_text())}
    for name in sorted(wanted):
        if (ROOT / name).is_file():
            files.append(File.generated(config, _inside(name), abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    markdown = re.sub(r"^```python [\w-]+$", "```python", markdown, flags=re.MULTILINE)
    return OUTSIDE.sub(lambda m: f"]({_inside(m[1])}", markdown)


# Browsers start no workers for a page from the disk, and the search is one: it waits there, without an error.
FROM_DISK = """<script>if (location.protocol === "file:")
window.Worker = class extends EventTarget { postMessage() {} terminate() {} };</script>"""


def on_post_page(output: str, **_: Any) -> str:
    return output.replace("<head>", f"<head>{FROM_DISK}", 1)


def on_post_build(config: Any) -> None:
    """From the disk the theme reads the index as a script."""
    index = Path(config.site_dir) / "search" / "search_index.json"
    index.with_suffix(".js").write_text(f"var __index = {index.read_text()}")


def _inside(name: str) -> str:
    return f"files/{name}.txt" if name.endswith((".md", ".py")) else f"files/{name}"  # shown, not rendered or excluded
