"""Backends compute updates. `reference` defines the update, and tests compare all other backends with it.

`base` is the interface of a backend, and `choose` selects the fastest backend for a machine, its recipe and its data.
`reference` computes updates of every machine on every device, and `graph` replays it as a CUDA graph. `cpu` contains
matrix products of whole batches and the C code, and `cuda` contains Triton kernels. `layout` describes parameters as
one flat vector, and `packing` converts them. No backend depends on the trainer.
"""
