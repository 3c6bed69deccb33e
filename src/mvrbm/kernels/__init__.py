"""Fast paths of learning, each equal to the reference by test.

`gemm` makes single updates on the CPU. `fused` makes whole passes on a GPU, of one machine or of many at once,
by the Triton kernels in `triton_cd`. Both keep the parameters in a layout of their own meanwhile (`packing`).
Each says of a training whether it can do it; what neither can do the trainer does itself.
"""
