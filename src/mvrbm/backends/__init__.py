"""Implementations of the update defined in :mod:`mvrbm.updates.update`. Tests compare each backend with `reference`.

`base` defines the backend interface, and `choose` selects the fastest backend for a given machine, recipe and dataset.
`reference` supports every machine on every device, and `graph` replays the same operations as CUDA graphs. `cpu`
contains a backend based on batched matrix products and a backend written in C. `cuda` contains Triton kernels. `layout`
describes how parameters are stored in one flat vector, and `packing` converts parameters to and from this form. `tf32`
switches tensor cores on for float32. No backend depends on the trainer.
"""
