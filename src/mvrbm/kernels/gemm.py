r"""Contrastive divergence on the CPU, every mode product one plain matrix product.

Arrays lie as (I, n, J) and (K, n, L): the mode that a factor acts on is then always the first or the last, and
the batch is part of the other side of one large product. Half-way products :math:`X V_r^\top` are shared between
the field and the gradient, and all arrays are allocated once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mvrbm.couplings.base import squared_norms
from mvrbm.kernels.packing import LayerPlan, Packing, Plan, why_not
from mvrbm.learning.negative import PCD

if TYPE_CHECKING:
    from mvrbm.learning.trainer import Trainer
    from mvrbm.noise import Noise


# Batches of more sizes than this come from a loader with a mind of its own.
_MOST_PHASES = 6


class _Phase:
    """States of one side of the contrast, and the products that its gradient needs again."""

    def __init__(self, plan: Plan, n: int, like: Tensor) -> None:
        K, L = plan.hidden_rows, plan.hidden_columns
        self.n = n
        self.visible = [like.new_zeros(p.rows, n, p.columns) for p in plan.layers]
        self.halfway = [like.new_zeros(p.rank, p.rows * n, L) for p in plan.layers]  # X V_r'
        self.back = [like.new_zeros(p.rank, p.rows * n, L) for p in plan.layers]  # U_r' Y
        self.field = like.new_zeros(K, n, L)
        self.mean = like.new_zeros(K, n, L)


class GemmUpdates:
    """Makes updates on the CPU.

    Parameters
    ----------
    trainer : Trainer
        A training that :func:`refuses` had nothing against.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.plan = Plan.of(trainer.machine)
        self._packing = Packing(trainer, self.plan)
        like, negative = trainer.machine.like, trainer.negative
        self._persistent, self._steps = isinstance(negative, PCD), int(negative.steps)  # type: ignore[attr-defined]
        self._n_chains = int(getattr(negative, "n_chains", 0))
        self._affine = self._affines()
        size = self.plan.size
        self._params, self._momenta = like.new_zeros(size), like.new_zeros(size)
        self._kept, self._gradient = like.new_zeros(size), like.new_zeros(size)
        self._multiplier = self._packing.multiplier
        self._even = bool((self._multiplier == 1).all())
        self._phases: dict[tuple[str, int], _Phase] = {}
        self._split_params, self._split_gradient = self.plan.split(self._params), self.plan.split(self._gradient)
        self._chains_started = False
        self.pull()

    def _affines(self) -> list[tuple[Tensor, Tensor] | None]:
        """What turns data into states, None where nothing is to be done."""
        scale, shift, affine = self._packing.load_scale, self._packing.load_shift, []
        for p in self.plan.layers:
            part = slice(p.states_at, p.states_at + p.area)
            pair = scale[part].view(p.rows, 1, p.columns), shift[part].view(p.rows, 1, p.columns)
            affine.append(pair if p.gaussian else None)
        return affine

    # -- to and from the trainer ------------------------------------------------------------------

    def pull(self) -> None:
        """Take over parameters, momenta and chains from the trainer."""
        self._packing.pack(self._params, self._momenta)
        if self._persistent and self.trainer.chains:
            chain = self._phase("chain", self._n_chains)
            for number, p in enumerate(self.plan.layers):
                states = self.trainer.chains[p.name].transpose(0, 1)
                pair = self._affine[number]
                chain.visible[number].copy_(states if pair is None else states * pair[0] - pair[1])
            self._chains_started = True

    def push(self) -> None:
        """Give parameters, momenta and chains back to the trainer."""
        self._packing.unpack(self._params, self._momenta)
        if self._persistent and self._chains_started:
            chain = self._phase("chain", self._n_chains)
            for number, p in enumerate(self.plan.layers):
                states, pair = chain.visible[number], self._affine[number]
                states = states if pair is None else (states + pair[1]) / pair[0]
                self.trainer.chains[p.name] = states.transpose(0, 1).contiguous()

    def _phase(self, what: str, n: int) -> _Phase:
        """Buffers for so many samples: kept, since a pass has batches of one size, and one shorter."""
        if (what, n) not in self._phases:
            if len(self._phases) >= _MOST_PHASES:
                self._phases = {key: phase for key, phase in self._phases.items() if key == ("chain", self._n_chains)}
            self._phases[what, n] = _Phase(self.plan, n, self._params)
        return self._phases[what, n]

    # -- an update --------------------------------------------------------------------------------

    @torch.no_grad()
    def update(self, batch: Mapping[str, Tensor], weight: float, shares: tuple[float, float] = (1.0, 1.0)) -> None:
        """Make one update.

        Parameters
        ----------
        batch : mapping of str to Tensor
            Samples of every layer, each (n, I, J); bytes as they are in the data.
        weight : float
            What the gradient counts.
        shares : tuple of float
            How much of all data and of all chains is here.
        """
        noise, n = self.trainer.noise, len(next(iter(batch.values())))
        data = self._phase("data", n)
        for m, p in enumerate(self.plan.layers):
            self._load(m, batch[p.name], data.visible[m])
        self._upwards(data)
        self._means(data)
        if self._persistent:
            chain = self._phase("chain", self._n_chains)
            if not self._chains_started:
                self._spread(data, chain)
            self._upwards(chain)
            field = chain.field
        else:
            chain, field = self._phase("chain", n), data.field
        for _ in range(self._steps):
            self._gibbs(chain, field, noise)
            field = chain.field
        self._means(chain)
        self._slopes(data, chain, weight * shares[0], weight * shares[1])
        self.trainer.add_up(self._gradient)
        self._step()

    def _load(self, m: int, block: Tensor, into: Tensor) -> None:
        """Bring samples of layer m, (n, I, J), into (I, n, J), in the units of the flat form."""
        into.copy_(block.transpose(0, 1))
        scale = self.trainer.machine.layers[self.plan.layers[m].name].byte_scale
        if block.dtype == torch.uint8 and scale != 1.0:
            into.mul_(scale)
        pair = self._affine[m]
        if pair is not None:
            into.mul_(pair[0]).sub_(pair[1])

    def _spread(self, data: _Phase, chain: _Phase) -> None:
        """Start persistent chains at a batch, going round it."""
        rows = torch.arange(self._n_chains) % max(1, data.n)
        for m, (p, begun) in enumerate(zip(self.plan.layers, chain.visible, strict=True)):
            if data.n:
                begun.copy_(data.visible[m][:, rows])
            else:  # another process has all of the batch: draws in no field
                begun.copy_(self._split_params[0][m][2][:, None].expand_as(begun))
                _draw(begun, begun, self.trainer.noise, p.gaussian)
        self._chains_started = True

    # -- fields -----------------------------------------------------------------------------------

    def _upwards(self, phase: _Phase) -> None:
        """Hidden field with bias, C + sum U_r X V_r'."""
        layers, C = self._split_params
        n, L = phase.n, self.plan.hidden_columns
        flat = phase.field.view(self.plan.hidden_rows, n * L)
        for m, (p, (U, V, _)) in enumerate(zip(self.plan.layers, layers, strict=True)):
            x = phase.visible[m].view(p.rows * n, p.columns)
            for r in range(p.rank):
                torch.mm(x, V[r].t(), out=phase.halfway[m][r])
            _times(self._flat_u(p, U), phase.halfway[m].view(p.rank * p.rows, n * L), flat, add=m > 0)
        phase.field.add_(C[:, None])

    def _downwards(self, y: Tensor, m: int, phase: _Phase, into: Tensor) -> None:
        """Field of layer m with bias, B + sum U_r' Y V_r."""
        p, (U, V, B) = self.plan.layers[m], self._split_params[0][m]
        n, L = phase.n, self.plan.hidden_columns
        back, flat = phase.back[m], into.view(p.rows * n, p.columns)
        torch.mm(self._flat_u(p, U).t(), y.view(self.plan.hidden_rows, n * L), out=back.view(p.rank * p.rows, n * L))
        for r in range(p.rank):
            _times(back[r], V[r], flat, add=r > 0)
        into.add_(B[:, None])

    def _flat_u(self, p: LayerPlan, U: Tensor) -> Tensor:
        """All U_r side by side, (K, R I); for one of them a view."""
        return U[0] if p.rank == 1 else U.transpose(0, 1).reshape(self.plan.hidden_rows, -1)

    def _means(self, phase: _Phase) -> None:
        if self.plan.hidden_gaussian:
            phase.mean.copy_(phase.field)
        else:
            torch.sigmoid(phase.field, out=phase.mean)

    def _gibbs(self, chain: _Phase, field: Tensor, noise: Noise) -> None:
        """From a hidden field draw the hidden layer, then the visible ones, and find their hidden field."""
        y = chain.mean  # overwritten: it is needed only after the last step
        _draw(field, y, noise, self.plan.hidden_gaussian)
        for m, p in enumerate(self.plan.layers):
            states = chain.visible[m]
            self._downwards(y, m, chain, states)
            _draw(states, states, noise, p.gaussian)
        self._upwards(chain)

    # -- the step ---------------------------------------------------------------------------------

    def _slopes(self, data: _Phase, chain: _Phase, of_data: float, of_chain: float) -> None:
        """Gradient of of_data * mean F(data) - of_chain * mean F(chain)."""
        slopes, to_c = self._split_gradient
        sides = [(chain, of_chain / max(1, chain.n)), (data, -of_data / max(1, data.n))]
        for number, (phase, sign) in enumerate(sides):
            add, n, L = number > 0, phase.n, self.plan.hidden_columns
            phase.mean.mul_(sign)
            h = phase.mean.view(self.plan.hidden_rows, n * L)
            _total(phase.mean, to_c, 1.0, add=add)
            for m, (p, (U, _, _), (to_u, to_v, to_b)) in enumerate(
                zip(self.plan.layers, self._split_params[0], slopes, strict=True)
            ):
                halfway, back, x = phase.halfway[m], phase.back[m], phase.visible[m]
                if p.rank == 1:
                    _times(h, halfway[0].view(p.rows, n * L).t(), to_u[0], add=add)
                else:
                    wide = h @ halfway.view(p.rank * p.rows, n * L).t()
                    wide = wide.view(-1, p.rank, p.rows).transpose(0, 1)
                    to_u.copy_(to_u + wide if add else wide)
                torch.mm(self._flat_u(p, U).t(), h, out=back.view(p.rank * p.rows, n * L))
                for r in range(p.rank):
                    _times(back[r].t(), x.view(p.rows * n, p.columns), to_v[r], add=add)
                _total(x, to_b, sign, add=add)

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
        if math.isfinite(float(flat.sum())) or bool(torch.isfinite(flat).all()):
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


