"""The compiled code, which is optional: without a C compiler the package installs without it, and is slower."""

import os

from setuptools import Extension, setup

FOLDER = "src/mvrbm/kernels/"
FAST = ["-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-pthread"]

setup(
    ext_modules=[
        Extension(
            "mvrbm.kernels._native",
            [FOLDER + "_native.c"],
            depends=[FOLDER + "_native_kernel.h"],
            extra_compile_args=FAST if os.name == "posix" else [],
            extra_link_args=["-pthread"] if os.name == "posix" else [],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
