"""Stacks of machines: the matrix-variate deep belief network. Stacks with a softmax on top are classifiers."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from mvrbm.couplings import Kronecker
from mvrbm.cuda_graphs import repeat
from mvrbm.estimators.inputs import VISIBLE, Array, batches, unit_named
from mvrbm.estimators.parameters import Layer, unconnected
from mvrbm.estimators.rbm import SingleLayerRBM
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.sampling import Layers, keep_known, sample
from mvrbm.saving import read_stack, register, write_machines
from mvrbm.training.callbacks import Callback, layer_folder
from mvrbm.units import Unit, make_unit
from mvrbm.validation import as_shape, choice, whole_number

_FEEDS = ("mean", "sample")


@register("DeepMVRBM")
@dataclass(eq=False, repr=False)
class DeepMVRBM(SingleLayerRBM):
    r"""Matrix-variate deep belief network: Boltzmann machines, each trained on the hidden layer of the one below.

    With hidden layers :math:`Y_1, \dots, Y_L` over :math:`X = Y_0`, the top machine is a prior over
    :math:`Y_{L-1}`, and the machines below it are read downwards,

    .. math:: p(X, Y_1, \dots, Y_{L-1}) = p_L(Y_{L-1}) \prod_{l < L} p_l(Y_{l-1} \mid Y_l),

    while features are passed upwards through the means, :math:`\hat Y_l = \mathrm{E}_l[Y_l \mid \hat Y_{l-1}]`. With
    ``Dense`` couplings it is the classic deep belief network of Hinton, Osindero and Teh (2006).

    `hidden_maps`, `transform`, `inverse_transform`, `reconstruct` and `components` take the number of a hidden `layer`:
    0 is the lowest, -1 the top. Machines are trained one after another, and callbacks follow each; checkpoints of
    machine `l` are in the folder `layer-l`. `fit` supports no masks.
    `sample` runs Gibbs sampling in the top machine and draws once down through each of the others; `inpaint` draws up
    and down through the whole stack, which is an approximation.

    Parameters
    ----------
    layers : sequence
        The hidden layers, lowest first, each a shape, None for the shape of the layer below, or a
        :class:`~mvrbm.estimators.Layer` with its own coupling and units.
    rank : int
        Rank of the Kronecker couplings of layers without a coupling of their own.
    hidden : str
        Name of the units of layers without units of their own, such as ``"bernoulli"`` or ``"rectified"``.
    feed : {"mean", "sample"}
        The data that a machine is trained on: the hidden means of the machine below, or draws, new in every epoch.
    n_epochs, batch_size, learning_rate, recipe, negative, n_chains, gibbs_steps
        As for :class:`~mvrbm.MVRBM`, for every machine.
    visible, visible_shape, warm_start, backend, random_state, device, verbose
        As for :class:`~mvrbm.MVRBM`.

    Attributes
    ----------
    machines_ : list of BoltzmannMachine
        The stack, lowest first. The visible layer of each has the shape of the hidden layer below and its units;
        Gaussian units in the place of rectified ones.
    trainers_ : list of Trainer or None
        The trainers of the machines; None after loading.
    history_ : list of dict
        The metrics that callbacks logged, with the number of the ``layer``.
    n_epochs_, n_updates_ : int
        Number of epochs that every machine was trained for, and number of updates of all machines.

    Examples
    --------
    >>> import numpy as np
    >>> from mvrbm import DeepMVRBM
    >>> images = np.random.default_rng(0).random((20, 8, 8), dtype=np.float32)
    >>> stack = DeepMVRBM(((6, 6), (4, 4)), n_epochs=1, random_state=0).fit(images)
    >>> stack.transform(images).shape, stack.transform(images, layer=0).shape
    ((20, 16), (20, 36))
    """

    learns_from_incomplete = False

    layers: Sequence[Any] = (None, None)
    _: KW_ONLY
    rank: int = 1
    feed: str = "mean"
    visible_shape: Sequence[int] | None = None

    def _build(self, units: dict[str, Unit], n: int) -> list[BoltzmannMachine]:
        return build_stack(units[VISIBLE], self.layers, rank=self.rank, hidden=self.hidden)

    def _learn(
        self,
        X: Any,
        mask: Any,
        n_epochs: int,
        callbacks: Sequence[Callback],
        resume: Any,
        *,
        continues: bool,
        planned: bool = True,
        force: bool = False,
    ) -> Self:
        choice(self.feed, "feed", _FEEDS)
        trainers, layers, _ = self._start(X, mask, continues=continues)
        drawing = self._rng().split(len(self.machines_))
        history: list[dict[str, float]] = []
        done, earlier = self.n_epochs_, [trainer.epoch for trainer in trainers]
        try:
            for number, trainer in enumerate(trainers):
                resumed = resume is not None and trainer.resume(layer_folder(resume, number), force=force)
                first = 0 if resumed else trainer.epoch
                last, there = first + n_epochs, trainer.next_epoch
                trainer.planned_epochs = last if planned else 0
                own = [callback.for_layer(number) for callback in callbacks]
                # Draws are new in every epoch; data and means are the same in all of them.
                drawn = bool(number) and self.feed == "sample"
                trainer.same_data = not drawn
                for stop in range(first + 1, last + 1) if drawn else [last]:
                    data = self._feed(layers, number, drawing[number])
                    if not drawn or stop > there or stop == last:
                        fresh = not (continues or resumed)
                        self._train(trainer, {VISIBLE: data}, stop, None, own, initialize=fresh)
                history += [{"layer": number, **row} for row in trainer.history]
        finally:
            self.history_ = history
            self.n_epochs_ = done + min(t.epoch - before for t, before in zip(trainers, earlier, strict=True))
        return self

    def prepare(self, X: Any, mask: Any = None) -> NoReturn:
        """Not supported: each machine of a stack has its own trainer and data."""
        raise ValueError("a stack has no single trainer: use fit")

    @torch.no_grad()
    def _feed(self, layers: Mapping[str, Any], number: int, rng: RandomSource) -> Any:
        """Return the data that machine `number` is trained on, (n, *its visible shape)."""
        if number == 0:
            return layers[VISIBLE]
        below, pieces = self.machines_[number - 1], []
        for batch in batches(layers, self.machine_.layers):
            x = self._up(batch[VISIBLE], number - 1)
            field = below.hidden_field({VISIBLE: x})
            fed = below.hidden.sample(field, rng) if self.feed == "sample" else below.hidden.mean(field)
            pieces.append(fed.cpu().numpy())
        return np.concatenate(pieces)

    def _count(self, layer: int) -> int:
        """Return the number of machines up to a hidden layer, that layer's machine included."""
        size = len(self._machines)
        if not -size <= layer < size:
            raise ValueError(f"layer must lie in {-size}..{size - 1}, got {layer}")
        return layer % size + 1

    def hidden_maps(self, X: Any, layer: int = -1) -> Array:
        count = self._count(layer)
        return self._of_each(X, lambda batch: self._up(batch[VISIBLE], count))

    def transform(self, X: Any, layer: int = -1) -> Array:
        maps = self.hidden_maps(X, layer)
        return maps.reshape(len(maps), -1)

    def inverse_transform(self, X: ArrayLike, layer: int = -1) -> Any:
        count = self._count(layer)
        with torch.no_grad():
            return self._outward(self._down(self._hidden_values(X, self.machines_[count - 1]), count))

    def reconstruct(self, X: Any, *, steps: int = 1, layer: int = -1) -> Any:
        count, pieces = self._count(layer), []
        whole_number(steps, "steps")
        with torch.no_grad():
            for batch in self._batches(X):
                x = batch[VISIBLE]
                for _ in range(steps):
                    x = self._down(self._up(x, count), count)
                pieces.append(x)
        return self._outward(torch.cat(pieces), like=X)

    def components(self, which: ArrayLike | None = None, layer: int = -1) -> Array:
        r"""Filters of a hidden layer, :math:`W_1^\top \cdots W_l^\top e_k`: units in between are taken as linear."""
        *below, top = self.machines_[: self._count(layer)]
        filters = self._weights(top, which)[VISIBLE]
        for machine in reversed(below):
            filters = machine.links[VISIBLE].to_visible(filters)
        return filters.detach().cpu().numpy()

    def _up(self, x: Tensor, count: int) -> Tensor:
        for machine in self.machines_[:count]:
            x = machine.hidden_mean(x, check=False)
        return x

    def _down(self, hidden: Tensor, count: int, stop: int = 0, rng: RandomSource | None = None) -> Tensor:
        """Pass means, or with `rng` draws, down through the machines from number `count` - 1 to number `stop`."""
        for number in reversed(range(stop, count)):
            machine = self.machines_[number]
            below = (
                machine.visible_mean(hidden, check=False)
                if rng is None
                else machine.sample_visible(hidden, rng, check=False)
            )
            hidden = self._as_hidden(below[VISIBLE], number)
        return hidden

    def _as_hidden(self, values: Tensor, number: int) -> Tensor:
        """Return visible values of machine `number` as values of the layer below, which may have narrower bounds."""
        return values.clamp(*self.machines_[number - 1].hidden.statistic_bounds()) if number else values

    @torch.no_grad()
    def _as_start(self, layers: dict[str, Tensor]) -> dict[str, Tensor]:
        return {VISIBLE: self._up(layers[VISIBLE], len(self.machines_) - 1)}

    @torch.no_grad()
    def _draw(self, n: int, steps: int, rng: RandomSource, start: Layers, known: Any, mean: bool) -> dict[str, Tensor]:
        """Run Gibbs sampling in the top machine, then draw once down through each of the others."""
        if known is not None:
            raise ValueError("mask must be None: chains of a stack run in its top machine, use inpaint to fill in data")
        size, top = len(self.machines_), self.machines_[-1]
        state = sample(top, n, steps, rng, init=start, mean=mean and size == 1).visible[VISIBLE]
        lowest = 1 if mean and size > 1 else 0  # the machine below draws means
        state = self._down(self._as_hidden(state, size - 1), size - 1, lowest, rng)
        return {VISIBLE: self._down(state, lowest)}

    @torch.no_grad()
    def _fill_in(self, batch: Layers, known: Layers, rng: RandomSource, steps: int, burn_in: int) -> dict[str, Tensor]:
        """Draw up and down through the stack. Upwards is an approximation, so this is no exact conditional mean."""
        bottom = self.machines_[0]
        unit = bottom.layers[VISIBLE]
        x = keep_known(batch, {VISIBLE: unit.sample(torch.zeros_like(batch[VISIBLE]), rng)}, known)[VISIBLE]
        total = torch.zeros_like(x)

        def step() -> Tensor:
            hidden = x
            for machine in self.machines_:
                hidden = machine.sample_hidden(hidden, rng, check=False)
            field = bottom.visible_fields(self._down(hidden, len(self.machines_), 1, rng))[VISIBLE]
            x.copy_(keep_known(batch, {VISIBLE: unit.sample(field, rng)}, known)[VISIBLE])
            return field

        repeat(step, burn_in, rng, x.device)
        repeat(lambda: total.add_(unit.mean(step())), steps, rng, x.device)
        return keep_known(batch, {VISIBLE: total / steps}, known)

    def score_samples(self, X: Any, *, exact: bool = False) -> Array:
        r"""Log-probability of each sample given its own reconstruction of the lowest hidden layer, (n,). Deterministic.

        It is :math:`\log p_1(X \mid \hat Y_1)`, with :math:`\hat Y_1` the means that the layers above send back: a
        measure of reconstruction, not a likelihood of the model. It is never estimated, so `exact` has no effect.
        """
        size = len(self._machines)
        unit, bottom = self.machine_.layers[VISIBLE], self.machine_

        def score(batch: Mapping[str, Tensor]) -> Tensor:
            x = batch[VISIBLE]
            field = bottom.visible_fields(self._down(self._up(x, size), size, 1))[VISIBLE]
            pull = (unit.statistic(x) * field).flatten(1).sum(1)
            return pull - unit.energy(x) - unit.log_normalizer(field)

        return self._of_each(X, score)

    def _write_machines(self, folder: Path, extra: Mapping[str, Any]) -> None:
        write_machines(self.machines_, folder, extra)

    def _read_machines(self, folder: Path) -> list[BoltzmannMachine]:
        return read_stack(folder)[0]


