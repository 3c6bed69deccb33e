"""Backends for GPUs: Triton kernels that compute whole epochs."""
