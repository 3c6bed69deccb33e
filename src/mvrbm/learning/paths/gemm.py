r"""The gradient on the CPU by PyTorch, every mode product being one plain matrix product (GEMM).

Arrays are stored as (I, n, J) and (K, n, L): the mode that a factor acts on is then always the first or the last, and
the batch is part of the other side of one large product. The products :math:`X V_r^\top` are shared between the field
and the gradient, and all arrays are allocated once.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from mvrbm.learning.paths import flat
from mvrbm.learning.paths.base import Task
from mvrbm.learning.paths.flat import LayerPlan, Plan
from mvrbm.learning.paths.flat_updates import FlatUpdates
from mvrbm.learning.state import TrainState

# Buffers are kept for so many sizes of batches: a loader may deliver batches of any size.
_MOST_PHASES = 6


class _Phase:
    """States of one side of the contrast, and the products that its gradient uses again."""

    def __init__(self, plan: Plan, n: int, like: Tensor) -> None:
        K, L = plan.hidden_rows, plan.hidden_columns
        self.n = n
        self.visible = [like.new_zeros(p.rows, n, p.columns) for p in plan.layers]
        self.halfway = [like.new_zeros(p.rank, p.rows * n, L) for p in plan.layers]  # X V_r'
        self.back = [like.new_zeros(p.rank, p.rows * n, L) for p in plan.layers]  # U_r' Y
        self.field = like.new_zeros(K, n, L)
        self.mean = like.new_zeros(K, n, L)


class GemmUpdates(FlatUpdates):
    """Computes gradients by the matrix products of PyTorch."""

    def __init__(self, task: Task, state: TrainState) -> None:
        super().__init__(task, state)
        self._phases: dict[tuple[str, int], _Phase] = {}
        self.load(state)

    def _phase(self, what: str, n: int) -> _Phase:
        """Return the buffers for `n` samples, which are kept: an epoch has batches of one size, and one shorter."""
        if (what, n) not in self._phases:
            if len(self._phases) >= _MOST_PHASES:
                self._phases = {key: phase for key, phase in self._phases.items() if key == ("chain", self._n_chains)}
            self._phases[what, n] = _Phase(self.plan, n, self._params)
        return self._phases[what, n]

    def _chain_states(self) -> list[Tensor]:
        return self._phase("chain", self._n_chains).visible

    def _contrast(self, batch: Mapping[str, Tensor], of_data: float, of_chain: float) -> None:
        n = len(next(iter(batch.values())))
        data = self._phase("data", n)
        for p, states, pair in zip(self.plan.layers, data.visible, self._affine, strict=True):
            states.copy_(batch[p.name].transpose(0, 1))
            if pair is not None:
                states.mul_(pair[0][:, None]).sub_(pair[1][:, None])
        self._upwards(data)
        self._means(data)
        chain = self._phase("chain", self._n_chains if self._persistent else n)
        if self._persistent:
            self._upwards(chain)
        field = chain.field if self._persistent else data.field
        for _ in range(self._steps):
            self._gibbs(chain, field)
            field = chain.field
        self._means(chain)
        self._gradients(data, chain, of_data, of_chain)

    def _upwards(self, phase: _Phase) -> None:
        """Compute the hidden field with bias, C + sum U_r X V_r'."""
        layers, C = self._split_params
        n, L = phase.n, self.plan.hidden_columns
        rows = phase.field.view(self.plan.hidden_rows, n * L)
        for m, (p, (U, V, _)) in enumerate(zip(self.plan.layers, layers, strict=True)):
            x = phase.visible[m].view(p.rows * n, p.columns)
            for r in range(p.rank):
                torch.mm(x, V[r].t(), out=phase.halfway[m][r])
            _times(self._flat_u(p, U), phase.halfway[m].view(p.rank * p.rows, n * L), rows, add=m > 0)
        phase.field.add_(C[:, None])

    def _downwards(self, y: Tensor, m: int, phase: _Phase, into: Tensor) -> None:
        """Compute the field of layer m with bias, B + sum U_r' Y V_r."""
        p, (U, V, B) = self.plan.layers[m], self._split_params[0][m]
        n, L = phase.n, self.plan.hidden_columns
        back, rows = phase.back[m], into.view(p.rows * n, p.columns)
        torch.mm(self._flat_u(p, U).t(), y.view(self.plan.hidden_rows, n * L), out=back.view(p.rank * p.rows, n * L))
        for r in range(p.rank):
            _times(back[r], V[r], rows, add=r > 0)
        into.add_(B[:, None])

    def _flat_u(self, p: LayerPlan, U: Tensor) -> Tensor:
        """Return all U_r side by side, (K, R I); a view for rank 1."""
        return U[0] if p.rank == 1 else U.transpose(0, 1).reshape(self.plan.hidden_rows, -1)

    def _means(self, phase: _Phase) -> None:
        if self.plan.hidden_gaussian:
            phase.mean.copy_(phase.field)
        else:
            torch.sigmoid(phase.field, out=phase.mean)

    def _gibbs(self, chain: _Phase, field: Tensor) -> None:
        """Draw the hidden layer from its field, then the visible layers, and compute their hidden field."""
        y = chain.mean  # overwritten here: the mean is needed only after the last step
        _draw(field, y, self._numbers(chain.n, None), self.plan.hidden_gaussian)
        for m, p in enumerate(self.plan.layers):
            states = chain.visible[m]
            self._downwards(y, m, chain, states)
            _draw(states, states, self._numbers(chain.n, p), p.gaussian)
        self._upwards(chain)

    def _gradients(self, data: _Phase, chain: _Phase, of_data: float, of_chain: float) -> None:
        """Compute the gradient of of_data * mean F(data) - of_chain * mean F(chain)."""
        layers, to_c = self._split_gradient
        sides = [(chain, of_chain / max(1, chain.n)), (data, -of_data / max(1, data.n))]
        for number, (phase, sign) in enumerate(sides):
            add, n, L = number > 0, phase.n, self.plan.hidden_columns
            phase.mean.mul_(sign)
            h = phase.mean.view(self.plan.hidden_rows, n * L)
            _total(phase.mean, to_c, 1.0, add=add)
            for m, (p, (to_u, to_v, to_b)) in enumerate(zip(self.plan.layers, layers, strict=True)):
                U, back, x = self._split_params[0][m][0], phase.back[m], phase.visible[m]
                halfway = phase.halfway[m].view(p.rank * p.rows, n * L).t()
                if p.rank == 1:
                    _times(h, halfway, to_u[0], add=add)
                else:
                    wide = (h @ halfway).view(-1, p.rank, p.rows).transpose(0, 1)
                    to_u.copy_(to_u + wide if add else wide)
                torch.mm(self._flat_u(p, U).t(), h, out=back.view(p.rank * p.rows, n * L))
                for r in range(p.rank):
                    _times(back[r].t(), x.view(p.rows * n, p.columns), to_v[r], add=add)
                _total(x, to_b, sign, add=add)


def _times(a: Tensor, b: Tensor, into: Tensor, *, add: bool) -> None:
    """Write a matrix product to `into`, or add it."""
    if add:
        into.addmm_(a, b)
    else:
        torch.mm(a, b, out=into)


def _total(x: Tensor, into: Tensor, scale: float, *, add: bool) -> None:
    """Write the sum over the samples of (I, n, J), times `scale`, to `into`, or add it."""
    total = x.sum(1)
    into.add_(total, alpha=scale) if add else torch.mul(total, scale, out=into)


def _draw(field: Tensor, into: Tensor, numbers: Tensor, gaussian: bool) -> None:
    """Draw a layer (I, n, J) from fields with its bias and numbers (n, I, J); `into` may be `field` itself."""
    numbers = numbers.transpose(0, 1)
    if gaussian:
        torch.add(field, numbers, out=into)
    else:
        torch.sigmoid(field, out=into)
        torch.lt(numbers, into, out=into)


def unsupported_reason(task: Task, state: TrainState) -> str | None:
    """Return why this path cannot compute a training run's updates, None if it can."""
    device = state.machine.like.device
    if device.type != "cpu":
        return f"the machine is on {device}"
    return flat.unsupported_reason(task, state)
