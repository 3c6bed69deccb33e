"""Fast paths of learning, each equal to the reference by test.

On the CPU single updates are made: by compiled code, `_native.c` (`native`), or by plain matrix products (`gemm`). On a
GPU whole passes are: of one machine or of many at once by the Triton kernels in `triton_cd` (`fused`), of any machine
by CUDA graphs (`graphs`). All but the last keep the parameters in a layout of their own meanwhile (`packing`).
Each says of a training whether it can do it; what none can do the trainer does itself.
"""
