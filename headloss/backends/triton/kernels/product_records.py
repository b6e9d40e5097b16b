"""The argument records of the head's matrix products and of the kernels around them; see records.py.

Separate arguments are sizes, pointers whose alignment Triton need not know, descriptors, and those that may be None.
"""

from __future__ import annotations

from collections import namedtuple
from typing import NamedTuple

from headloss.backends.triton.kernels.records import Flag

# Where they read and write
ReadAt = namedtuple("ReadAt", "target multiplier reference")
HiddenAt = namedtuple("HiddenAt", "out factors shares constants weight")
GatherAt = namedtuple("GatherAt", "hidden weight copy targets multiplier logit reference")
FinishAt = namedtuple("FinishAt", "node targets logit reference out lse logprob top far")
LiveAt = namedtuple("LiveAt", "far counts tiles gaps sources ranks")
FactorAt = namedtuple(
    "FactorAt",
    "hidden counts gaps ranks targets multiplier reference lse logprob top factors bends shares constants "
    "numbers columns",
)

# What they are compiled for
TileFlags = namedtuple("TileFlags", "WANT_X WANT_Q TOTAL BEST")  # sums of tiles, besides S
GatherFlags = namedtuple("GatherFlags", "LISTED TARGET PER_ROW COPY BM BD")
FinishFlags = namedtuple("FinishFlags", "LISTED TARGET OUT PER_ROW STORED REBASED B")
RanksFlags = namedtuple("RanksFlags", "TARGET FIELDS TILE LEVELS B")  # where ranks share a vocabulary
PulledFlags = namedtuple("PulledFlags", "A B E C Y LISTED")  # the coefficients that rows have


class ProductFlags(NamedTuple):
    """Flags of the four products; each sets those it uses, and leaves the rest as they are here."""

    BM: Flag
    BN: Flag
    BK: Flag
    PROGRAMS: Flag
    GROUP: Flag = 1
    TARGET: Flag = False
    # read
    STORE: Flag = False
    RAGGED: Flag = False
    PIECES: Flag = 1
    WANT_X: Flag = False
    WANT_Q: Flag = False
    TOTAL: Flag = False
    BEST: Flag = False
    # the gradients
    CONSTANT: Flag = False
    OVERLAP: Flag = False
    WHOLE_TILES: Flag = False
    ADD: Flag = False
    PARTS: Flag = 2
