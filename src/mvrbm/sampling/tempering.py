"""Tempered machines, from beta = 0 (independent units) to beta = 1, and parallel tempering."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from mvrbm.cuda_graphs import repeat
from mvrbm.extras import triton_runs_on
from mvrbm.machine import BoltzmannMachine, Visible
from mvrbm.random import RandomSource
from mvrbm.sampling.chains import Layers, check_count, copies, gibbs_step, multiplied_out, start_chains, write
from mvrbm.units.base import Unit
from mvrbm.validation import whole_number


class TemperedPath:
    r"""Path of machines from independent units (:math:`\beta = 0`) to the given machine (:math:`\beta = 1`).

    The center of the path is a visible state :math:`x` and the hidden mean :math:`y` given :math:`x`. With offsets
    :math:`\mu_m = T_m(x_m)` and :math:`\lambda = T_h(y)`, the energies are

    .. math::

        E_\beta = \sum_m \varepsilon_m + \varepsilon_h - \sum_m \beta \langle T_h, W_m T_m\rangle
                  - (1 - \beta) \big(\langle T_h, W_m \mu_m\rangle + \langle \lambda, W_m T_m\rangle\big).

    At :math:`\beta = 0`, the layers are independent of each other, and their fields are constant.

    Parameters
    ----------
    machine : BoltzmannMachine
        Machine at :math:`\beta = 1`.
    center : mapping of str to Tensor, optional
        Visible state :math:`x`, with each layer of shape (1, *layer shape). If None, the center of each layer is
        :attr:`mvrbm.Unit.middle`, a state that does not favor any mode of the distribution.
    """

    def __init__(self, machine: BoltzmannMachine, center: Layers | None = None) -> None:
        self.machine = machine
        with torch.no_grad():
            if center is None:
                center = {name: unit.middle[None] for name, unit in machine.layers.items()}
            center = machine.as_layers(center, values=False)
            if any(len(array) != 1 for array in center.values()):
                raise ValueError("center must be one visible state, with each layer of shape (1, *layer shape)")
            # Fields on the hidden layer and on each visible layer at beta = 0, each of shape (1, *shape).
            self.hidden_base = machine.hidden_field(center)
            self.visible_base = machine.visible_fields(machine.hidden.mean(self.hidden_base))

    def at(self, beta: float | Tensor) -> Tempered:
        """Return the machine at inverse temperature `beta`, which is a number or a tensor of shape (n,)."""
        return Tempered(self, beta)

    def base_sample(self, n: int, rng: RandomSource) -> dict[str, Tensor]:
        """Sample n independent visible states at beta = 0, keyed by layer name."""
        return {
            name: unit.sample(self.visible_base[name].expand(n, *unit.shape), rng)
            for name, unit in self.machine.layers.items()
        }

    def pull(self, visible: Layers) -> Tensor:
        r"""Compute :math:`\sum_m \langle T_m(x_m), f_m\rangle` for the fields :math:`f_m` at beta = 0.

        The result has shape (n,). It is the negative interaction energy of the visible layers at beta = 0.
        """
        pulls = [
            unit.statistic(visible[name]).flatten(1) @ self.visible_base[name].flatten()
            for name, unit in self.machine.layers.items()
        ]
        return functools.reduce(operator.add, pulls)

    def energies(self, betas: Tensor, field: Tensor, pull: Tensor) -> Tensor:
        """Compute free energies at several temperatures, without the energy of the visible units.

        Parameters
        ----------
        betas : Tensor of shape (k, n) or (k, 1)
            Inverse temperatures.
        field : Tensor of shape (n, *hidden shape)
            Hidden field of each visible state at beta = 1.
        pull : Tensor of shape (n,)
            Result of :meth:`pull` for each visible state.

        Returns
        -------
        Tensor of shape (k, n)
        """
        hidden = self.machine.hidden
        if (kernels := _kernels(hidden, field)) is not None:
            found: Tensor = kernels.energies(field, self.hidden_base, hidden.bias, betas, pull)
            return found
        fields = self.between(self.hidden_base, field, betas)  # (k, n, *hidden shape)
        sums = hidden.log_normalizer(fields.flatten(0, 1)).reshape(fields.shape[:2])
        return (betas - 1) * pull - sums

    def between(self, base: Tensor, field: Tensor, beta: Tensor) -> Tensor:
        """Interpolate linearly between the fields at beta = 0 and beta = 1.

        The leading axes of the result are the axes of `beta`.
        """
        return torch.lerp(base, field, beta.reshape(*beta.shape, *([1] * (base.ndim - 1))))


def _kernels(unit: Unit, field: Tensor) -> ModuleType | None:
    """Return the Triton kernels for a tempered layer, or None if they do not support the unit, dtype or device."""
    if unit.sampled_as != "bernoulli" or field.dtype != torch.float32 or not triton_runs_on(field.device):
        return None
    from mvrbm.sampling import tempered_kernels

    return tempered_kernels


class TemperedLayer:
    """Layer of a tempered machine.

    `beta` has shape (1,) if all samples have the same inverse temperature, and (n,) if each sample has its own.
    """

    def __init__(self, path: TemperedPath, unit: Unit, base: Tensor, beta: Tensor) -> None:
        self._path, self._unit, self._base, self._beta = path, unit, base, beta

    def sample(self, field: Tensor, rng: RandomSource) -> Tensor:
        """Sample the layer, given its field at beta = 1: (n, *shape) -> (n, *shape)."""
        if (kernels := _kernels(self._unit, field)) is not None:
            numbers = rng.uniform(field.shape, field)
            drawn: Tensor = kernels.draw(field, self._base, self._unit.bias, self._beta, numbers)
            return drawn
        return self._unit.sample(self._path.between(self._base, field, self._beta), rng)

    def redraw(self, x: Tensor, field: Tensor, rng: RandomSource) -> Tensor:
        """Call :meth:`sample`. `x` is ignored, because all samples in a tempered layer have the same length."""
        return self.sample(field, rng)


class Tempered:
    """Machine on a :class:`TemperedPath`, with one inverse temperature for all samples or one per sample.

    `hidden_field` and `visible_fields` compute the fields at beta = 1. The layers apply the temperature when they are
    sampled.
    """

    def __init__(self, path: TemperedPath, beta: float | Tensor) -> None:
        machine = path.machine
        self._path = path
        self._beta = torch.as_tensor(beta, dtype=machine.like.dtype, device=machine.like.device).reshape(-1)
        self.hidden_field, self.visible_fields = machine.hidden_field, machine.visible_fields
        self.hidden = TemperedLayer(path, machine.hidden, path.hidden_base, self._beta)
        self.layers = {
            name: TemperedLayer(path, unit, path.visible_base[name], self._beta)
            for name, unit in machine.layers.items()
        }

    def free_energy(self, visible: Layers) -> Tensor:
        """Compute the free energy of each visible state. The result has shape (n,)."""
        path = self._path
        tempered = path.energies(self._beta[None], path.machine.hidden_field(visible), path.pull(visible))[0]
        return path.machine.own_energy(visible) + tempered


def _repeated(layers: Layers, times: int) -> dict[str, Tensor]:
    """Repeat all samples `times` times along the first axis."""
    return {name: array.repeat(times, *([1] * (array.ndim - 1))) for name, array in layers.items()}


class ParallelTempering:
    """Parallel tempering: Markov chains at several temperatures that exchange states.

    The exchanges let cold chains move between modes. In each step, every chain takes a Gibbs step, and neighboring
    temperatures then propose to exchange states. The Metropolis rule accepts or rejects each proposal based on the free
    energies. Successive steps alternate between even and odd pairs of temperatures.

    Parameters
    ----------
    machine : BoltzmannMachine
        Model to sample from.
    n_chains : int
        Number of independent sets of chains.
    betas : sequence of float, or int
        Inverse temperatures in increasing order up to 1. An int specifies the number of temperatures, which are then
        evenly spaced from 0 to 1.
    rng : RandomSource
        Random source for all samples, including the initial states.
    init : Tensor or mapping of str to Tensor, optional
        Initial states, one for each of the `n_chains` sets. They are used at every temperature. If None, initial states
        are sampled exactly at beta = 0.
    mask : Tensor or mapping of str to Tensor, optional
        True where an entry of `init` is known and must not change. Requires `init`.
    center : mapping of str to Tensor, optional
        Visible state at the center of the path. See :class:`TemperedPath`.
    check : bool
        Whether to validate `init` and to check that the energy is bounded below.

    Attributes
    ----------
    visible : dict of str to Tensor
        States of all chains, with the coldest chains last. Each layer has shape (temperatures, n_chains, *layer shape).
    """

    def __init__(
        self,
        machine: BoltzmannMachine,
        n_chains: int,
        betas: int | list[float] | Tensor = 10,
        *,
        rng: RandomSource,
        init: Visible | None = None,
        mask: Visible | None = None,
        center: Layers | None = None,
        check: bool = True,
    ) -> None:
        # Create evenly spaced temperatures on the device, because a CUDA graph cannot copy a list from the CPU.
        like = machine.like
        if isinstance(betas, int):
            ladder = torch.linspace(0, 1, max(betas, 1), dtype=torch.float64, device=like.device)
            valid = betas >= 2
        else:
            ladder = torch.as_tensor(betas, dtype=torch.float64, device="cpu")
            valid = ladder.ndim == 1 and len(ladder) >= 2 and bool(ladder[0] >= 0 and ladder[-1] == 1)
            valid = valid and not bool((ladder.diff() <= 0).any())
        if not valid:
            raise ValueError(
                f"betas must contain at least two increasing values between 0 and 1 and must end with 1, got {betas}"
            )
        ladder = ladder.to(dtype=like.dtype, device=like.device)
        whole_number(n_chains, "n_chains")
        if check:
            machine.check_bounded()
        self.machine, self.betas, self.rng = machine, ladder, rng
        self.center = center
        self.turn = 0
        self._known: dict[str, Tensor] | None = None  # each (temperatures * n_chains, *layer shape)
        if init is None:
            if mask is not None:
                raise ValueError("mask requires init, because the mask marks which entries of init are known")
            start = TemperedPath(machine, self.center).base_sample(n_chains * len(ladder), rng)
        else:
            if mask is not None:  # without a mask, a CUDA graph may be recording, which cannot read tensors
                masks = machine.as_masks(mask, machine.as_layers(init, check=check, values=False))
                if not any(held is not None and bool(held.any()) for held in masks.values()):
                    mask = None  # unlike `gibbs`, accept a mask that is False everywhere
            layers, masks = start_chains(machine, init, mask, check=check)
            check_count(layers, n_chains, "n_chains")
            start = _repeated(layers, len(ladder))
            if mask is not None:
                self._known = _repeated({name: held for name, held in masks.items() if held is not None}, len(ladder))
        self.visible = {name: array.unflatten(0, (len(ladder), n_chains)) for name, array in start.items()}
        self._offers, self._accepted = ladder.new_zeros(2, len(ladder) - 1)

    @property
    def acceptance(self) -> Tensor:
        """Fraction of accepted exchanges so far, for each pair of neighboring temperatures."""
        share: Tensor = self._accepted / self._offers.clamp(min=1)
        return share.cpu()

    @torch.no_grad()
    def step(self, count: int = 1) -> dict[str, Tensor]:
        """Take `count` steps and return the visible states of the coldest chains.

        Each layer has shape (n_chains, *layer shape).
        """
        repeat(self.stepper(), count, self.rng, self.betas.device)
        return self.coldest()

    def coldest(self) -> dict[str, Tensor]:
        """Return copies of the visible states of the coldest chains. Each layer has shape (n_chains, *layer shape)."""
        return {name: array[-1].clone() for name, array in self.visible.items()}

    @torch.no_grad()
    def stepper(self) -> Callable[[RandomSource], None]:
        """Return a function that takes one step with the machine's current parameters, using a given random source."""
        # Rebuild the path in every call, because the machine may have changed since the last call.
        path = TemperedPath(multiplied_out(self.machine), self.center)
        self.visible = copies(self.visible)
        flat = {name: array.flatten(0, 1) for name, array in self.visible.items()}  # shares memory with `self.visible`
        tempered = path.at(self.betas.repeat_interleave(next(iter(self.visible.values())).shape[1]))
        masks = self.machine.as_masks(self._known, flat)

        @torch.no_grad()
        def step(rng: RandomSource) -> None:
            write(gibbs_step(tempered, flat, rng, masks).visible, flat)
            self._exchange(path, rng)

        return step

    def _exchange(self, path: TemperedPath, rng: RandomSource) -> None:
        """Propose state exchanges between neighboring temperatures, alternating between even and odd pairs."""
        first, pairs = self.turn, (len(self.betas) - self.turn) // 2
        self.turn = 1 - self.turn
        if not pairs:
            return
        # Slices are views, so nothing is read back from the device. Each has shape (pairs, 2, n_chains, ...).
        two = {name: array[first : first + 2 * pairs].unflatten(0, (pairs, 2)) for name, array in self.visible.items()}
        flat = {name: array.flatten(0, 2) for name, array in two.items()}
        betas = self.betas[first : first + 2 * pairs].reshape(pairs, 2, 1).expand(next(iter(two.values())).shape[:3])
        # The energy of the visible units is the same at both temperatures, so it cancels.
        both = torch.stack([betas.flatten(), betas.flip(1).flatten()])
        stay, move = (
            path.energies(both, path.machine.hidden_field(flat), path.pull(flat)).unflatten(1, betas.shape).sum(2)
        )
        accept = torch.log(rng.uniform(stay.shape, stay)) < stay - move  # (pairs, n_chains)
        for array in two.values():
            swap = accept.reshape(pairs, 1, -1, *([1] * (array.ndim - 3)))
            array.copy_(torch.where(swap, array.flip(1), array))
        self._offers[first::2] += accept.shape[1]
        self._accepted[first::2] += accept.sum(1)
