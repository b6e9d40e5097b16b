"""An objective against dense float64 PyTorch."""
