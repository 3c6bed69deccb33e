"""Execution paths: ways to compute the same updates, from the reference to fused GPU kernels."""
