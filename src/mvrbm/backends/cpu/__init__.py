"""CPU backends: `native` runs C code, `gemm` uses matrix products, and `one_hot` sums rows for categorical data.

All of them store parameters in a flat vector and differ in how they compute the gradient. Their base class, in
`flat_backend`, combines the arrays (`flat_arrays`), the update step (`flat_step`), learned variances (`flat_variances`)
and hidden-layer centering (`flat_centering`). `products` and `mode_products` implement multithreaded matrix products.
"""
