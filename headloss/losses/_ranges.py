"""What an option may be: outside of its range a formula would mean something else, and would say nothing."""


def positive(**options):
    """Each that is given is above 0: `positive(beta=beta)`."""
    for name, value in options.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name}: wanted {name} > 0, got {value}")


def not_negative(**options):
    for name, value in options.items():
        if value is not None and not value >= 0:
            raise ValueError(f"{name}: wanted {name} >= 0, got {value}")


def share(**options):
    """Each is a part of a whole."""
    for name, value in options.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name}: wanted 0 <= {name} <= 1, got {value}")


def above_one(**options):
    for name, value in options.items():
        if value is not None and not value > 1:
            raise ValueError(f"{name}: wanted {name} > 1, got {value}")


def bounds(**options):
    """Two: one to hold something above, one to hold it below."""
    (lower, low), (higher, high) = options.items()
    if not low < high:
        raise ValueError(f"{lower}, {higher}: wanted {lower} < {higher}, got {low} and {high}")
