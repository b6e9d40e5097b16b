"""The vocabulary over several ranks."""
