"""Build the compiled code, which is optional: without a C compiler the package installs without it and is slower."""

import os
import sys
import sysconfig

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel

FOLDER = "src/mvrbm/compiled/"
FAST = ["-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-pthread"]
# On Linux, PyTorch comes with the OpenMP library of GCC; linking against it makes both use the same threads.
OPENMP = ["-fopenmp"] if sys.platform == "linux" else []

# Plain C with the vector types and threads of GCC and Clang. Free-threaded Python has no stable ABI to build for.
supported = os.name == "posix" and not sysconfig.get_config_var("Py_GIL_DISABLED")


class Wheel(bdist_wheel):
    """Compile first: a wheel for which nothing could be compiled is tagged as pure Python."""

    def run(self) -> None:
        """Build the wheel."""
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
            extra_compile_args=FAST + OPENMP,
            extra_link_args=["-pthread", *OPENMP],
            py_limited_api=True,
            optional=True,
        )
        for name, headers in {"_native": ["_native_kernel.h", "_random_kernel.h"], "_pseudo": []}.items()
    ]
    if supported
    else [],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if supported else {},
    cmdclass={"bdist_wheel": Wheel},
)
