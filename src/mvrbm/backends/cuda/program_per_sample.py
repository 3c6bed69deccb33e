"""Base class for backends that use one program per sample and the flat form of :mod:`mvrbm.backends.layout`."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mvrbm.backends.base import UpdateSettings
from mvrbm.backends.cuda.kernel_backend import (
    KernelBackend,
    RunShape,
    default_precision,
    launches_overlap,
    power_of_two,
)
from mvrbm.backends.layout import LayerLayout, Layout
from mvrbm.backends.packing import Packing
from mvrbm.couplings.base import equalize_norms
from mvrbm.data.sources import Source
from mvrbm.updates.state import TrainState

# Number of parameters per program in the step kernel.
_APPLY_BLOCK = 256
# Alignment of each model's parameters, which allows vectorized loads of four values.
_ALIGNMENT = 16


class TransposedPacking(Packing):
    """Packing with transposed label weights.

    The weights have shape (classes, hidden units), so the weights of each class are contiguous.
    """

    def __init__(self, state: TrainState, layout: Layout, *, normalized: bool) -> None:
        super().__init__(state, layout, normalized=normalized)
        self._labels = [layer for layer in layout.layers if layer.is_label]
        self._hidden_area = layout.hidden_area

    @torch.no_grad()
    def pack(self, state: TrainState, params: Tensor, momenta: Tensor) -> None:
        super().pack(state, params, momenta)
        for weights, classes in self._label_weights(params, momenta):
            weights.copy_(weights.view(-1, classes).t().flatten())

    @torch.no_grad()
    def unpack(self, state: TrainState, params: Tensor, momenta: Tensor) -> None:
        params = params.clone()
        momenta = momenta.clone()
        for weights, classes in self._label_weights(params, momenta):
            weights.copy_(weights.view(classes, -1).t().flatten())
        super().unpack(state, params, momenta)

    def _label_weights(self, *arrays: Tensor) -> Iterator[tuple[Tensor, int]]:
        """Yield the weights in the flat arrays and the number of classes for each label."""
        for label in self._labels:
            for array in arrays:
                yield array[label.parameters_at :][: self._hidden_area * label.area], label.area


@dataclass(frozen=True)
class FlatSignature:
    """The signature of a backend with one program per sample (see `KernelBackend`)."""

    run: RunShape
    layout: Layout
    precision: str
    #: The dtype of each layer's data on the device, and the factor that converts the data to states.
    formats: tuple[tuple[torch.dtype, float], ...]

    @classmethod
    def of(
        cls,
        settings: Sequence[UpdateSettings],
        states: Sequence[TrainState],
        sources: Sequence[Source],
        precision: str | None,
    ) -> FlatSignature:
        """Return the signature for a training run with one or more models."""
        machine = states[0].machine
        rank = max(layer.rank for state in states for layer in Layout.of(state.machine).layers)
        layout = Layout.of(machine, rank if len(states) > 1 else None)
        formats = []
        for layer in layout.layers:
            scale = float(machine.layers[layer.name].byte_scale)
            dtypes = {torch.as_tensor(source.whole[layer.name][:0]).dtype for source in sources}
            formats.append((torch.uint8, scale) if dtypes == {torch.uint8} else (torch.float32, 1.0))
        return cls(RunShape.of(settings, sources), layout, precision or default_precision(machine), tuple(formats))

    @property
    def halves(self) -> bool:
        """Whether the operands of matrix products have 16 bits."""
        return self.precision == "fp16"

    @property
    def dot_precision(self) -> str:
        """Triton input precision for products of float32 operands."""
        return "tf32" if self.halves else self.precision


@dataclass(frozen=True)
class SampleData:
    """Training data for all models on the device."""

    #: Flattened samples for each layer. Samples shared by all models are stored only once.
    arrays: list[Tensor]
    #: Category of each sample, if a layer is a label.
    labels: Tensor
    #: Factor and offset, of shape (models, states), that convert samples to the units of the flat form.
    scale: Tensor
    shift: Tensor

    @classmethod
    def allocate(cls, signature: FlatSignature, device: torch.device) -> SampleData:
        """Allocate uninitialized buffers for the data."""
        run = signature.run
        copies = 1 if run.shared_data else run.models
        layers = signature.layout.layers
        arrays = [
            torch.empty(copies * run.n_samples * layer.area, dtype=dtype, device=device)
            for layer, (dtype, _) in zip(layers, signature.formats, strict=True)
        ]
        labeled = any(layer.is_label for layer in layers)
        labels = torch.zeros(copies * run.n_samples if labeled else 1, dtype=torch.int32, device=device)
        scale, shift = torch.zeros(2, run.models, signature.layout.states, device=device)
        return cls(arrays, labels, scale, shift)

    def load(self, signature: FlatSignature, sources: Sequence[Source], packings: Sequence[Packing]) -> None:
        """Copy the data to the device. uint8 data is not converted. Data shared by all models is copied only once."""
        machine = sources[0].machine
        copies = sources[:1] if signature.run.shared_data else sources
        for layer, array in zip(signature.layout.layers, self.arrays, strict=True):
            byte_scale = float(machine.layers[layer.name].byte_scale)
            for block, source in zip(array.view(len(copies), -1), copies, strict=True):
                samples = torch.as_tensor(source.whole[layer.name])
                block.copy_(samples.reshape(-1))
                if samples.dtype == torch.uint8 and array.dtype != torch.uint8:
                    block.mul_(byte_scale)
            if layer.is_label:
                self.labels.copy_(array.view(-1, layer.area).float().argmax(1))
        for number, packing in enumerate(packings):
            self.scale[number] = packing.affine[0]
            self.shift[number] = packing.affine[1]


@dataclass(frozen=True)
class FlatBuffers:
    """Device buffers for the parameters and the update step. Consecutive models are `stride` elements apart."""

    stride: int
    # A launch may read one set of parameters and write the other. Between launches, the first set is current.
    params: Tensor  # (2, models, size)
    momenta: Tensor  # (2, models, size)
    # If steps are part of the next launch, one gradient is read, one is accumulated and one is cleared.
    gradients: Tensor  # (3, models, size)
    gains: Tensor  # (2, models, factors, terms); a factor's gain is the sum over terms
    sizes: Tensor  # (models, factors, blocks); largest entry of a factor in each block, may be empty
    multiplier: Tensor  # (models, size); multiplier for gradients (see Packing.multiplier)
    gain_of: Tensor  # (size,); factor index, -1 for biases, number of factors for label weights
    rates: Tensor
    clock: Tensor  # update number that corresponds to batch 0 of this epoch
    chains: Tensor  # (models, chains, states)

    @classmethod
    def allocate(
        cls, signature: FlatSignature, rates: Tensor, *, terms: int, by_blocks: bool, chain_dtype: torch.dtype
    ) -> FlatBuffers:
        """Allocate buffers. If `by_blocks` is True, each step records the largest entries of the factors."""
        layout = signature.layout
        models = signature.run.models
        size = layout.size
        stride = -(-size // _ALIGNMENT) * _ALIGNMENT
        device = rates.device
        factors = n_factors(layout)
        blocks = power_of_two(-(-size // _APPLY_BLOCK)) if by_blocks else 0
        room = -(-models * factors * terms // _ALIGNMENT) * _ALIGNMENT
        gains = torch.zeros(2, room, device=device)[:, : models * factors * terms]
        gain_of = torch.full((size,), -1, dtype=torch.int32, device=device)
        numbers = iter(range(factors))
        for layer, (*parts, _) in zip(layout.layers, layout.split(gain_of)[0], strict=True):
            for part in parts:
                part.fill_(factors if layer.is_label else next(numbers))
        return cls(
            stride=stride,
            params=torch.zeros(2, models, stride, device=device)[..., :size],
            momenta=torch.zeros(2, models, stride, device=device)[..., :size],
            gradients=torch.zeros(3, models, stride, device=device)[..., :size],
            gains=gains.unflatten(1, (models, factors, terms)),
            sizes=torch.zeros(models, factors, blocks, device=device),
            multiplier=torch.zeros(models, stride, device=device)[:, :size],
            gain_of=gain_of,
            rates=rates,
            clock=torch.zeros((), dtype=torch.int64, device=device),
            chains=torch.zeros(models, signature.run.n_chains, layout.states, dtype=chain_dtype, device=device),
        )


class PerProgramBackend(KernelBackend):
    """Base class for backends that use one program per sample and accumulate gradients in global memory.

    The precision of matrix products is "fp16", "tf32", "tf32x3" or "ieee". "fp16" and "tf32" use tensor cores and round
    operands to 11 significant bits and accumulate in float32. "fp16" cannot represent states above 65,504. "tf32x3"
    computes each product as three TF32 products, which is nearly as accurate as float32. "ieee" uses plain float32
    without tensor cores.
    """

    updates_per_graph = 1000
    signature: FlatSignature
    packings: list[TransposedPacking]

    def __init__(
        self,
        settings: Sequence[UpdateSettings],
        states: Sequence[TrainState],
        sources: Sequence[Source],
        *,
        precision: str | None = None,
    ) -> None:
        super().__init__(settings, states, sources)
        self.signature = FlatSignature.of(settings, states, sources, precision)
        self.layout = self.signature.layout
        self._overlapping = launches_overlap(self._device)
        self.packings = []
        self._data = SampleData.allocate(self.signature, self._device)
        self._buffers = self.allocate()
        self.begin(states, sources)

    @abstractmethod
    def allocate(self) -> FlatBuffers:
        """Choose the launch settings for the kernels and allocate matching buffers."""

    def signature_of(
        self, settings: Sequence[UpdateSettings], states: Sequence[TrainState], sources: Sequence[Source]
    ) -> FlatSignature:
        return FlatSignature.of(settings, states, sources, self.signature.precision)

    @property
    def params(self) -> Tensor:
        return self._buffers.params[0]

    @property
    def momenta(self) -> Tensor:
        return self._buffers.momenta[0]

    def changing(self) -> tuple[Tensor, ...]:
        return self.params, self.momenta, self._buffers.chains

    def clear_gradients(self) -> None:
        self._buffers.gradients.zero_()

    def load_run(self, states: Sequence[TrainState], sources: Sequence[Source]) -> None:
        normalized = self.run.normalized
        self.packings = [TransposedPacking(state, self.layout, normalized=normalized) for state in states]
        self._data.load(self.signature, sources, self.packings)
        self._buffers.multiplier.copy_(torch.stack([packing.multiplier for packing in self.packings]))
        self.clear_gradients()

    @torch.no_grad()
    def balance(self, states: Sequence[TrainState]) -> None:
        for params in self.params:
            for *factors, _ in self.layout.split(params)[0]:
                equalize_norms(factors, keep=0)

    # -- chains -----------------------------------------------------------------------------------

    def chain_data(self, number: int) -> dict[str, Tensor]:
        found = {}
        for layer in self.layout.layers:
            scale, shift = self._affine(number, layer)
            data = (layer.states_of(self._buffers.chains[number]) + shift) / scale
            found[layer.name] = data.reshape(-1, *layer.shape)
        return found

    def set_chains(self, number: int, data: Mapping[str, Tensor]) -> None:
        for layer in self.layout.layers:
            scale, shift = self._affine(number, layer)
            states = data[layer.name].reshape(self.run.n_chains, -1) * scale - shift
            layer.states_of(self._buffers.chains[number]).copy_(states)

    def _affine(self, number: int, layer: LayerLayout) -> tuple[Tensor, Tensor]:
        return layer.states_of(self._data.scale[number]), layer.states_of(self._data.shift[number])

    def start_chains(self, number: int, batch: int, update: int) -> None:
        samples = {}
        chosen = self.run.batch_of_chains(self.rows_of(number, batch))
        for layer, array, (_, factor) in zip(
            self.layout.layers, self._data.arrays, self.signature.formats, strict=True
        ):
            block = array.view(-1, self.n_samples, layer.area)[0 if self.run.shared_data else number]
            samples[layer.name] = block[chosen].float() * factor
        self.set_chains(number, samples)

    # -- updates ----------------------------------------------------------------------------------

    def compute_updates(self, first: int, count: int, update: int) -> None:
        self._buffers.clock.fill_(update - first)
        self.replay((first, count), lambda n: self.launch_series(first, n), count)

    @abstractmethod
    def launch_series(self, first: int, count: int) -> None:
        """Launch `count` updates, starting at batch `first`."""

    def data_stride(self, layer: LayerLayout) -> int:
        """Return the number of elements between the data of consecutive models."""
        return 0 if self.run.shared_data else self.n_samples * layer.area

    def launch_options(self) -> dict[str, bool]:
        """Return the launch options for overlapping kernels."""
        return {"launch_pdl": True} if self._overlapping else {}

    def find_sizes(self, layer: LayerLayout) -> None:
        """Compute the largest absolute value in each factor of a layer. Later steps keep these values up to date."""
        sizes = self._buffers.sizes
        sizes.zero_()
        start = layer.parameters_at
        for number, shape in enumerate(layer.factors):
            end = start + math.prod(shape)
            sizes[:, number, 0] = self.params[:, start:end].abs().amax(1)
            start = end

    def launch_step(self, turn: int, batch: int) -> None:
        """Launch the step for a batch with the buffers of launch number `turn`.

        The kernel writes the new parameters to the first set of buffers.
        """
        from mvrbm.backends.cuda.step_kernels import apply

        buffers = self._buffers
        size = self.layout.size
        last = max(turn - 1, 0)
        _, _, factors, terms = buffers.gains.shape
        apply[(-(-size // _APPLY_BLOCK), self.run.models)](
            buffers.params[last % 2], buffers.momenta[last % 2], buffers.gradients[last % 3], self.params, self.momenta,
            buffers.gains[last % 2], buffers.sizes, buffers.gain_of, buffers.multiplier, buffers.rates, buffers.clock,
            batch, SIZE=size, STRIDE=buffers.stride, N_GAINS=factors, TERMS=terms, NORMALIZED=self.run.normalized,
            BLOCKS=buffers.sizes.shape[2], BLOCK=_APPLY_BLOCK, PDL=self._overlapping, num_warps=2,
            **self.launch_options(),
        )  # fmt: skip


def n_factors(layout: Layout) -> int:
    """Return the number of factors that have a gain. Label weights have no gain."""
    return sum(len(layer.factors) for layer in layout.layers if not layer.is_label)


def tile_of(size: int) -> int:
    """Return the smallest valid tile size (a power of two, at least 16) that covers an axis of the given size."""
    return max(16, power_of_two(size))
