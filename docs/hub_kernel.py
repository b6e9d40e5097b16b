"""The package in the layout of Hugging Face `kernels`: `python docs/hub_kernel.py FOLDER` writes FOLDER/build/torch-*.

The loader imports a kernel under an id of its own, so that several versions can live in one process.  The copy
therefore calls itself, and its operators, by that id wherever the package says `headloss`.

    from kernels import get_local_kernel
    hl = get_local_kernel(Path(FOLDER))
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "headloss"
BACKENDS = ("cuda", "cpu")  # what the package is tested on
LEFT_OUT = ("cli", "__main__.py")  # nothing to call from a shell
OWN_NAME = re.compile(
    r"(?m)(?<=^from )headloss\b|(?<=^import )headloss\b"
    r"|(?<= from )headloss(?=[.\w]* import)|(?<= import )headloss(?= as)"
    r'|(?<=")headloss(?=\.")|(?<=")headloss(?=\.backends)|(?<=")headloss(?=::)|(?<=Library\(")headloss'
    r"|(?<=torch\.ops\.)headloss"
)


def files() -> list[Path]:
    """What goes along, in a fixed order."""
    found = (path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".pyi") or path.name == "py.typed")
    return sorted(path for path in found if path.relative_to(PACKAGE).parts[0] not in LEFT_OUT)


def export(folder: Path, version: int = 1) -> list[Path]:
    """Write one variant per backend; the folders written."""
    content = hashlib.sha256(b"".join(path.read_bytes() for path in files())).hexdigest()[:8]
    variants = []
    for backend in BACKENDS:
        name = f"_headloss_{backend}_{content}"
        variant = folder / "build" / f"torch-{backend}"
        shutil.rmtree(variant, ignore_errors=True)
        for path in files():
            copy = variant / path.relative_to(PACKAGE)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(OWN_NAME.sub(name, path.read_text()))
        about = {"id": name, "name": "headloss", "version": version, "license": "apache-2.0"}
        about |= {"python-depends": [], "backend": {"type": backend}}
        (variant / "metadata.json").write_text(json.dumps(about, indent=2) + "\n")
        variants.append(variant)
    return variants


if __name__ == "__main__":
    print(*export(Path(sys.argv[1])), sep="\n")
