"""Prints traced losses as Triton source."""
