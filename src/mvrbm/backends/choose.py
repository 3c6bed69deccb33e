"""Table of backends and selection of the fastest one for a training run.

All backends compute the same updates. `BACKENDS` lists them in order of preference. Each entry has two functions. One
returns the reason why the backend does not support a training run, and the other returns the reason why a later backend
in the table is faster. :func:`fastest_backend` selects the first backend for which both functions return None. If the
user requests a backend by name, that backend only has to support the training run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mvrbm.backends import graph, reference
from mvrbm.backends.base import EpochBackend, UpdateBackend, UpdateSettings
from mvrbm.backends.cpu import flat_backend, gemm, native, one_hot
from mvrbm.backends.cuda import full_matrix, per_sample, tensor
from mvrbm.backends.cuda.kernel_backend import KernelBackend
from mvrbm.backends.layout import Layout
from mvrbm.data.sources import Source
from mvrbm.devices import n_processors
from mvrbm.extras import triton_runs_on
from mvrbm.updates.state import TrainState
from mvrbm.validation import choice

__all__ = [
    "BACKENDS",
    "BackendChoice",
    "EpochBackend",
    "UpdateBackend",
    "UpdateSettings",
    "check_name",
    "choose_backend",
    "choose_entry",
    "fastest_backend",
    "kernel_backend",
    "unsupported_reasons",
]

Backend = UpdateBackend | EpochBackend
Builder = Callable[[Sequence[UpdateSettings], Sequence[TrainState], Sequence[Source], int], Backend]


def _no_reason(*run: object) -> None:
    return None


@dataclass(frozen=True)
class BackendChoice:
    """Entry in the table of backends."""

    #: One-line summary of what the backend supports.
    summary: str
    #: Function that returns why the backend does not support a training run, or None if it does.
    unsupported_reason: Callable[[UpdateSettings, TrainState, Source], str | None]
    #: Function that builds the backend from the settings, states and sources of one or more machines, and from the
    #: number of threads.
    build: Builder
    #: Function that returns why a later backend is faster for training the given number of machines, or None if the
    #: backend is the fastest. It is called only for training runs that the backend supports.
    slower_reason: Callable[[UpdateSettings, TrainState, Source, int], str | None] = _no_reason
    #: Whether the backend requires a GPU. The automatic choice skips such backends for a machine on a CPU.
    needs_gpu: bool = False
    #: Whether the backend can train several machines with the same shapes together.
    trains_groups: bool = False
    #: Whether the backend computes matrix products with PyTorch, and therefore uses PyTorch's threads on a CPU.
    uses_torch_threads: bool = True


def _kernels(
    summary: str,
    kind: type[KernelBackend],
    unsupported_reason: Callable[..., str | None],
    slower_reason: Callable[..., str | None] = _no_reason,
) -> BackendChoice:
    """Return the table entry for a backend implemented with Triton kernels."""
    return BackendChoice(
        summary,
        unsupported_reason,
        lambda settings, states, sources, threads: kind(settings, states, sources),
        slower_reason,
        needs_gpu=True,
        trains_groups=True,
    )


def _slower_than_full_matrix(settings: UpdateSettings, state: TrainState, source: Source, models: int) -> str | None:
    """Return the reason why `full_matrix` is faster than `per_sample` for a training run, or None if it is not."""
    if full_matrix.unsupported_reason(settings, state, source) is not None:
        return None
    rows = max(settings.recipe.batch_size, settings.negative.n_chains)
    processors = n_processors(state.machine.like.device)
    return per_sample.slower_reason(Layout.of(state.machine), rows, models, processors)


#: All backends by name, in order of preference.
BACKENDS: dict[str, BackendChoice] = {
    "tensor": _kernels(
        "GPU: arrays of order 3 to 6, one program per sample", tensor.TensorBackend, tensor.unsupported_reason
    ),
    "per_sample": _kernels(
        "GPU: matrices up to 64 wide, ranks up to 8, with or without a label, one program per sample",
        per_sample.PerSampleBackend,
        per_sample.unsupported_reason,
        _slower_than_full_matrix,
    ),
    "full_matrix": _kernels(
        "GPU: couplings expanded to full matrices, products of whole batches",
        full_matrix.FullMatrixBackend,
        full_matrix.unsupported_reason,
    ),
    "graph": BackendChoice(
        "GPU: every machine, PyTorch operations replayed as CUDA graphs",
        graph.unsupported_reason,
        lambda settings, states, sources, threads: graph.GraphBackend(settings[0], states[0], sources[0]),
        needs_gpu=True,
    ),
    "one_hot": BackendChoice(
        "CPU: categorical data, sums of rows of full matrices",
        lambda settings, state, source: one_hot.unsupported_reason(settings, state),
        lambda settings, states, sources, threads: one_hot.OneHotBackend(settings[0], states[0]),
        lambda settings, state, source, models: one_hot.slower_reason(state),
    ),
    "native": BackendChoice(
        "CPU: sums of Kronecker products of matrices, compiled code",
        lambda settings, state, source: native.unsupported_reason(settings, state),
        lambda settings, states, sources, threads: native.NativeBackend(settings[0], states[0], threads),
        lambda settings, state, source, models: native.slower_reason(settings, state),
        uses_torch_threads=False,
    ),
    "gemm": BackendChoice(
        "CPU: sums of Kronecker products and full matrices, products of whole batches",
        lambda settings, state, source: flat_backend.unsupported_reason(settings, state),
        lambda settings, states, sources, threads: gemm.GemmBackend(settings[0], states[0]),
        lambda settings, state, source, models: gemm.slower_reason(state),
    ),
    "reference": BackendChoice(
        "every machine, PyTorch operations one by one",
        _no_reason,
        lambda settings, states, sources, threads: reference.ReferenceBackend(settings[0]),
    ),
    "autograd": BackendChoice(
        "every machine with a free energy, gradients by autograd instead of statistics, to check the other backends",
        _no_reason,
        lambda settings, states, sources, threads: reference.ReferenceBackend(
            dataclasses.replace(settings[0], by_autograd=True)
        ),
    ),
}


def choose_backend(
    settings: Sequence[UpdateSettings],
    states: Sequence[TrainState],
    sources: Sequence[Source],
    threads: int,
    *,
    name: str = "auto",
) -> Backend:
    """Build the backend selected by :func:`choose_entry`. `threads` applies only to CPU backends."""
    return choose_entry(settings, states, sources, name=name).build(settings, states, sources, threads)


def choose_entry(
    settings: Sequence[UpdateSettings], states: Sequence[TrainState], sources: Sequence[Source], *, name: str = "auto"
) -> BackendChoice:
    """Select a backend to train one machine, or to train several machines with the same shapes together.

    Parameters
    ----------
    settings, states, sources : sequences
        Settings, training state and data source for each machine.
    name : str
        A key of `BACKENDS`, or ``"auto"`` for the fastest backend that supports the training run.

    Raises
    ------
    ValueError
        If the named backend does not support the training run or cannot train several machines together.
    """
    models = len(settings)
    if name == "auto":
        chosen = fastest_backend(settings[0], states[0], sources[0], models)
    else:
        chosen = check_name(name)
        if (reason := BACKENDS[chosen].unsupported_reason(settings[0], states[0], sources[0])) is not None:
            raise ValueError(f"backend {chosen!r} does not support this training run: {reason}")
    if models > 1 and not BACKENDS[chosen].trains_groups:
        raise ValueError(f"backend {chosen!r} cannot train {models} machines together; train them one at a time")
    return BACKENDS[chosen]


def check_name(name: str) -> str:
    """Return `name` if it is ``"auto"`` or the name of a backend, and raise ValueError otherwise."""
    return choice(name, "backend", ("auto", *BACKENDS))


def fastest_backend(settings: UpdateSettings, state: TrainState, source: Source, models: int = 1) -> str:
    """Return the name of the fastest backend for training `models` machines with the same shapes."""
    device = state.machine.like.device
    has_gpu = device.type == "cuda" or triton_runs_on(device)  # Triton's interpreter runs the kernels on a CPU
    candidates = {name: each for name, each in BACKENDS.items() if has_gpu or not each.needs_gpu}
    run = settings, state, source
    return next(
        name
        for name, each in candidates.items()
        if each.unsupported_reason(*run) is None and each.slower_reason(*run, models) is None
    )


def kernel_backend(
    settings: UpdateSettings, state: TrainState, source: Source, models: int, *, name: str = "auto"
) -> str | None:
    """Return the name of the backend that trains machines with the same shapes together, or None.

    The result is None if there is no such backend. `name` is the backend requested by the user, as in
    :func:`choose_entry`.
    """
    chosen = fastest_backend(settings, state, source, models) if name == "auto" else name
    return chosen if BACKENDS[chosen].trains_groups else None


def unsupported_reasons(settings: UpdateSettings, state: TrainState, source: Source) -> dict[str, str | None]:
    """Return a dictionary of the reasons why backends do not support a training run, keyed by backend name.

    The value for a backend that supports the training run is None.
    """
    return {name: each.unsupported_reason(settings, state, source) for name, each in BACKENDS.items()}
