"""Backends by Triton kernels, for GPUs.

`epochs` has the base class of all of them. There are three families:

* `per_sample` (kernels in `per_sample_kernels`): small matrices, with or without a label, one program per sample. It
  shares `flat`, its base class, with the next family.
* `tensor` (`tensor_kernel`): arrays of order 3 to 6, one program per sample.
* `full_matrix` (`full_kernels`, `full_step`, `full_variances`, `full_exchange`): couplings formed as full matrices,
  products of whole batches.

`step_kernels` has the update rule for all of them, `draws` the means and draws of layers, and `overlap` how launches
follow each other. `graph_step` is for :mod:`mvrbm.backends.graph`. Nothing here is imported without Triton, except the
modules that choose and launch kernels.
"""
