r"""Floors: the least time of an update, from counted operations and bytes and the measured rates of this device.

Mapping a batch of n samples by a sum of R Kronecker products, one axis after the other, costs
:math:`c_1, \dots, c_D` multiply-adds, for a matrix :math:`c_1 = nR\,IJL` (X V') and :math:`c_2 = nR\,IKL`. The gradient
of factor d costs :math:`c_d` once both its sides are known: the one towards the data is left from the field, the one
towards the hidden layer costs :math:`c_D, \dots, c_2`. So CD-1 costs three fields and two such gradients, for a matrix
:math:`5c_1 + 7c_2`, and PCD-1, whose chain starts at a visible state of its own, one field more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.problems import Problem

_FLOAT = 4  # bytes
_FIELDS = {"cd": 3, "pcd": 4}  # data up, (chain up,) down, chain up
_DRAWS = {"cd": (1, 1), "pcd": (1, 1)}  # draws of the whole visible and of the whole hidden layer


@dataclass(frozen=True)
class Product:
    """`count` products of a matrix (m, k) with a matrix (k, p), `times` times per update.

    `transposed` names the operand that is transposed in memory.
    """

    what: str
    m: int
    k: int
    p: int
    count: int = 1
    times: int = 1
    transposed: str = ""

    @property
    def flops(self) -> int:
        """Multiplications and additions per update."""
        return 2 * self.m * self.k * self.p * self.count * self.times


# -- counting ---------------------------------------------------------------------------------------


def products(problem: Problem, phase: str, *, dense: bool = False) -> list[Product]:
    """Return the matrix products of one update, each as large as it can be made.

    Parameters
    ----------
    problem : Problem
        The shapes.
    phase : {"cd", "pcd"}
        CD-1 or PCD-1.
    dense : bool
        Full weights, instead of the problem's Kronecker products.
    """
    fields = _FIELDS[phase]
    if dense:
        n, visible, hidden = problem.batch_size, problem.n_visible, problem.n_hidden
        return [
            Product("up: X W'", n, visible, hidden, times=fields - 1, transposed="right"),
            Product("down: Y W", n, hidden, visible),
            Product("gradient: Y'X", hidden, n, visible, times=2, transposed="left"),
        ]
    return _structured(problem, fields - 1)


def _structured(problem: Problem, ups: int) -> list[Product]:
    # Cheapest order of the axes, as in the coupling; upwards, the first is mapped first.
    order = sorted(range(problem.order), key=lambda d: (1 / problem.visible[d] - 1 / problem.hidden[d], -d))
    sizes, rank, found = list(problem.visible), problem.rank, []
    for place, mode in enumerate(order):
        i, k = problem.visible[mode], problem.hidden[mode]
        others = problem.batch_size * math.prod(sizes) // i
        sizes[mode] = k
        name, first, last = f"axis {mode + 1}", place == 0, place == problem.order - 1
        pulls = 1 if first else 3  # the gradients need no product with the first axis
        if first and not last:  # R products side by side
            up = Product(f"up, {name}", others, i, rank * k, times=ups, transposed="right")
            down = Product(f"down, {name}", others, rank * k, i, times=pulls)
            gradient = Product(f"gradient, {name}", rank * k, others, i, times=2, transposed="left")
        elif last:  # a sum over R products
            up = Product(f"up, {name}", k, rank * i, others, times=ups)
            down = Product(f"down, {name}", rank * i, k, others, times=pulls, transposed="left")
            gradient = Product(f"gradient, {name}", k, others, rank * i, times=2, transposed="right")
        else:
            up = Product(f"up, {name}", others, i, k, rank, ups, "right")
            down = Product(f"down, {name}", others, k, i, rank, pulls)
            gradient = Product(f"gradient, {name}", k, others, i, rank, 2, "left")
        found += [up, down, gradient]
    return found


def flops(problem: Problem, phase: str, *, dense: bool = False) -> int:
    """Return the operations of the matrix products of one update."""
    return sum(product.flops for product in products(problem, phase, dense=dense))


def per_sample(problem: Problem, *, dense: bool = False) -> tuple[float, float]:
    """Return the operations of one sample's field, and of its gradient."""
    cd, pcd = (flops(problem, phase, dense=dense) / problem.batch_size for phase in ("cd", "pcd"))
    field = pcd - cd
    return field, (cd - _FIELDS["cd"] * field) / 2


def random_numbers(problem: Problem, phase: str) -> int:
    """Return the random numbers of an update: the hidden layer is drawn once, and the visible once."""
    visible, hidden = _DRAWS[phase]
    return problem.batch_size * (visible * problem.n_visible + hidden * problem.n_hidden)


def parameters(problem: Problem, *, dense: bool = False) -> int:
    """Return the number of parameters: weights and biases."""
    pairs = zip(problem.hidden, problem.visible, strict=True)
    weights = problem.n_visible * problem.n_hidden if dense else problem.rank * sum(k * i for k, i in pairs)
    return weights + problem.n_visible + problem.n_hidden