def build_stack(visible: Unit, layers: Any, *, rank: int, hidden: str) -> list[BoltzmannMachine]:
    """Build the machines of a stack over a visible layer, whose dtype they have; see :class:`DeepMVRBM`."""
    if isinstance(layers, str) or not isinstance(layers, Sequence) or len(layers) == 0:
        raise ValueError(f"layers must be a sequence of at least one layer, lowest first, got {layers!r}")
    machines: list[BoltzmannMachine] = []
    for number, entry in enumerate(layers):
        layer = entry if isinstance(entry, Layer) else Layer(entry)
        below = visible if number == 0 else _as_data(machines[-1].hidden, number)
        shape = below.shape if layer.shape is None else as_shape(layer.shape, f"shape of layer {number}")
        link = unconnected(Kronecker(rank) if layer.coupling is None else layer.coupling, f"coupling of layer {number}")
        units = unit_named(layer.hidden or hidden, shape, f"hidden units of layer {number}")
        try:
            machines.append(BoltzmannMachine({VISIBLE: below}, units, {VISIBLE: link}).to(visible.bias.dtype))
        except ValueError as error:
            raise ValueError(f"layer {number}: {error}") from error
    return machines


def _as_data(hidden: Unit, number: int) -> Unit:
    """Return the units that stand for a hidden layer in the machine above it."""
    if hidden.stacked_as is None:
        raise ValueError(f"layer {number}: there can be no machine over a layer of {hidden.name} units")
    return make_unit(hidden.stacked_as, hidden.shape)
