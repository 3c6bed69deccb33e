"""Build the compiled code, which is optional: without a C compiler the package installs without it and is slower."""

import os
import sysconfig

from setuptools import Extension, setup

FOLDER = "src/mvrbm/compiled/"
FAST = ["-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-pthread"]

# Plain C with the vector types and threads of GCC and Clang. Free-threaded Python has no stable ABI to build for.
supported = os.name == "posix" and not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    ext_modules=[
        Extension(
            f"mvrbm.compiled.{name}",
            [f"{FOLDER}{name}.c"],
            depends=[FOLDER + header for header in headers],
            extra_compile_args=FAST,
            extra_link_args=["-pthread"],
            py_limited_api=True,
            optional=True,
        )
        for name, headers in {"_native": ["_native_kernel.h"], "_pseudo": []}.items()
    ]
    if supported
    else [],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if supported else {},
)
