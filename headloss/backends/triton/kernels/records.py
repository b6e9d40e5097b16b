"""The argument records of kernels: pointers, numbers, and the flags that a kernel is compiled for.

Triton takes named tuples.  It compiles another kernel if an integer in a tuple is 1 or a multiple of 16, so sizes are
separate arguments; and its cache on disk tells kernels apart by the text of a flag, so printed functions are separate
arguments too.  A pointer that a kernel does not use is that of the logits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Flag = Any  # known when the kernel is compiled


class At(NamedTuple):
    """Where a visit reads and writes."""

    raw: Any
    out: Any
    target: Any
    found: Any  # (F, N)
    best: Any
    teacher: Any
    teacher_best: Any
    ids: Any
    sorted_ids: Any
    wide: Any  # (F, N, count)
    scratch: Any  # per row, where its ids are: see `row_loops.hide_ids`; or what its programs exchange


class SettleAt(NamedTuple):
    """Where settling reads and writes; see `settle.py`."""

    sums: Any
    found: Any
    best: Any
    teacher_best: Any
    rows: Any
    by_segment: Any


class Given(NamedTuple):
    """The numbers of a visit, or of settling; tuples have an entry per temperature, input, term or literal."""

    temperatures: Any
    teacher_temperatures: Any
    inputs: Any
    bases: Any
    factors: Any
    numbers: Any
    divergence_numbers: Any
    vocab: Any
    scale: Any
    cap: Any
    teacher_scale: Any
    teacher_cap: Any
    teacher_tails: Any = ()  # for a teacher on a larger vocabulary, its log-sum-exp over what the student lacks


class PullAt(NamedTuple):
    """Where a pull, or the second read of a teacher's rows, reads and writes."""

    raw: Any
    teacher: Any  # in a pull, one for each teacher
    rows: Any  # (F, N)
    out: Any


class PullGiven(NamedTuple):
    """The numbers of a pull; `temperatures`: see `PullFlags`."""

    temperatures: Any
    scale: Any
    cap: Any
    # per dense teacher and temperature of its comparison
    compared_temperatures: Any = ()
    teacher_temperatures: Any = ()
    numbers: Any = ()  # the literals of divergences
    # per dense teacher
    teacher_scales: Any = ()
    teacher_caps: Any = ()
    teacher_strides: Any = ()
    teacher_leads: Any = ()


class Flags(NamedTuple):
    """What a visit is compiled for; a tuple has an entry per temperature, unless noted otherwise."""

    # what is asked for
    KINDS: Flag  # per fact: see `row_outputs.py`
    SLOTS: Flag
    WIDE_SLOTS: Flag
    WIDE_REST: Flag  # per value, metric and cotangent, whether it has a value per id
    PICK: Flag
    TOTAL: Flag
    BEST: Flag
    WANT_X: Flag
    WANT_Q: Flag
    FINITE: Flag  # whether a logit is a factor in the sums
    A: Flag  # a teacher's included
    B: Flag
    E: Flag
    C: Flag
    Y: Flag
    FINITE_OUT: Flag  # whether a logit is a factor in the gradient
    # of a teacher
    DENSE: Flag
    COMPARED_AT: Flag  # the temperatures at which rows are compared with the teacher, by index
    COMPARISON: Flag  # the index among those, or -1
    COMPARED: Flag  # whether it is one of those of a dense teacher
    WHOLE: Flag  # whether its vocabulary is larger
    TEACHER_BEST: Flag
    WANT_Y: Flag
    WANT_F: Flag
    WANT_G: Flag
    TEACHER_FINITE: Flag
    TC: Flag
    TD: Flag
    DIVERGENCE_OF: Flag  # per fact, the index of its divergence in the second read, or -1
    DIVERGENCE_SUMS: Flag
    PULLED: Flag  # per divergence that pulls, its index
    PULLED_AT: Flag  # and the index of its temperature
    # of a sparse teacher
    IDS: Flag
    TAIL: Flag
    PULL_IDS: Flag
    PULL_TAIL: Flag
    # how it is called
    TARGET: Flag
    IGNORE: Flag
    GRADIENT: Flag
    PER_ROW: Flag
    TEACHER_PER_ROW: Flag
    INPUT_ROWS: Flag  # per input
    BASE_KINDS: Flag  # per term
    FACTOR_KINDS: Flag
    NUMBERS: Flag
    SCALED: Flag
    CAPPED: Flag
    TEACHER_SCALED: Flag
    TEACHER_CAPPED: Flag
    # how it lies in memory
    LINE: Flag
    VEC: Flag
    OUT_LINE: Flag
    OUT_VEC: Flag
    RAW_VEC: Flag  # of the logits, counted from the output's boundary
    TEACHER_VEC: Flag
    OUT_TEACHER_VEC: Flag
    SAME: Flag  # whether logits and gradient start on a line in the same columns
    UNCUT: Flag  # whether no vector belongs to two rows
    PAIRED: Flag  # whether two bfloat16 are read as one word
    TEACHER_PAIRED: Flag
    # how it is swept
    K: Flag
    L: Flag
    J: Flag
    AHEAD: Flag
    KEEP: Flag
    PARTS: Flag  # how many programs share a row; 0: none do
    PADDED: Flag  # a power of 2, at least as many
    SPAN: Flag  # how many blocks each of them has
    EXCHANGED: Flag  # how many numbers the programs of a row exchange


