"""`hl.verify`: check an objective against dense float64 PyTorch."""
