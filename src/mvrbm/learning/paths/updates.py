"""What all paths that make single updates have in common: the flat parameters, the chains, and the step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mvrbm.couplings.base import squared_norms
from mvrbm.learning.paths.flat import LayerPlan, Packing, Plan
from mvrbm.learning.samplers import PCD
from mvrbm.validation import all_finite

if TYPE_CHECKING:
    from mvrbm.learning.trainer import Trainer


class FlatUpdates(ABC):
    """Makes updates on parameters in the flat form.

    Parameters
    ----------
    trainer : Trainer
        A training that the path's `refuses` had nothing against.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.plan = Plan.of(trainer.machine)
        self._packing = Packing(trainer, self.plan)
        like, negative = trainer.machine.like, trainer.negative
        self._persistent, self._steps = isinstance(negative, PCD), int(negative.steps)  # type: ignore[attr-defined]
        self._n_chains = int(getattr(negative, "n_chains", 0))
        size = self.plan.size
        self._params, self._momenta = like.new_zeros(size), like.new_zeros(size)
        self._affine = self._affines()
        self._kept, self._gradient = like.new_zeros(size), like.new_zeros(size)
        self._multiplier = self._packing.multiplier
        self._even = bool((self._multiplier == 1).all())
        self._split_params, self._split_gradient = self.plan.split(self._params), self.plan.split(self._gradient)
        self._chains_started = False

    def _affines(self) -> list[tuple[Tensor, Tensor] | None]:
        """What turns data into states, (I, J) each: a factor and what is then subtracted; None for nothing."""
        scale, shift, affine = self._packing.load_scale, self._packing.load_shift, []
        for p in self.plan.layers:
            part = slice(p.states_at, p.states_at + p.area)
            factor, less = (array[part].view(p.rows, p.columns).to(self._params) for array in (scale, shift))
            affine.append((factor, less) if p.gaussian else None)
        return affine

    # -- to and from the trainer ------------------------------------------------------------------

    def pull(self) -> None:
        """Take over parameters, momenta and chains from the trainer."""
        self._packing.pack(self._params, self._momenta)
        if self._persistent and self.trainer.chains:
            self._set_chains([self.trainer.chains[p.name] for p in self.plan.layers])

    def push(self) -> None:
        """Give parameters, momenta and chains back to the trainer."""
        self._packing.unpack(self._params, self._momenta)
        if self._persistent and self._chains_started:
            for p, states, pair in zip(self.plan.layers, self._chain_states(), self._affine, strict=True):
                data = states.transpose(0, 1)
                data = data if pair is None else (data + pair[1]) / pair[0]
                self.trainer.chains[p.name] = data.clone(memory_format=torch.contiguous_format)

    @abstractmethod
    def _chain_states(self) -> list[Tensor]:
        """Persistent chains of every layer, (I, n, J) each: views, to be read and written."""

    def _set_chains(self, data: list[Tensor]) -> None:
        """Go on from chains (n, I, J), in the units of the data."""
        for states, some, pair in zip(self._chain_states(), data, self._affine, strict=True):
            states.copy_((some if pair is None else some * pair[0] - pair[1]).transpose(0, 1))
        self._chains_started = True

    def _start_chains(self, batch: Mapping[str, Tensor]) -> None:
        """Start persistent chains at a batch, going round it."""
        if len(next(iter(batch.values()))):
            rows = torch.arange(self._n_chains) % len(next(iter(batch.values())))
            self._set_chains([batch[p.name][rows] for p in self.plan.layers])
            return
        # Another process has all of the batch: draws in no field.
        for p, states, (_, _, bias) in zip(self.plan.layers, self._chain_states(), self._split_params[0], strict=True):
            shape = self._n_chains, p.rows, p.columns
            rng, field = self.trainer.rng, bias.expand(shape)
            drawn = field + rng.normal(shape, bias) if p.gaussian else rng.uniform(shape, bias) < torch.sigmoid(field)
            states.copy_(drawn.transpose(0, 1))
        self._chains_started = True

    # -- an update --------------------------------------------------------------------------------

    @torch.no_grad()
    def update(self, batch: Mapping[str, Tensor], weight: float, shares: tuple[float, float] = (1.0, 1.0)) -> None:
        """Make one update.

        Parameters
        ----------
        batch : mapping of str to Tensor
            Samples of every layer, each (n, I, J).
        weight : float
            What the gradient counts.
        shares : tuple of float
            How much of all data and of all chains is here.
        """
        if self._persistent and not self._chains_started:
            self._start_chains(batch)
        self._contrast(batch, weight * shares[0], weight * shares[1])
        self.trainer.add_up(self._gradient)
        self._step()

    @abstractmethod
    def _contrast(self, batch: Mapping[str, Tensor], of_data: float, of_chain: float) -> None:
        """Let the chains go on, and make the gradient of of_data * mean F(data) - of_chain * mean F(chain)."""

    def _numbers(self, n: int, p: LayerPlan | None) -> Tensor:
        """Numbers to draw n samples of a layer from, None for the hidden one: (n, rows, columns).

        They are drawn as the units draw them: the training is then the same as without this path, up to rounding.
        """
        plan = self.plan
        shape = (n, plan.hidden_rows, plan.hidden_columns) if p is None else (n, p.rows, p.columns)
        gaussian = plan.hidden_gaussian if p is None else p.gaussian
        draw = self.trainer.rng.normal if gaussian else self.trainer.rng.uniform
        return draw(shape, self._params)

    # -- the step ---------------------------------------------------------------------------------

    def _step(self) -> None:
        """One step of gradient descent with momentum, as the trainer's optimiser makes it."""
        recipe, flat, number = self.trainer.recipe, self._gradient, self.trainer.update
        self._check("gradient", flat)
        falling = 1.0 if recipe.rate_decay is None else 1 / math.sqrt(1 + number / recipe.rate_decay)
        rate = float(recipe.learning_rate or 0.0)
        if recipe.normalised:
            for (U, V, _), (to_u, to_v, _) in zip(self._split_params[0], self._split_gradient[0], strict=True):
                to_u.div_(squared_norms(V).sum().clamp(min=1e-12))
                to_v.div_(squared_norms(U).sum().clamp(min=1e-12))
        if not self._even:
            flat.mul_(self._multiplier)
        if recipe.weight_decay:
            for (U, V, _), (to_u, to_v, _) in zip(self._split_params[0], self._split_gradient[0], strict=True):
                to_u.add_(U, alpha=recipe.weight_decay)
                to_v.add_(V, alpha=recipe.weight_decay)
        self._kept.copy_(self._params)
        torch.add(flat, self._momenta, alpha=recipe.momentum, out=self._momenta)
        bias_rate = (recipe.bias_learning_rate or rate) * falling
        self._params.add_(self._momenta, alpha=-bias_rate)
        if bias_rate != rate * falling:
            moving, _ = self.plan.split(self._momenta)
            for (U, V, _), (moving_u, moving_v, _) in zip(self._split_params[0], moving, strict=True):
                U.add_(moving_u, alpha=bias_rate - rate * falling)
                V.add_(moving_v, alpha=bias_rate - rate * falling)
        self._check("parameter", self._params)

    def _check(self, what: str, flat: Tensor) -> None:
        """Refuse numbers that are not finite; the machine is then as it was before this update."""
        if all_finite([flat]):
            return
        layers, hidden = self.plan.split(flat)
        named = {"hidden.bias": hidden}
        for p, (U, V, bias) in zip(self.plan.layers, layers, strict=True):
            factors = f"couplings.{p.name}.factors"
            named |= {f"{factors}.0": U, f"{factors}.1": V, f"visible.{p.name}.bias": bias}
        name = next(name for name, part in named.items() if not bool(torch.isfinite(part).all()))
        if what == "parameter":
            self._params.copy_(self._kept)
        self.push()
        self.trainer.fail(self.trainer.update + 1, f"the {what} of '{name}'")
