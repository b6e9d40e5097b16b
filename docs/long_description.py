"""The README as a package index shows it: `python docs/long_description.py FOLDER` rewrites FOLDER/README.md in place.

Relative links lead nowhere there: they get the address of `[project.urls] Source` of pyproject.toml in front.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)]+)\)")


def rewritten(text: str, source: str) -> str:
    """The text with absolute links."""
    text = re.sub(r"<!-- /?[\w ]+ -->\n", "", text)
    text = re.sub(r"^```python \w+$", "```python", text, flags=re.MULTILINE)
    return LINK.sub(lambda m: f"[{m[1]}]({source.rstrip('/')}/blob/main/{m[2]})", text)


def main(folder: Path) -> None:
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    readme = folder / "README.md"
    readme.write_text(rewritten(readme.read_text(), project["urls"]["Source"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
