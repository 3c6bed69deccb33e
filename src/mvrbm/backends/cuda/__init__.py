"""Backends by Triton kernels, for GPUs.

`epochs` has the base class of all of them. There are three families:

* `per_sample` (kernels in `per_sample_kernels`): small matrices, with or without a label, one program per sample. It
  shares `flat`, its base class, with the next family.
* `tensor` (`tensor_kernel`): arrays of order 3 to 6, one program per sample.
* `full_matrix`: couplings formed as full matrices, products of whole batches. `full_layout` places the layers in these
  matrices, and `full_buffers` holds all arrays on the device. The kernels are in `full_kernels` (Gibbs steps and
  gradients), `full_step` (the update rule), `full_variances` (learned variances), and `full_tempering` with
  `full_exchange` (tempered chains).

`step_kernels` has the update rule for all of them, `draws` the means and draws of layers, and `overlap` how launches
follow each other. `graph_step` is for :mod:`mvrbm.backends.graph`. Nothing here is imported without Triton, except the
modules that choose and launch kernels.
"""
