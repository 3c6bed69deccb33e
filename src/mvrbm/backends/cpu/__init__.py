"""CPU backends: `native` runs compiled C code, and `gemm` uses PyTorch matrix products.

Both backends store parameters in a flat vector and differ in how they compute the gradient. Their base class, in
`flat`, combines the arrays (`flat_arrays`), the update step (`flat_step`), learned variances (`flat_variances`) and
hidden-layer centering (`flat_centering`). `products` and `mode_products` implement multithreaded matrix products.
"""
