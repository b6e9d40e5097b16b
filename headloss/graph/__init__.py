"""The compiled form of a call."""
