"""Losses as source of Triton."""
