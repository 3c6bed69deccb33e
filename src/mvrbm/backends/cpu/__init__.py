"""Backends for the CPU: matrix products of whole batches, and the C code."""
