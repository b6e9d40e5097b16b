"""Checks of the ranges of options, outside of which a formula would silently mean something else."""


def above(least, /, **options):
    """Check that each option that is not None is greater than `least`: `above(1, dual=dual)`."""
    for name, value in options.items():
        if value is not None and not value > least:
            raise ValueError(f"{name}: wanted {name} > {least}, got {value}")


def positive(**options):
    above(0, **options)


def not_negative(**options):
    for name, value in options.items():
        if value is not None and not value >= 0:
            raise ValueError(f"{name}: wanted {name} >= 0, got {value}")


def share(**options):
    """Check that each option lies in [0, 1]."""
    for name, value in options.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name}: wanted 0 <= {name} <= 1, got {value}")


def bounds(**options):
    """Check two options, a lower and an upper bound: `bounds(low=low, high=high)`."""
    (lower, low), (higher, high) = options.items()
    if not low < high:
        raise ValueError(f"{lower}, {higher}: wanted {lower} < {higher}, got {low} and {high}")
