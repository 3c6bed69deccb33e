"""Backends on the CPU: `native` runs the C code, and `gemm` uses matrix products of PyTorch.

Both work on flat parameters, and differ in how they compute the gradient. `flat` is their base class. It is composed of
the arrays (`flat_arrays`), the step (`flat_step`), learned variances (`flat_variances`) and a centered hidden layer
(`flat_centering`). `products` and `mode_products` are matrix products with threads.
"""
