"""Text that every Python carries: the docstrings of its standard library.  No network, no files of our own."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor

MODULES = tuple(
    """
    argparse ast asyncio bisect calendar collections concurrent.futures configparser contextlib copy csv datetime
    decimal difflib doctest email enum fractions functools getopt gettext glob gzip hashlib heapq html http.client
    imaplib inspect io ipaddress itertools json logging mailbox math multiprocessing numbers operator optparse os
    pathlib pickle platform pprint profile queue random re sched secrets selectors shelve shlex shutil smtplib
    socket statistics string struct subprocess tarfile tempfile textwrap threading timeit tokenize traceback types
    typing unittest urllib.parse urllib.request uuid warnings weakref xml.etree.ElementTree zipfile
    """.split()  # noqa: SIM905
)


class Characters:
    """Printable ASCII and the newline as numbers, and back."""

    letters = "\n" + "".join(map(chr, range(32, 127)))
    size = len(letters)

    @classmethod
    def encode(cls, text: str) -> Tensor:
        number = {letter: i for i, letter in enumerate(cls.letters)}
        return torch.tensor([number[c] for c in text if c in number])

    @classmethod
    def decode(cls, tokens: Tensor) -> str:
        return "".join(cls.letters[i] for i in tokens.tolist())


def standard_library(modules: int = len(MODULES)) -> Tensor:
    """The docstrings of the first `modules` modules, their classes and their functions, as one row of characters."""
    found: dict[str, None] = {}
    for name in MODULES[:modules]:
        found.update(dict.fromkeys(_docstrings(importlib.import_module(name))))
    return Characters.encode("\n\n".join(found))


def _docstrings(module: ModuleType) -> Iterator[str]:
    yield inspect.cleandoc(module.__doc__ or "")
    for name, thing in sorted(vars(module).items()):
        if name.startswith("_") or getattr(thing, "__module__", None) != module.__name__:
            continue
        members = sorted(vars(thing).items()) if inspect.isclass(thing) else []
        for doc in (getattr(x, "__doc__", None) for x in (thing, *(m for n, m in members if not n.startswith("_")))):
            if isinstance(doc, str) and doc:
                yield inspect.cleandoc(doc)


class Batches:
    """Random windows of `length` + 1 characters; the last tenth of the text is held out."""

    def __init__(self, text: Tensor, length: int, size: int, seed: int) -> None:
        cut = len(text) * 9 // 10
        self.parts = {"train": text[:cut], "held out": text[cut:]}
        self.length, self.size = length, size
        self.random = torch.Generator().manual_seed(seed)

    def __call__(self, part: str) -> tuple[Tensor, Tensor]:
        text = self.parts[part]
        starts = torch.randint(len(text) - self.length - 1, (self.size, 1), generator=self.random)
        windows = text[starts + torch.arange(self.length + 1)]
        return windows[:, :-1], windows[:, 1:]
