"""Backends: how an update is computed. All of them compute the update that `reference` defines, and are tested equal.

`choose` picks the fastest one for a machine, its recipe and its data. `layout` is the flat layout of the parameters.
`reference` serves every machine on every device, and `graph` replays it as a CUDA graph. `cpu` has products of whole
batches and the C code; `cuda` has Triton kernels. No backend knows the trainer.
"""
