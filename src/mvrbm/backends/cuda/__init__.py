"""GPU backends based on Triton kernels.

The common base class is in `kernel_backend`. There are three families of backends:

* `per_sample` (kernels in `per_sample_kernels`): small matrices, with or without a label, using one program per sample.
* `tensor` (kernel in `tensor_kernel`): arrays of order 3 to 6, using one program per sample. `per_sample` and `tensor`
  share the base class in `program_per_sample`.
* `full_matrix`: couplings expanded to full matrices, using batched matrix products. `full_layout` defines the positions
  of the layers in these matrices, and `full_buffers` contains all arrays on the device. The kernels are in
  `full_kernels` (Gibbs steps and gradients), `full_step` (update rule), `full_variances` (learned variances), and
  `full_tempering` and `full_tempering_kernels` (tempered chains).

All families share `step_kernels` (update rule), `draws` (means and samples of layers) and `overlap` (overlapping kernel
launches). `graph_step` is used by :mod:`mvrbm.backends.graph`. If Triton is not installed, only the modules that select
and launch kernels can be imported.
"""
