"""Build the C code, which is optional: without a C compiler the package installs without it and is slower."""

import os
import sys
import sysconfig

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel

FOLDER = "src/mvrbm/compiled/"
# Headers of each C file.
HEADERS = {"_native": ["_native_kernel.h", "_random_kernel.h"], "_pseudo": [], "_identity": []}
OPTIMIZED = ["-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-pthread"]
# On Linux, PyTorch includes the OpenMP library of GCC. Linking against it makes both use the same threads.
OPENMP = ["-fopenmp"] if sys.platform == "linux" else []

# The code needs the vector types of GCC or Clang, POSIX threads, and the stable ABI, which free-threaded Python lacks.
SUPPORTED = os.name == "posix" and not sysconfig.get_config_var("Py_GIL_DISABLED")


class Wheel(bdist_wheel):
    """Tags a wheel as pure Python if the C code could not be compiled for it."""

    def run(self) -> None:
        """Compile the C code first, then build the wheel."""
        self.run_command("build_ext")
        code = self.get_finalized_command("build_ext").get_outputs() if self.distribution.ext_modules else []
        if not any(os.path.exists(file) for file in code):
            self.distribution.ext_modules = []
            self.root_is_pure = True
        super().run()


setup(
    ext_modules=[
        Extension(
            f"mvrbm.compiled.{name}",
            [f"{FOLDER}{name}.c"],
            depends=[FOLDER + header for header in headers],
            extra_compile_args=OPTIMIZED + OPENMP,
            extra_link_args=["-pthread", *OPENMP],
            py_limited_api=True,
            optional=True,
        )
        for name, headers in HEADERS.items()
    ]
    if SUPPORTED
    else [],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if SUPPORTED else {},
    cmdclass={"bdist_wheel": Wheel},
)
