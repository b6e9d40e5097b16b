"""The sweeps as Triton kernels."""
