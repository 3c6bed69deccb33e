"""Names of kernel arguments. Triton's interpreter accepts names with which a launch on a GPU fails."""

import ast
from pathlib import Path

import mvrbm

# Triton generates a function with the arguments of the kernel, in which these are local variables.
RESERVED = {"params", "specialization", "options"}


def kernels():
    for path in Path(mvrbm.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                yield f"{path.stem}.{node.name}", {argument.arg for argument in node.args.args}


def test_no_kernel_argument_has_a_reserved_name():
    found = dict(kernels())
    assert len(found) > 20
    assert not {name: arguments & RESERVED for name, arguments in found.items() if arguments & RESERVED}
