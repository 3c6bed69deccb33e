"""Matrix-variate deep belief network, a stack of machines.

For classifiers that add a softmax layer on top of a stack, see :mod:`mvrbm.estimators.classifiers`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from mvrbm.couplings import Kronecker
from mvrbm.cuda_graphs import repeat
from mvrbm.estimators.array_rbm import PreparedRun
from mvrbm.estimators.base import as_rows
from mvrbm.estimators.batches import Array, batches
from mvrbm.estimators.inputs import VISIBLE
from mvrbm.estimators.parameters import Layer, unconnected, unit_named
from mvrbm.estimators.rbm import SingleLayerRBM
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.sampling import Layers, keep_known, sample
from mvrbm.saving import read_stack, register, write_machines
from mvrbm.training.callbacks import Callback
from mvrbm.training.part_folders import part_folder
from mvrbm.training.trainer import Trainer
from mvrbm.units import Unit, make_unit
from mvrbm.validation import as_shape, choice, whole_number

# Valid values for the parameter `feed`.
_FEEDS = ("mean", "sample")


@register("DeepMVRBM")
@dataclass(eq=False, repr=False)
class DeepMVRBM(SingleLayerRBM):
    r"""Matrix-variate deep belief network: a stack of machines, each trained on the hidden layer of the one below.

    With hidden layers :math:`Y_1, \dots, Y_L` above :math:`X = Y_0`, the top machine is the prior for
    :math:`Y_{L-1}`, and each lower machine generates the layer below it:

    .. math:: p(X, Y_1, \dots, Y_{L-1}) = p_L(Y_{L-1}) \prod_{l < L} p_l(Y_{l-1} \mid Y_l)

    Features are the means passed upward through the stack,
    :math:`\hat Y_l = \mathrm{E}_l[Y_l \mid \hat Y_{l-1}]`. With ``Dense`` couplings, the stack is the classic deep
    belief network (Hinton, Osindero and Teh, 2006).

    `hidden_maps`, `transform`, `inverse_transform`, `reconstruct` and `components` accept the parameter `layer`, which
    is the index of a hidden layer. Index 0 is the lowest layer, and -1 (the default) is the top layer. `sample` runs
    Gibbs sampling in the top machine and then samples downward once through each of the other machines. `inpaint`
    alternates upward and downward passes through the whole stack, which is an approximation.

    `fit` trains the machines one after another, starting with the lowest, and calls the callbacks for each machine.
    Checkpoints for machine `l` are saved in the folder `layer-l`. `fit` does not support masks.

    Parameters
    ----------
    layers : sequence, default=(None, None)
        Hidden layers, from the lowest to the highest. Each layer is a shape, None for the shape of the layer below, or
        a :class:`~mvrbm.estimators.Layer` with its own coupling and units.
    rank : int, default=1
        Rank of the Kronecker couplings in layers that do not define a coupling.
    hidden : str, default="bernoulli"
        Unit type for layers that do not define one, such as ``"bernoulli"`` or ``"rectified"``.
    feed : {"mean", "sample"}, default="mean"
        Training data for the machines above the first: ``"mean"`` uses the hidden means of the machine below, and
        ``"sample"`` draws new samples of its hidden units in each epoch.
    n_epochs, batch_size, learning_rate, recipe, negative, n_chains, gibbs_steps
        See :class:`~mvrbm.MVRBM`. These parameters apply to each machine.
    visible, visible_shape, warm_start, backend, random_state, device, verbose
        See :class:`~mvrbm.MVRBM`.

    Attributes
    ----------
    machines_ : list of BoltzmannMachine
        The machines in the stack, from the lowest to the highest. The visible layer of each machine has the shape and
        unit type of the hidden layer below, except that Gaussian units are used above rectified units.
    trainers_ : list of Trainer or None
        The trainers of the machines, or None if the model was loaded from a folder.
    history_ : list of dict
        Metrics logged by callbacks. The entry ``layer`` is the index of the machine.
    n_epochs_ : int
        Number of epochs that each machine has been trained for.
    n_updates_ : int
        Total number of updates over all machines.

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

    # -- training ---------------------------------------------------------------------------------

    def _new_machines(self, units: dict[str, Unit], batch_size: int) -> list[BoltzmannMachine]:
        choice(self.feed, "feed", _FEEDS)
        return build_stack(units[VISIBLE], self.layers, rank=self.rank, hidden=self.hidden)

    def prepare(self, X: Any, mask: Any = None, sample_weight: Any = None) -> NoReturn:
        """Not supported for stacks, in which each machine has its own trainer and training data. Raises ValueError."""
        raise ValueError("prepare is not supported for stacks because each machine has its own trainer; use fit")

    def _train_all(
        self,
        run: PreparedRun,
        n_epochs: int,
        callbacks: Sequence[Callback] = (),
        resume: Any = None,
        *,
        ignore_mismatch: bool = False,
        open_ended: bool = False,
    ) -> None:
        sources = self._rng().split(len(self.machines_))
        history: list[dict[str, float]] = []
        epochs_before = self.n_epochs_
        trained_before = [trainer.epoch for trainer in run.trainers]
        for number, trainer in enumerate(run.trainers):
            folder = None if resume is None else part_folder(resume, "layer", number)
            resumed = folder is not None and trainer.resume(folder, ignore_mismatch=ignore_mismatch)
            first = 0 if resumed else trainer.epoch
            last = first + n_epochs
            trainer.planned_epochs = 0 if open_ended else last
            own_callbacks = [callback.for_layer(number) for callback in callbacks]
            initialize = not (run.continues or resumed)
            self._train_machine(number, trainer, run, first, last, own_callbacks, sources[number], initialize)
            history += [{"layer": number, **row} for row in trainer.history]
            if trainer.interrupted:
                break
        self.history_ = history
        trained = zip(run.trainers, trained_before, strict=True)
        self.n_epochs_ = epochs_before + min(trainer.epoch - before for trainer, before in trained)

    def _train_machine(
        self,
        number: int,
        trainer: Trainer,
        run: PreparedRun,
        first: int,
        last: int,
        callbacks: Sequence[Callback],
        rng: RandomSource,
        initialize: bool,
    ) -> None:
        """Train one machine in the stack from epoch `first` to epoch `last`."""
        # Samples change from epoch to epoch. Data and means do not change, so one call trains for all epochs.
        fed_by_samples = number > 0 and self.feed == "sample"
        trainer.same_data = not fed_by_samples
        done = trainer.next_epoch
        for stop in range(first + 1, last + 1) if fed_by_samples else [last]:
            # Draw the random numbers of finished epochs again, so that a resumed run continues the same sequence.
            data = self._training_data(run.layers, number, rng)
            if not fed_by_samples or stop > done or stop == last:
                self._train(trainer, {VISIBLE: data}, stop, None, callbacks, initialize=initialize)
            if trainer.interrupted:
                return

    @torch.no_grad()
    def _training_data(self, layers: Mapping[str, Any], number: int, rng: RandomSource) -> Any:
        """Return training data of shape (n, *visible shape) for machine `number`."""
        if number == 0:
            return layers[VISIBLE]
        below = self.machines_[number - 1]
        pieces = []
        for batch in batches(layers, self.machine_.layers, check=False):
            field = below.hidden_field({VISIBLE: self._up(batch[VISIBLE], number - 1)})
            values = below.hidden.sample(field, rng) if self.feed == "sample" else below.hidden.mean(field)
            pieces.append(values.cpu().numpy())
        return np.concatenate(pieces)

    # -- features ---------------------------------------------------------------------------------

    def _count(self, layer: int) -> int:
        """Return the number of machines up to and including the one with the given hidden layer."""
        size = len(self._machines)
        if not -size <= layer < size:
            raise ValueError(f"layer must be in the range {-size} to {size - 1}, got {layer}")
        return layer % size + 1

    def hidden_maps(self, X: Any, layer: int = -1) -> Array:
        count = self._count(layer)
        return self._map_batches(X, lambda batch: self._up(batch[VISIBLE], count))

    def transform(self, X: Any, layer: int = -1) -> Array:
        return as_rows(self.hidden_maps(X, layer))

    def inverse_transform(self, X: ArrayLike, layer: int = -1) -> Any:
        count = self._count(layer)
        with torch.no_grad():
            return self._outward(self._down(self._hidden_values(X, self.machines_[count - 1]), count))

    @torch.no_grad()
    def reconstruct(self, X: Any, *, steps: int = 1, layer: int = -1) -> Any:
        count = self._count(layer)
        whole_number(steps, "steps")
        pieces = []
        for batch in self._batches(X):
            x = batch[VISIBLE]
            for _ in range(steps):
                x = self._down(self._up(x, count), count)
            pieces.append(x)
        return self._outward(torch.cat(pieces), like=X)

    def components(self, which: ArrayLike | None = None, layer: int = -1) -> Array:
        r"""Return the weights of hidden units as filters of shape (n, \*visible_shape).

        The filter of unit `k` in layer `l` is :math:`W_1^\top \cdots W_l^\top e_k`, where :math:`e_k` is a standard
        basis vector. This approximation treats all units as linear.

        Parameters
        ----------
        which : array of int, optional
            Indices of the hidden units, in row-major order. Default: all units in the layer.
        layer : int, default=-1
            Index of the hidden layer. The lowest layer is 0, and the top layer is -1.
        """
        *below, top = self._machines[: self._count(layer)]
        filters = self._weights(top, which)[VISIBLE]
        for machine in reversed(below):
            filters = machine.links[VISIBLE].to_visible(filters)
        return filters.detach().cpu().numpy()

    def _up(self, x: Tensor, count: int) -> Tensor:
        """Propagate means upward through the lowest `count` machines and return the means of the last hidden layer."""
        for machine in self.machines_[:count]:
            x = machine.hidden_mean(x, check=False)
        return x

    def _down(self, hidden: Tensor, count: int, stop: int = 0, rng: RandomSource | None = None) -> Tensor:
        """Propagate means (or samples, if `rng` is given) downward from machine `count` - 1 to machine `stop`."""
        for number in reversed(range(stop, count)):
            machine = self.machines_[number]
            if rng is None:
                below = machine.visible_mean(hidden, check=False)
            else:
                below = machine.sample_visible(hidden, rng, check=False)
            hidden = self._as_hidden(below[VISIBLE], number)
        return hidden

    def _as_hidden(self, values: Tensor, number: int) -> Tensor:
        """Clamp the visible values of machine `number` to the range of the hidden layer below it."""
        return values.clamp(*self.machines_[number - 1].hidden.statistic_bounds) if number else values

    # -- samples ----------------------------------------------------------------------------------

    @torch.no_grad()
    def _states_from(self, layers: dict[str, Tensor]) -> dict[str, Tensor]:
        return {VISIBLE: self._up(layers[VISIBLE], len(self.machines_) - 1)}

    @torch.no_grad()
    def _run_chains(
        self, n: int, steps: int, rng: RandomSource, start: Layers, known: Any, mean: bool
    ) -> dict[str, Tensor]:
        """Run Gibbs sampling in the top machine, then sample downward once through each of the other machines."""
        if known is not None:
            raise ValueError(
                "sampling from a stack cannot keep entries fixed, so mask must be None and init must not contain NaN; "
                "use inpaint"
            )
        size = len(self.machines_)
        only_machine_gives_means = mean and size == 1
        top = sample(self.machines_[-1], n, steps, rng, init=start, mean=only_machine_gives_means, check=False)
        state = top.visible[VISIBLE]
        # If `mean` is True, the lowest machine returns means instead of samples.
        lowest_sampled = 1 if mean and size > 1 else 0
        state = self._down(self._as_hidden(state, size - 1), size - 1, lowest_sampled, rng)
        return {VISIBLE: self._down(state, lowest_sampled)}

    @torch.no_grad()
    def _fill_in(self, batch: Layers, known: Layers, rng: RandomSource, steps: int, burn_in: int) -> dict[str, Tensor]:
        """Replace unknown entries with averages over samples from upward and downward passes through the stack.

        The result is approximate because the upward pass does not sample from the exact posterior.
        """
        bottom = self.machines_[0]
        unit = bottom.layers[VISIBLE]
        x = keep_known(batch, {VISIBLE: unit.sample(torch.zeros_like(batch[VISIBLE]), rng)}, known)[VISIBLE]
        total = torch.zeros_like(x)

        def step(rng: RandomSource) -> Tensor:
            hidden = x
            for machine in self.machines_:
                hidden = machine.sample_hidden(hidden, rng, check=False)
            field = bottom.visible_fields(self._down(hidden, len(self.machines_), 1, rng))[VISIBLE]
            x.copy_(keep_known(batch, {VISIBLE: unit.sample(field, rng)}, known)[VISIBLE])
            return field

        repeat(step, burn_in, rng, x.device)
        repeat(lambda rng: total.add_(unit.mean(step(rng))), steps, rng, x.device)
        return keep_known(batch, {VISIBLE: total / steps}, known)

    # -- scores -----------------------------------------------------------------------------------

    def score_samples(self, X: Any, *, exact: bool = False) -> Array:
        r"""Return the log-probability of each sample given its reconstructed lowest hidden layer.

        The result is an array of shape (n,). The score of a sample is :math:`\log p_1(X \mid \hat Y_1)`, where
        :math:`\hat Y_1` is computed by propagating means up through the stack and back down. The score measures the
        quality of the reconstruction and is not a likelihood under the model. The computation is always exact, so
        `exact` has no effect.
        """
        size = len(self._machines)
        bottom = self.machine_
        unit = bottom.layers[VISIBLE]

        def score(batch: Mapping[str, Tensor]) -> Tensor:
            x = batch[VISIBLE]
            field = bottom.visible_fields(self._down(self._up(x, size), size, 1))[VISIBLE]
            agreement = (unit.statistic(x) * field).flatten(1).sum(1)
            return agreement - unit.energy(x) - unit.log_normalizer(field)

        return self._map_batches(X, score, complete="score_samples")

    # -- files ------------------------------------------------------------------------------------

    def _write_machines(self, folder: Path, extra: Mapping[str, Any]) -> None:
        write_machines(self.machines_, folder, extra)

    def _read_machines(self, folder: Path) -> list[BoltzmannMachine]:
        return read_stack(folder)[0]


def build_stack(visible: Unit, layers: Any, *, rank: int, hidden: str) -> list[BoltzmannMachine]:
    """Build the machines of a stack on top of a visible layer. The machines have the dtype of that layer.

    See :class:`DeepMVRBM` for the parameters.
    """
    if isinstance(layers, str) or not isinstance(layers, Sequence) or len(layers) == 0:
        raise ValueError(f"layers must be a nonempty sequence, ordered from lowest to highest, got {layers!r}")
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
    """Create the visible units of machine `number`, which model the hidden layer below it."""
    if hidden.stacked_as is None:
        raise ValueError(f"layer {number} cannot be stacked on a layer of {hidden.name} units")
    return make_unit(hidden.stacked_as, hidden.shape)