class SweepFlags(NamedTuple):
    """What a sweep over parts of rows is compiled for, and the merge of its parts; a tuple has an entry per
    temperature.  `how`, which comes with it, is scale and cap, and a teacher's."""

    PER_ROW: Flag
    SCALED: Flag
    CAPPED: Flag
    # what is asked for
    TARGET: Flag = False
    TOTAL: Flag = False
    BEST: Flag = False
    WANT_X: Flag = ()
    WANT_Q: Flag = ()
    TEACHER_BEST: Flag = False
    COMPARED: Flag = ()  # whether rows are compared with the teacher at this temperature
    WANT_Y: Flag = ()
    WANT_F: Flag = ()
    WANT_G: Flag = ()
    DIVERGENCE_SUMS: Flag = 0
    IDS: Flag = 0  # a power of 2, at least as many as a row's ids, which the sweep leaves out
    # of a teacher
    TEACHER_PER_ROW: Flag = ()
    TEACHER_SCALED: Flag = False
    TEACHER_CAPPED: Flag = False
    # how it lies in memory and is swept
    LINE: Flag = 1
    VEC: Flag = 1
    TEACHER_VEC: Flag = 1
    K: Flag = 1
    L: Flag = 1
    J: Flag = 1
    # how parts are merged
    PADDED: Flag = 1
    ROWS: Flag = 1
    CHAINED: Flag = False


class PullFlags(NamedTuple):
    """What a pull is compiled for; a tuple has an entry per softmax that pulls: the student's at a temperature, a
    tail's."""

    A: Flag
    B: Flag
    E: Flag
    C: Flag
    Y: Flag
    PER_ROW: Flag
    TARGET: Flag
    SCALED: Flag
    CAPPED: Flag
    # how it lies in memory
    WIDTH: Flag
    LINE: Flag
    VEC: Flag
    RAW_VEC: Flag
    BLOCK: Flag
    STAGES: Flag
    MAXIMA: Flag = False  # whether each has its own maximum
    # of dense teachers: an entry per teacher and temperature at which it pulls
    TEACHER_OF: Flag = ()  # the index of the teacher
    TA: Flag = ()
    TB: Flag = ()
    TC: Flag = ()
    TD: Flag = ()
    DIVERGENCES: Flag = ()  # per divergence, the index of its entry here
    COMPARED_PER_ROW: Flag = ()
    TEACHER_PER_ROW: Flag = ()
    # per dense teacher
    TEACHER_SCALED: Flag = ()
    TEACHER_CAPPED: Flag = ()
    TEACHER_VEC: Flag = ()


class SettleFlags(NamedTuple):
    """What settling is compiled for."""

    # what a program fixes
    SUMS: Flag  # how many sums each walk over the rows takes
    WIDE: Flag  # per sum, whether it is in float64
    KINDS: Flag  # per fact, as in a visit
    USED: Flag  # the temperatures that pull
    PRESENT: Flag  # per temperature, which of the five coefficients there are
    OF_SEGMENTS: Flag  # per term, whether it has a value per segment
    PICK: Flag
    TOTAL: Flag
    BEST: Flag
    BEST_SLOT: Flag  # the index of the argmax among a part's sums
    WANT_X: Flag  # per temperature
    WANT_Q: Flag
    TARGET: Flag  # whether a loss reads it
    # of dense teachers
    TEACHERS: Flag = False
    TEACHER_SLOT: Flag = 0  # the index of the teachers' first sum
    TEACHER_BEST: Flag = ()  # per teacher, whether its argmax is asked for
    BEST_OF: Flag = ()  # per fact that is an argmax, the index of its teacher among those
    JOINT: Flag = ()  # per teacher and temperature of its comparison, which of the six sums there are
    DIVERGENCES: Flag = 0  # divergences
    TEACHER_PULLS: Flag = ()  # which of the teachers' coefficients there are
    # how it is called
    GRADIENT: Flag = True
    PER_ROW: Flag = ()
    INPUT_ROWS: Flag = ()  # per input; 2: a value per segment
    BASE_KINDS: Flag = ()  # per term
    FACTOR_KINDS: Flag = ()
    MEANS: Flag = ()
    ORDERED: Flag = False
    RUNS: Flag = False  # runs of B rows each take the place of segments
    RANKS: Flag = False  # several ranks share the vocabulary
    IGNORE: Flag = False
    B: Flag = 1


class TakeFlags(NamedTuple):
    """What reading rows at some tokens is compiled for."""

    PER_ROW: Flag  # per temperature
    SCALED: Flag
    CAPPED: Flag
    VEC: Flag
    ROWS: Flag
    PART: Flag
    BLOCK: Flag


class TopFlags(NamedTuple):
    """What finding the likeliest columns is compiled for."""

    SCALED: Flag
    CAPPED: Flag
    LINE: Flag
    L: Flag
    J: Flag
    M: Flag
    B: Flag = 1
    G: Flag = 1