def _times(a: Tensor, b: Tensor, into: Tensor, *, add: bool) -> None:
    """Matrix product, added to what is there or in its place."""
    if add:
        into.addmm_(a, b)
    else:
        torch.mm(a, b, out=into)


def _total(x: Tensor, into: Tensor, scale: float, *, add: bool) -> None:
    """Sum over the samples of (I, n, J), times a number."""
    total = x.sum(1)
    into.add_(total, alpha=scale) if add else torch.mul(total, scale, out=into)


def _draw(field: Tensor, into: Tensor, noise: Noise, gaussian: bool) -> None:
    """Draw a layer (I, n, J) from fields that include its bias; `into` may be `field` itself.

    Numbers are drawn sample by sample, as the units draw them: the training is then the same as without
    this path, up to rounding.
    """
    rows, n, columns = field.shape
    if gaussian:
        torch.add(field, noise.normal((n, rows, columns), field).transpose(0, 1), out=into)
    else:
        numbers = noise.uniform((n, rows, columns), field).transpose(0, 1)
        torch.sigmoid(field, out=into)
        torch.lt(numbers, into, out=into)


def refuses(trainer: Trainer) -> str | None:
    """Return why this path cannot do a training, None if it can."""
    device = trainer.machine.like.device
    if device.type != "cpu":
        return f"the machine is on {device}"
    return why_not(trainer)