def traffic(problem: Problem, phase: str, *, dense: bool = False) -> dict[str, int]:
    """Return the bytes that an update must move, in float32.

    The batch is read once; drawn states are written and read once; parameters and the momentum are read and written
    once. Everything else stays on the chip.
    """
    states = random_numbers(problem, phase) + (problem.batch_size * problem.n_visible if phase == "pcd" else 0)
    return {
        "data": _FLOAT * problem.batch_size * problem.n_visible,
        "states": 2 * _FLOAT * states,
        "parameters": 4 * _FLOAT * parameters(problem, dense=dense),
    }


# -- measuring on the CPU: the products and the random numbers themselves -----------------------------


def bare_products(problem: Problem, phase: str, *, dense: bool = False) -> Callable[[int], None]:
    """Return a function that computes the products of some updates, and nothing else, into existing buffers."""
    generator = torch.Generator().manual_seed(0)
    buffers: dict[tuple[int, ...], Tensor] = {}

    def buffer(*shape: int) -> Tensor:
        if shape not in buffers:
            buffers[shape] = torch.randn(shape, generator=generator)
        return buffers[shape]

    work = []
    for product in products(problem, phase, dense=dense):
        m, k, p, count = product.m, product.k, product.p, product.count
        left = buffer(count, k, m).mT if product.transposed == "left" else buffer(count, m, k)
        right = buffer(count, p, k).mT if product.transposed == "right" else buffer(count, k, p)
        out = torch.empty(count, m, p)
        if count == 1:
            work += [(torch.mm, left[0], right[0], out[0])] * product.times
        else:
            work += [(torch.bmm, left, right, out)] * product.times

    def run(updates: int) -> None:
        for _ in range(updates):
            for multiply, left, right, out in work:
                multiply(left, right, out=out)

    return run


def draw_with_torch(count: int) -> Callable[[int], None]:
    """Return a function that draws `count` uniform numbers with `torch.rand`, some times."""
    out, generator = torch.empty(count), torch.Generator().manual_seed(0)

    def run(times: int) -> None:
        for _ in range(times):
            torch.rand(count, generator=generator, out=out)

    return run


def draw_with_numpy(count: int) -> Callable[[int], None]:
    """Return a function that draws `count` uniform numbers with NumPy's SFC64 in float32, some times."""
    out, generator = np.empty(count, np.float32), np.random.Generator(np.random.SFC64(0))

    def run(times: int) -> None:
        for _ in range(times):
            generator.random(dtype=np.float32, out=out)

    return run


# -- measuring on the GPU: its rates ------------------------------------------------------------------


def gpu_rates(size: int = 8192, repetitions: int = 7) -> dict[str, float]:
    """Measure the best rates of a GPU: products in fp32 and tf32, copies, random numbers, and an empty graph node.

    Returns
    -------
    dict
        ``flops_fp32`` and ``flops_tf32`` (per second), ``bytes`` (read plus written, per second), ``random`` (numbers
        per second), and ``node`` (seconds from one node of a graph to the next that depends on it).
    """
    rates = {}
    for name, precision in (("fp32", "highest"), ("tf32", "high")):
        with _precision(precision):
            rates[f"flops_{name}"] = 2 * size**3 / _seconds(_multiplication(size), 4, repetitions)
    count = 2**28  # 1 GiB, beyond any cache
    source, target = (torch.zeros(count, device="cuda") for _ in range(2))
    rates["bytes"] = 2 * _FLOAT * count / _seconds(lambda: target.copy_(source), 4, repetitions)
    rates["random"] = count / _seconds(lambda: torch.rand(count, out=target), 4, repetitions)
    rates["node"] = _node_seconds(repetitions)
    return rates


def _multiplication(size: int) -> Callable[[], Tensor]:
    left, right, out = (torch.randn(size, size, device="cuda") for _ in range(3))
    return lambda: torch.mm(left, right, out=out)


def _node_seconds(repetitions: int, nodes: int = 1000) -> float:
    cell, graph = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph()
    cell.add_(1)  # loads the kernel, which is impossible while capturing
    with torch.cuda.graph(graph):
        for _ in range(nodes):
            cell.add_(1)  # each depends on the last
    return _seconds(graph.replay, 4, repetitions) / nodes


def _seconds(work: Callable[[], object], times: int, repetitions: int) -> float:
    """Median time of one call, by events."""
    work()
    found = []
    for _ in range(repetitions):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(times):
            work()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1000 / times)
    return float(np.median(found))


@contextmanager
def _precision(name: str) -> Iterator[None]:
    former = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(former)


def gpu_floor(problem: Problem, phase: str, rates: dict[str, float], *, dense: bool = False) -> dict[str, Any]:
    """Return the least time of an update on a GPU with these rates, and its parts.

    The floor is the longest of arithmetic (plain fp32, every lane at work), memory, random numbers and one node of a
    graph, as if the others were hidden behind it.
    """
    operations, moved = flops(problem, phase, dense=dense), traffic(problem, phase, dense=dense)
    parts = {
        "arithmetic, fp32": operations / rates["flops_fp32"],
        "arithmetic, tf32": operations / rates["flops_tf32"],
        "memory": sum(moved.values()) / rates["bytes"],
        "random numbers": random_numbers(problem, phase) / rates["random"],
        "one graph node": rates["node"],
    }
    longest = {name: seconds for name, seconds in parts.items() if name != "arithmetic, tf32"}
    limit = max(longest, key=lambda name: longest[name])
    return {"seconds": parts[limit], "limit": limit, "parts": parts}
