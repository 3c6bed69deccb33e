"""Chains started exactly at p stay at p, whichever sampler moves them; broken samplers are found out.

The exact distributions are summed state by state in NumPy from the biases and the full weights, and the
starting states are drawn from them with NumPy: nothing is shared with the samplers. Every statistical
check returns a p-value. A right sampler must stay above `FALSE_ALARM`, one broken on purpose must fall
below it.
"""

import dataclasses
import importlib.util
import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import expit, logsumexp, softmax

from environment import fixed_seeds
from mvrbm import CP, MPO, Bernoulli, BoltzmannMachine, Categorical, Dense, Gaussian, Kronecker, RandomSource
from mvrbm.likelihood import annealed_importance_sampling
from mvrbm.models import multimodal_mvrbm, replicated_softmax
from mvrbm.sampling import ParallelTempering, TemperedPath, conditional_mean, gibbs, mean_field, sample, tempering
from mvrbm.sampling import chains as sampling
from tables import UNITS, VARIANTS, log_variance

# With another seed, each check of a right sampler fails once in ten thousand runs.
FALSE_ALARM = 1e-4
N = 20_000


@fixed_seeds()  # whether a deliberate error shows depends on the machine
def randomized(machine, seed, std=1.0, bias=0.7):
    """Give a machine weights and biases large enough that every term matters."""
    rng = RandomSource(seed)
    machine = machine.double()
    with torch.no_grad():
        for unit in (*machine.layers.values(), machine.hidden):
            for parameter in unit.parameters():  # bias, and the log-variance of Gaussian units
                parameter.copy_(bias * rng.normal(parameter.shape, parameter))
        for link in machine.links.values():
            link.initialize(rng, std)
    return machine


def build(visible, hidden, coupling, seed=1, **kwargs):
    return randomized(BoltzmannMachine(visible, hidden, coupling), seed, **kwargs)


def two_layers():
    layers = {"image": Bernoulli((2, 2)), "label": Categorical(3)}
    return build(layers, Bernoulli((2, 2)), {"image": Kronecker(), "label": Dense()})


DISCRETE = {
    "binary": lambda: build(Bernoulli(4), Bernoulli(3), Dense()),
    "matrix": lambda: build(Bernoulli((2, 2)), Bernoulli((2, 3)), Kronecker(2), seed=2),
    "mpo": lambda: build(Bernoulli((2, 2, 1)), Bernoulli((1, 2, 2)), MPO(2)),
    "cp": lambda: build(Bernoulli((2, 2)), Bernoulli(3), CP(2)),
    "categorical": lambda: build(Categorical((2, 3)), Bernoulli(3), Dense()),
    "categorical hidden": lambda: build(Bernoulli(4), Categorical((2, 3)), Dense()),
    "gaussian hidden": lambda: build(Bernoulli(4), Gaussian(2), Dense(), std=0.8),
    "two layers": two_layers,
    "strong": lambda: build(Bernoulli(4), Bernoulli(3), Dense(), seed=3, std=3.0),
}
# Every other kind of discrete unit of the table, on either side.
for _name, _row in UNITS.items():
    if _row.probability is not None and _name not in ("bernoulli", "categorical"):
        _unit = VARIANTS[next(iter(_row.variants))]
        _shape = (2, 2) if _row.unit.entry_modes else (2,)  # two sites, of which one can be known
        DISCRETE[_name] = lambda row=_row, unit=_unit, shape=_shape: build(
            unit(shape), Bernoulli(3), Dense(), std=row.weights
        )
        DISCRETE[f"{_name} hidden"] = lambda row=_row, unit=_unit: build(
            Bernoulli(3), unit((2,)), Dense(), std=row.weights
        )

REAL = {
    # Seeds of machines whose weights are large enough for every deliberate error below to show.
    "gaussian": lambda: build(Gaussian(3), Bernoulli(3), Dense(), seed=3, std=1.5),
    "gaussian matrix": lambda: build(Gaussian((2, 2)), Bernoulli((2, 1)), Kronecker(2), std=1.5),
    "gaussian, categorical hidden": lambda: build(Gaussian(3), Categorical((1, 3)), Dense(), std=1.5),
    "gaussian and binary": lambda: randomized(
        multimodal_mvrbm({"depth": Gaussian((1, 2)), "image": Bernoulli((1, 2))}, (1, 3)), 3, std=1.5
    ),
}


# -- exact distributions ----------------------------------------------------------------------------


def rows(n_sites, values):
    """All states of some sites: (count, n_sites * size of a value)."""
    return np.array([np.ravel(state) for state in itertools.product(values, repeat=n_sites)], dtype=float)


def states_of(unit):
    return rows(unit.n_sites, UNITS[unit.name].site_values(unit.shape[-1]).numpy())


def base_of(unit, x):
    """Energy of states (n, entries) beyond -<b, x>."""
    return UNITS[unit.name].base(torch.tensor(x)).sum(1).numpy()


def flat_numpy(parameter, unit):
    return parameter.detach().expand(unit.shape).reshape(-1).numpy()


class Flat:
    """A machine as two vectors and one matrix: the visible layers side by side."""

    def __init__(self, machine):
        self.machine = machine
        self.sizes = {name: int(np.prod(unit.shape)) for name, unit in machine.layers.items()}
        self.b = np.concatenate([flat_numpy(unit.bias, unit) for unit in machine.layers.values()])
        self.c = flat_numpy(machine.hidden.bias, machine.hidden)
        weights = [link.dense().detach().reshape(len(self.c), -1).numpy() for link in machine.links.values()]
        self.w = np.hstack(weights)  # (hidden, visible)
        self.real = np.concatenate([np.full(self.sizes[n], unit.gaussian) for n, unit in machine.layers.items()])
        scales = [
            np.exp(flat_numpy(log_variance(unit), unit) / 2) if unit.gaussian else np.ones(self.sizes[name])
            for name, unit in machine.layers.items()
        ]
        self.s = np.concatenate(scales)
        hidden = machine.hidden
        self.hidden_scale = np.exp(flat_numpy(log_variance(hidden), hidden) / 2) if hidden.gaussian else None
        self.y = None if hidden.gaussian else states_of(hidden)
        self.base_y = None if hidden.gaussian else base_of(hidden, self.y)

    def layers(self, x):
        """Vectors (n, visible) as a batch."""
        pieces = np.split(x, np.cumsum(list(self.sizes.values()))[:-1], axis=1)
        return {
            name: torch.tensor(piece).reshape(-1, *unit.shape)
            for (name, unit), piece in zip(self.machine.layers.items(), pieces, strict=True)
        }

    def vectors(self, layers):
        """A batch as vectors (n, visible)."""
        return np.hstack([layers[name].flatten(1).numpy() for name in self.sizes])

    def hidden_log_sum(self, field):
        """Log of the sum over hidden states in a field (n, hidden)."""
        if self.y is None:
            widths = 0.5 * np.log(2 * np.pi * self.hidden_scale**2)
            return (widths + self.c * field / self.hidden_scale + field**2 / 2).sum(1)
        return logsumexp(self.y @ self.c - self.base_y + field @ self.y.T, axis=1)

    def hidden_statistic_mean(self, field):
        """Mean of T(y) in a field (hidden,)."""
        if self.y is None:
            return self.c / self.hidden_scale + field
        return softmax(self.y @ (self.c + field) - self.base_y) @ self.y

    def base(self, center):
        """Fields at beta = 0, on the hidden and on the visible side."""
        if center is None:
            return np.zeros(len(self.c)), np.zeros(len(self.b))
        up = self.w @ (center / self.s)
        return up, self.hidden_statistic_mean(up) @ self.w


class Enumerated(Flat):
    """p of discrete visible layers, as a list of states and their probabilities."""

    def __init__(self, machine, states=None):
        super().__init__(machine)
        every = itertools.product(*(states_of(unit) for unit in machine.layers.values()))
        x = np.array([np.concatenate(parts) for parts in every]) if states is None else states
        self.levels = x.max() + 1
        self.x = x[np.argsort(self._codes(x))]
        parts = np.split(self.x, np.cumsum(list(self.sizes.values()))[:-1], axis=1)
        self.base_x = sum(base_of(unit, part) for unit, part in zip(machine.layers.values(), parts, strict=True))

    def _codes(self, x):
        return (x @ self.levels ** np.arange(x.shape[1])).astype(np.int64)

    def probabilities(self, beta=1.0, center=None):
        up, down = self.base(center)
        own = self.x @ (self.b + (1 - beta) * down) - self.base_x
        return softmax(own + self.hidden_log_sum(beta * self.x @ self.w.T + (1 - beta) * up))

    def given(self, known, state):
        """p of every state given that the known entries are those of one state."""
        agrees = (self.x == state)[:, known].all(1)
        p = self.probabilities() * agrees
        return p / p.sum()

    def draw(self, p, seed, n=N):
        return self.x[np.random.default_rng(seed).choice(len(p), n, p=p)]

    def index(self, x):
        """Number of each state, -1 for what is no state."""
        codes, known = self._codes(x), self._codes(self.x)
        place = np.searchsorted(known, codes).clip(max=len(known) - 1)
        same = (self.x[place] == x).all(1)
        return np.where(same, place, -1)


class Mixture(Flat):
    """p of visible layers with Gaussian entries: one component a hidden state, independent entries in each."""

    def __init__(self, machine, beta=1.0, center=None):
        super().__init__(machine)
        up, down = self.base(center)
        self.field = beta * self.y @ self.w + (1 - beta) * down  # (components, visible)
        real = self.b * self.field / self.s + self.field**2 / 2
        normalizers = np.where(self.real, real, np.logaddexp(0, self.b + self.field))
        self.p = softmax(self.y @ (self.c + (1 - beta) * up) + normalizers.sum(1))
        self.means = np.where(self.real, self.b + self.s * self.field, expit(self.b + self.field))

    def given(self, known, value):
        """Weights of the components given some real entries."""
        logs = stats.norm.logpdf(value[known], self.means[:, known], self.s[known]).sum(1)
        return softmax(np.log(self.p) + logs)

    def draw(self, p, seed, n=N):
        rng = np.random.default_rng(seed)
        means = self.means[rng.choice(len(p), n, p=p)]
        real = means + self.s * rng.standard_normal(means.shape)
        return np.where(self.real, real, rng.random(means.shape) < means)

    def p_value(self, x, p, entries=None, seed=0):
        """Compare real entries, and random sums of them, with their exact distribution functions."""
        entries = np.flatnonzero(self.real) if entries is None else entries
        turned = np.random.default_rng(seed).standard_normal((2, len(entries)))
        found = []
        for direction in (*np.eye(len(entries)), *turned):
            centers = self.means[:, entries] @ direction
            width = np.sqrt(direction**2 @ self.s[entries] ** 2)
            found.append(ks(x[:, entries] @ direction, p, centers, width))
        return worst(found)


def ks(values, weights, centers, width):
    """p-value of values against a mixture of normals."""
    return stats.kstest(values, lambda t: (weights * stats.norm.cdf((t[:, None] - centers) / width)).sum(1)).pvalue


def chi_square(index, p):
    """p-value of state numbers against probabilities; states that cannot be have p-value 0."""
    if (index < 0).any():
        return 0.0
    seen, expected = np.bincount(index, minlength=len(p)), len(index) * p
    if seen[p == 0].any():
        return 0.0
    # Rare states are counted together, so that every cell expects at least five.
    order = np.argsort(p)
    together = max(np.searchsorted(np.cumsum(expected[order]), 5) + 1, int((expected < 5).sum()))
    cells = np.r_[0, np.arange(together, len(p))]
    seen, expected = np.add.reduceat(seen[order], cells), np.add.reduceat(expected[order], cells)
    statistic = ((seen - expected) ** 2 / expected).sum()
    return float(stats.chi2.sf(statistic, len(cells) - 1))


def worst(p_values):
    """Smallest of several p-values, times their number (Bonferroni)."""
    return min(1.0, len(p_values) * min(p_values))


# -- checks: p-values of samplers started at p ------------------------------------------------------


def gibbs_discrete(machine, seed=0, steps=3):
    """The joint state of both sides after some steps, where the hidden side is discrete."""
    exact = Enumerated(machine)
    p = exact.probabilities()
    state = gibbs(machine, exact.layers(exact.draw(p, seed)), steps, RandomSource(seed))
    x = exact.index(exact.vectors(state.visible))
    if exact.y is None:
        return chi_square(x, p)
    y = (exact.y[None] == state.hidden.flatten(1).numpy()[:, None]).all(2)
    own = (exact.x @ exact.b - exact.base_x)[:, None] + exact.y @ exact.c - exact.base_y
    joint = softmax(own + exact.x @ exact.w.T @ exact.y.T)
    if (x < 0).any() or not y.any(1).all():
        return 0.0
    return worst([chi_square(x, p), chi_square(x * len(exact.y) + y.argmax(1), joint.reshape(-1))])


def gibbs_real(machine, seed=0, steps=3):
    exact = Mixture(machine)
    state = gibbs(machine, exact.layers(exact.draw(exact.p, seed)), steps, RandomSource(seed))
    x = exact.vectors(state.visible)
    found = [exact.p_value(x, exact.p)]
    for entry in np.flatnonzero(~exact.real):  # binary entries, and the real ones given each of them
        bit = x[:, entry].astype(int)
        one = exact.p @ exact.means[:, entry]
        found.append(chi_square(bit, np.array([1 - one, one])))
        if bit.any():
            found.append(exact.p_value(x[bit == 1], exact.p * exact.means[:, entry] / one))
    return worst(found)


def clamped_discrete(machine, seed=0, steps=4):
    """Some entries are held; the others start at p given these."""
    exact = Enumerated(machine)
    known = {name: torch.zeros(unit.shape, dtype=torch.bool) for name, unit in machine.layers.items()}
    first = next(iter(known))
    known[first][0 if known[first].ndim > 1 else slice(len(known[first]) // 2)] = True
    flat = np.concatenate([mask.reshape(-1).numpy() for mask in known.values()])
    full = exact.x[exact.x[:, flat].sum(1) == exact.x[:, flat].sum(1).max()]  # ones pull, zeros do not
    p = exact.given(flat, full[0])
    state = gibbs(machine, exact.layers(exact.draw(p, seed)), steps, RandomSource(seed), mask=known)
    return chi_square(exact.index(exact.vectors(state.visible)), p)


def clamped_real(machine, seed=0, steps=4):
    exact = Mixture(machine)
    held, known = exact.b + exact.s * np.linspace(-2, 2, len(exact.b)), np.arange(len(exact.b)) % 3 == 0
    p = exact.given(known, held)
    start = np.where(known, held, exact.draw(p, seed))
    mask = {name: part[0].bool() for name, part in exact.layers(known[None].astype(float)).items()}
    state = gibbs(machine, exact.layers(start), steps, RandomSource(seed), mask=mask)
    x = exact.vectors(state.visible)
    if (x[:, known] != held[known]).any():
        return 0.0
    return exact.p_value(x, p, np.flatnonzero(~known))


BETAS = [0.1, 0.5, 0.8, 1.0]


def a_center(machine):
    flat = Flat(machine)
    return np.where(flat.real, flat.b + flat.s, np.linspace(0.1, 0.6, len(flat.b)))


def tempered(machine, laws, draws, center, seed, steps):
    """Put exact draws at every temperature, take steps, and return the states by temperature."""
    flat = Flat(machine)
    chains = ParallelTempering(
        machine, N // 2, BETAS, rng=RandomSource(seed), center=None if center is None else flat.layers(center[None])
    )
    for name in chains.visible:
        chains.visible[name] = torch.stack([flat.layers(x)[name] for x in draws])
    coldest = chains.step(steps)
    for name, array in coldest.items():
        assert torch.equal(array, chains.visible[name][-1])
    return [flat.vectors({n: array[t] for n, array in chains.visible.items()}) for t in range(len(laws))]


def tempering_discrete(machine, seed=0, steps=3):
    """Every temperature keeps its own law, and temperatures stay independent of each other."""
    exact, center = Enumerated(machine), a_center(machine)
    laws = [exact.probabilities(beta, center) for beta in BETAS]
    draws = [exact.draw(p, (seed, t), N // 2) for t, p in enumerate(laws)]
    index = [exact.index(x) for x in tempered(machine, laws, draws, center, seed, steps)]
    found = [chi_square(i, p) for i, p in zip(index, laws, strict=True)]
    for t in range(len(BETAS) - 1):
        pair = np.outer(laws[t], laws[t + 1]).reshape(-1)
        found.append(chi_square(index[t] * len(exact.x) + index[t + 1], pair))
    return worst(found)


def tempering_real(machine, seed=0, steps=3):
    center = a_center(machine)
    laws = [Mixture(machine, beta, center) for beta in BETAS]
    draws = [law.draw(law.p, (seed, t), N // 2) for t, law in enumerate(laws)]
    states = tempered(machine, laws, draws, center, seed, steps)
    return worst([law.p_value(x, law.p) for law, x in zip(laws, states, strict=True)])


LENGTHS = (1, 2, 3)


def document_laws(machine):
    """Exact p of documents of each length: the rows beyond it do not exist."""
    n_rows, n_words = machine.layers["words"].shape
    for length in LENGTHS:
        words = rows(length, np.eye(n_words))
        yield Enumerated(machine, np.hstack([words, np.zeros((len(words), (n_rows - length) * n_words))]))


def documents_p_value(machine, move, seed=0):
    """Documents of several lengths side by side in one batch."""
    laws = list(document_laws(machine))
    starts = [law.draw(law.probabilities(), (seed, i), N // 4) for i, law in enumerate(laws)]
    moved = laws[0].vectors(move(laws[0].layers(np.vstack(starts)), RandomSource(seed)))
    parts = zip(laws, np.split(moved, len(laws)), strict=True)
    return worst([chi_square(law.index(x), law.probabilities()) for law, x in parts])


def topics():
    return randomized(replicated_softmax(3, 3, 2), 3, std=2.0)


def gibbs_documents(machine, seed=0):
    return documents_p_value(machine, lambda x, rng: gibbs(machine, x, 3, rng).visible, seed)


def tempering_documents(machine, seed=0):
    def move(x, rng):
        n = len(x["words"])
        chains = ParallelTempering(machine, n, [0.4, 1.0], rng=rng, init=x)
        return chains.step(11)  # the hot chains start at the wrong law and need some steps to reach theirs

    return documents_p_value(machine, move, seed)


CHECKS = [
    *[pytest.param(gibbs_discrete, make, id=f"gibbs: {name}") for name, make in DISCRETE.items()],
    *[pytest.param(gibbs_real, make, id=f"gibbs: {name}") for name, make in REAL.items()],
    *[pytest.param(clamped_discrete, make, id=f"clamped: {name}") for name, make in DISCRETE.items()],
    *[pytest.param(clamped_real, REAL[name], id=f"clamped: {name}") for name in list(REAL)[:3]],
    *[pytest.param(tempering_discrete, make, id=f"tempering: {name}") for name, make in DISCRETE.items()],
    *[pytest.param(tempering_real, REAL[name], id=f"tempering: {name}") for name in list(REAL)[:3]],
    pytest.param(gibbs_documents, topics, id="gibbs: documents"),
    pytest.param(tempering_documents, topics, id="tempering: documents"),
]


@pytest.mark.parametrize(("check", "make"), CHECKS)
def test_chains_started_at_p_stay_at_p(check, make):
    assert check(make()) > FALSE_ALARM


def test_false_alarms_are_as_rare_as_stated():
    machine = DISCRETE["binary"]()
    found = [gibbs_discrete(machine, seed, steps=1) for seed in range(100, 200)]
    # Were the p-values too small as a rule, so would be the least of them.
    assert min(found) * len(found) > 1e-3


# -- the same checks on broken samplers -------------------------------------------------------------

right = {
    "between": TemperedPath.between,
    "gibbs_step": sampling.gibbs_step,
    "hidden_field": BoltzmannMachine.hidden_field,
    "keep_known": sampling.keep_known,
    "energies": TemperedPath.energies,
    "visible_fields": BoltzmannMachine.visible_fields,
}


def bernoulli_without_noise(self, field, rng):
    return (self.mean(field) > 0.5).to(field.dtype)


def bernoulli_without_bias(self, field, rng):
    return (rng.uniform(field.shape, field) < torch.sigmoid(field)).to(field.dtype)


def bernoulli_mean_for_sample(self, field, rng):
    return self.mean(field)


def categorical_without_noise(self, field, rng):
    return torch.nn.functional.one_hot(self.mean(field).argmax(-1), self.shape[-1]).to(field.dtype)


def categorical_without_bias(self, field, rng):
    below = rng.uniform((*field.shape[:-1], 1), field) >= torch.softmax(field, -1).cumsum(-1)
    return torch.nn.functional.one_hot(below.sum(-1).clamp(max=self.shape[-1] - 1), self.shape[-1]).to(field.dtype)


def gaussian_without_noise(self, field, rng):
    return self.mean(field)


def gaussian_without_bias(self, field, rng):
    return self.scale * (field + rng.normal(field.shape, field))


def gaussian_with_unit_noise(self, field, rng):
    return self.mean(field) + rng.normal(field.shape, field)


def gaussian_with_variance_for_scale(self, field, rng):
    return self.mean(field) + self.scale**2 * rng.normal(field.shape, field)


def first_layer_only(self, visible):
    name = next(iter(self.layers))
    return self.links[name].to_hidden(self.layers[name].statistic(visible[name]))


def weak_visible_fields(self, hidden):
    return {name: 0.7 * field for name, field in right["visible_fields"](self, hidden).items()}


def mask_inverted(known, other, masks):
    return right["keep_known"](known, other, {n: None if m is None else ~m for n, m in masks.items()})


def mask_ignored(known, other, masks):
    return dict(other)


def known_is_not_seen(fields, visible, rng, masks):
    seen = {n: x if masks[n] is None else x.masked_fill(masks[n], 0) for n, x in visible.items()}
    state = right["gibbs_step"](fields, seen, rng, masks)
    return dataclasses.replace(state, visible=right["keep_known"](visible, state.visible, masks))


def always_exchanged(self, betas, field, pull):
    return torch.zeros(2, len(field), dtype=torch.float64)


def energies_negated(self, betas, field, pull):
    return -right["energies"](self, betas, field, pull)


def beta_squared(self, betas, field, pull):
    return right["energies"](self, betas**2, field, pull)


def base_pull_forgotten(self, betas, field, pull):
    return right["energies"](self, betas, field, torch.zeros_like(pull))


def base_field_not_faded(self, base, field, beta):
    return base + right["between"](self, torch.zeros_like(base), field, beta)


def base_field_forgotten(self, base, field, beta):
    return right["between"](self, torch.zeros_like(base), field, beta)


def no_padding(self, x):
    return None


BROKEN = [
    (gibbs_discrete, DISCRETE["binary"], Bernoulli, "sample", bernoulli_without_noise),
    (gibbs_discrete, DISCRETE["binary"], Bernoulli, "sample", bernoulli_without_bias),
    (gibbs_discrete, DISCRETE["gaussian hidden"], Bernoulli, "sample", bernoulli_mean_for_sample),
    (gibbs_discrete, DISCRETE["gaussian hidden"], Gaussian, "sample", gaussian_without_noise),
    (gibbs_discrete, DISCRETE["gaussian hidden"], Gaussian, "sample", gaussian_without_bias),
    (gibbs_discrete, DISCRETE["gaussian hidden"], Gaussian, "sample", gaussian_with_unit_noise),
    (gibbs_discrete, DISCRETE["categorical"], Categorical, "sample", categorical_without_noise),
    (gibbs_discrete, DISCRETE["categorical"], Categorical, "sample", categorical_without_bias),
    (gibbs_discrete, DISCRETE["categorical hidden"], Categorical, "sample", categorical_without_bias),
    (gibbs_discrete, DISCRETE["two layers"], BoltzmannMachine, "hidden_field", first_layer_only),
    (gibbs_discrete, DISCRETE["matrix"], BoltzmannMachine, "visible_fields", weak_visible_fields),
    (gibbs_real, REAL["gaussian"], Gaussian, "sample", gaussian_without_noise),
    (gibbs_real, REAL["gaussian"], Gaussian, "sample", gaussian_without_bias),
    (gibbs_real, REAL["gaussian"], Gaussian, "sample", gaussian_with_unit_noise),
    (gibbs_real, REAL["gaussian"], Gaussian, "sample", gaussian_with_variance_for_scale),
    (gibbs_real, REAL["gaussian"], Bernoulli, "sample", bernoulli_mean_for_sample),
    (gibbs_real, REAL["gaussian and binary"], BoltzmannMachine, "hidden_field", first_layer_only),
    (gibbs_documents, topics, Categorical, "absent", no_padding),
    (gibbs_documents, topics, Categorical, "sample", categorical_without_bias),
    (clamped_discrete, DISCRETE["matrix"], sampling, "keep_known", mask_inverted),
    (clamped_discrete, DISCRETE["matrix"], sampling, "keep_known", mask_ignored),
    (clamped_discrete, DISCRETE["matrix"], sampling, "gibbs_step", known_is_not_seen),
    (clamped_discrete, DISCRETE["two layers"], sampling, "keep_known", mask_inverted),
    (clamped_discrete, DISCRETE["two layers"], sampling, "gibbs_step", known_is_not_seen),
    (clamped_real, REAL["gaussian"], sampling, "keep_known", mask_inverted),
    (clamped_real, REAL["gaussian"], sampling, "gibbs_step", known_is_not_seen),
    (clamped_real, REAL["gaussian"], Gaussian, "sample", gaussian_without_noise),
    (tempering_discrete, DISCRETE["strong"], TemperedPath, "energies", always_exchanged),
    (tempering_discrete, DISCRETE["strong"], TemperedPath, "energies", energies_negated),
    (tempering_discrete, DISCRETE["strong"], TemperedPath, "energies", beta_squared),
    (tempering_discrete, DISCRETE["matrix"], TemperedPath, "energies", base_pull_forgotten),
    (tempering_discrete, DISCRETE["matrix"], TemperedPath, "between", base_field_not_faded),
    (tempering_discrete, DISCRETE["matrix"], TemperedPath, "between", base_field_forgotten),
    (tempering_discrete, DISCRETE["categorical hidden"], TemperedPath, "energies", always_exchanged),
    (tempering_real, REAL["gaussian"], TemperedPath, "energies", always_exchanged),
    (tempering_real, REAL["gaussian"], TemperedPath, "energies", beta_squared),
    (tempering_real, REAL["gaussian"], TemperedPath, "energies", base_pull_forgotten),
    (tempering_documents, topics, Categorical, "absent", no_padding),
    (tempering_documents, topics, TemperedPath, "energies", always_exchanged),
]


@pytest.mark.parametrize(
    ("check", "make", "place", "name", "wrong"),
    [pytest.param(*row, id=f"{row[0].__name__}-{row[4].__name__}") for row in BROKEN],
)
def test_a_broken_sampler_is_found_out(monkeypatch, check, make, place, name, wrong):
    machine = make()
    monkeypatch.setattr(place, name, wrong)
    assert check(machine) < FALSE_ALARM


# -- Gaussian on both sides -------------------------------------------------------------------------


def gaussian_law(machine):
    """Mean and covariance of the visible side: in standard deviations the precision is I - W'W."""
    flat = Flat(machine)
    covariance = np.linalg.inv(np.eye(len(flat.b)) - flat.w.T @ flat.w)
    mean = covariance @ (flat.b / flat.s + flat.w.T @ (flat.c / flat.hidden_scale))
    return flat, flat.s * mean, flat.s[:, None] * covariance * flat.s


def two_gaussian_sides():
    machine = build(Gaussian((2, 2)), Gaussian((2, 2)), Kronecker())
    with torch.no_grad():
        machine.links["visible"].factors[0].mul_(0.8 / machine.gaussian_norm())  # bounded, and far from independent
    return machine


def gaussian_p_value(machine, seed=0):
    flat, mean, covariance = gaussian_law(machine)
    rng = np.random.default_rng(seed)
    start = rng.multivariate_normal(mean, covariance, N)
    x = flat.vectors(gibbs(machine, flat.layers(start), 3, RandomSource(seed)).visible)
    directions = [*np.eye(len(mean)), *rng.standard_normal((3, len(mean)))]
    return worst([ks(x @ d, np.ones(1), d @ mean, np.sqrt(d @ covariance @ d)) for d in directions])


def test_two_gaussian_sides_stay_at_p():
    assert gaussian_p_value(two_gaussian_sides()) > FALSE_ALARM


@pytest.mark.parametrize("wrong", [gaussian_without_noise, gaussian_with_unit_noise, gaussian_without_bias])
def test_two_broken_gaussian_sides_are_found_out(monkeypatch, wrong):
    machine = two_gaussian_sides()
    monkeypatch.setattr(Gaussian, "sample", wrong)
    assert gaussian_p_value(machine) < FALSE_ALARM


# -- convergence ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DISCRETE if name != "strong"])  # it mixes slowly
def test_chains_from_noise_reach_p(name):
    machine = DISCRETE[name]()
    exact = Enumerated(machine)
    p = exact.probabilities()
    reached = sample(machine, N, 60, RandomSource(3)).visible
    assert chi_square(exact.index(exact.vectors(reached)), p) > FALSE_ALARM
    start = sampling.independent_sample(machine, N, RandomSource(3))
    assert chi_square(exact.index(exact.vectors(start)), p) < FALSE_ALARM  # it had some way to go


def test_gaussian_chains_from_noise_reach_p():
    machine = REAL["gaussian"]()
    exact = Mixture(machine)
    x = exact.vectors(sample(machine, N, 60, RandomSource(3)).visible)
    assert exact.p_value(x, exact.p) > FALSE_ALARM


def test_tempered_chains_from_noise_reach_p():
    machine = DISCRETE["two layers"]()
    exact = Enumerated(machine)
    coldest = ParallelTempering(machine, N // 2, 4, rng=RandomSource(2)).step(60)
    assert chi_square(exact.index(exact.vectors(coldest)), exact.probabilities()) > FALSE_ALARM


def test_tempered_chains_accept_nan_at_unknown_entries():
    machine = BoltzmannMachine({"visible": Bernoulli(3)}, Bernoulli(2), {"visible": Dense()})
    known = torch.tensor([True, True, False])
    start = torch.tensor([[1.0, 0.0, torch.nan]] * 4)
    found = ParallelTempering(machine, 4, 3, rng=RandomSource(0), init=start, mask=known).step(5)["visible"]
    assert found[:, :2].tolist() == [[1, 0]] * 4
    assert bool(torch.isfinite(found).all())
    with pytest.raises(ValueError, match=r"[Nn]a[Nn]"):
        ParallelTempering(machine, 4, 3, rng=RandomSource(0), init=start)


def test_the_hot_end_is_drawn_exactly():
    machine = DISCRETE["binary"]()
    exact, center = Enumerated(machine), a_center(machine)
    path = TemperedPath(machine, exact.layers(center[None]))
    x = exact.vectors(path.base_sample(N, RandomSource(1)))
    assert chi_square(exact.index(x), exact.probabilities(0.0, center)) > FALSE_ALARM


def test_tempered_free_energy_is_that_of_p_beta():
    for make in (DISCRETE["categorical"], DISCRETE["gaussian hidden"], DISCRETE["two layers"]):
        machine = make()
        exact, center = Enumerated(machine), a_center(machine)
        path = TemperedPath(machine, exact.layers(center[None]))
        for beta in (0.0, 0.25, 1.0):
            logs = -path.at(beta).free_energy(exact.layers(exact.x)).detach().numpy()
            np.testing.assert_allclose(softmax(logs), exact.probabilities(beta, center), rtol=1e-10)


def two_modes(pull=4.0):
    """All ones with all ones, or all zeros with all zeros: each half of p, and hardly a way between."""
    machine = BoltzmannMachine(Bernoulli(6), Bernoulli(4), Dense()).double()
    with torch.no_grad():
        machine.links["visible"].weight.fill_(pull)
        machine.layers["visible"].bias.fill_(-pull * 4 / 2)
        machine.hidden.bias.fill_(-pull * 6 / 2)
    return machine


def test_exchanges_carry_chains_between_modes():
    machine, n = two_modes(), 400
    ones = torch.ones(n, 6, dtype=torch.float64)
    stuck = gibbs(machine, ones, 150, RandomSource(0)).visible["visible"].mean(1) > 0.5
    assert float(stuck.double().mean()) > 0.99
    center = {"visible": torch.full((1, 6), 0.5, dtype=torch.float64)}
    chains = ParallelTempering(machine, n, 12, rng=RandomSource(0), init=ones, center=center)
    crossed = int((chains.step(150)["visible"].mean(1) < 0.5).sum())
    assert stats.binomtest(crossed, n, 0.5).pvalue > FALSE_ALARM
    assert chains.acceptance.shape == (11,)
    assert bool(((chains.acceptance > 0.05) & (chains.acceptance < 1)).all())


def test_equal_temperatures_nearly_always_exchange():
    chains = ParallelTempering(DISCRETE["binary"](), 50, [0.999999, 1.0], rng=RandomSource(0))
    chains.step(10)
    assert float(chains.acceptance) > 0.99


# -- clamping ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [two_layers, REAL["gaussian and binary"], REAL["gaussian matrix"]])
def test_known_entries_never_change(make):
    machine = make()
    start = sample(machine, 50, 2, RandomSource(1)).visible
    rng = RandomSource(2)
    masks = {}
    for name, unit in machine.layers.items():
        known = rng.uniform((50, *unit.site_shape), torch.empty(0)) < 0.5
        masks[name] = known[..., None].expand(start[name].shape) if unit.entry_modes else known
    others = {
        "gibbs": gibbs(machine, start, 5, RandomSource(3), mask=masks).visible,
        "sample": sample(machine, 50, 5, RandomSource(3), init=start, mask=masks).visible,
        "mean field": mean_field(machine, start, 3, mask=masks),
        "conditional mean": conditional_mean(machine, start, masks, RandomSource(3), steps=3),
    }
    for what, moved in others.items():
        for name, mask in masks.items():
            assert torch.equal(moved[name][mask], start[name][mask]), (what, name)
            assert not torch.equal(moved[name], start[name]), (what, name)


def test_a_mask_of_its_own_for_every_chain_keeps_p():
    machine = DISCRETE["matrix"]()
    exact = Enumerated(machine)
    p = exact.probabilities()
    start = exact.layers(exact.draw(p, 5))
    mask = RandomSource(5).uniform((N, 2, 2), torch.empty(0)) < 0.5
    moved = gibbs(machine, start, 3, RandomSource(6), mask=mask).visible
    assert torch.equal(moved["visible"][mask], start["visible"][mask])
    assert chi_square(exact.index(exact.vectors(moved)), p) > FALSE_ALARM


def test_a_layer_left_out_of_the_mask_is_unknown():
    machine = two_layers()
    start = sample(machine, 20, 2, RandomSource(1)).visible
    known = {"label": torch.ones(20, 3, dtype=torch.bool)}
    moved = gibbs(machine, start, 2, RandomSource(2), mask=known).visible
    assert torch.equal(moved["label"], start["label"])
    assert not torch.equal(moved["image"], start["image"])


def test_padding_stays_padding():
    machine = topics()
    laws = list(document_laws(machine))
    start = laws[0].layers(np.vstack([law.x[:3] for law in laws]))
    padding = (start["words"] == 0).all(-1)
    chains = ParallelTempering(machine, 9, [0.0, 0.5, 1.0], rng=RandomSource(1), init=start)
    results = {
        "gibbs": gibbs(machine, start, 5, RandomSource(0)).visible,
        "mean field": mean_field(machine, start, 5),
        "tempering": chains.step(5),
    }
    for what, moved in results.items():
        assert torch.equal((moved["words"] == 0).all(-1), padding), what


def z_p_value(values, expected):
    """p-value of the mean of independent rows against what it should be."""
    error = values.std(0, ddof=1) / np.sqrt(len(values))
    return worst((2 * stats.norm.sf(np.abs(values.mean(0) - expected) / error)).tolist())


def conditional_mean_p_value(machine):
    exact = Enumerated(machine)
    held = exact.x[len(exact.x) // 3]
    known = np.arange(4) < 2
    p = exact.given(known, held)
    mask = torch.tensor(known).reshape(machine.layers["visible"].shape)
    start = exact.layers(np.repeat(held[None], 2000, 0))
    means = exact.vectors(conditional_mean(machine, start, mask, RandomSource(7), steps=20, burn_in=20))
    assert (means[:, known] == held[known]).all()
    return z_p_value(means[:, ~known], (p @ exact.x)[~known])


def test_conditional_mean_is_the_mean_given_what_is_known(monkeypatch):
    machine = DISCRETE["matrix"]()
    assert conditional_mean_p_value(machine) > FALSE_ALARM
    monkeypatch.setattr(sampling, "gibbs_step", known_is_not_seen)
    assert conditional_mean_p_value(machine) < FALSE_ALARM


def test_conditional_mean_of_gaussian_entries():
    machine = REAL["gaussian"]()
    exact = Mixture(machine)
    known, held = np.array([True, False, False]), exact.b - exact.s
    start = exact.layers(np.repeat(held[None], 2000, 0))
    mask = torch.tensor(known)
    means = conditional_mean(machine, start, mask, RandomSource(7), steps=20, burn_in=20)["visible"].numpy()
    expected = exact.given(known, held) @ exact.means
    assert z_p_value(means[:, ~known], expected[~known]) > FALSE_ALARM


# -- mean field, seeds, errors ----------------------------------------------------------------------


@pytest.mark.parametrize("make", [two_layers, REAL["gaussian and binary"]])
def test_one_step_of_mean_field_is_up_and_down(make):
    machine = make()
    start = sample(machine, 6, 2, RandomSource(1)).visible
    expected = machine.visible_mean(machine.hidden_mean(start))
    once = mean_field(machine, start, 1)
    twice = mean_field(machine, start, 2)
    again = machine.visible_mean(machine.hidden_mean(expected, check=False))
    for name, mean in expected.items():
        assert torch.equal(once[name], mean)
        assert torch.equal(twice[name], again[name])


def test_means_are_those_given_the_last_hidden_draw():
    machine = two_layers()
    draws, means = (sample(machine, 50, 4, RandomSource(0), mean=mean) for mean in (False, True))
    torch.testing.assert_close(means.hidden, draws.hidden)  # the same chain
    expected = machine.visible_mean(draws.hidden)
    for name, array in means.visible.items():
        torch.testing.assert_close(array, expected[name])
    label = torch.eye(3, dtype=torch.float64)[torch.arange(50) % 3]
    start = {"image": draws.visible["image"], "label": label}
    held = sample(
        machine, 50, 4, RandomSource(0), init=start, mask={"label": torch.ones(3, dtype=torch.bool)}, mean=True
    )
    torch.testing.assert_close(held.visible["label"], label)
    torch.testing.assert_close(held.visible["image"], machine.visible_mean(held.hidden)["image"])


def test_same_seed_same_samples():
    machine = two_layers()
    for draw in (
        lambda seed: sample(machine, 30, 3, RandomSource(seed)).visible,
        lambda seed: ParallelTempering(machine, 30, 3, rng=RandomSource(seed)).step(3),
    ):
        left, right_, other = draw(1), draw(1), draw(2)
        assert all(torch.equal(left[name], right_[name]) for name in left)
        assert not all(torch.equal(left[name], other[name]) for name in left)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("make", [DISCRETE["matrix"], two_layers, REAL["gaussian matrix"], DISCRETE["strong"]])
def test_kernels_give_the_same_chains(monkeypatch, interpreted, make):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tempered_kernels = importlib.import_module("mvrbm.sampling.tempered_kernels")
    machine = make().float().to(device)
    calls = []
    for name in ("draw", "energies"):
        kernel = getattr(tempered_kernels, name)
        monkeypatch.setattr(tempered_kernels, name, lambda *parts, kernel=kernel: calls.append(1) or kernel(*parts))
    results = []
    for chosen in (tempering._kernels, lambda unit, field: None):
        monkeypatch.setattr(tempering, "_kernels", chosen)
        before = len(calls)
        tempered = ParallelTempering(machine, 5, 4, rng=RandomSource(2)).step(3)
        estimate = annealed_importance_sampling(machine, RandomSource(5), n_chains=7, n_steps=6)
        results.append({**tempered, "weights": estimate.log_weights})
        assert (len(calls) > before) == (len(results) == 1)
    for name, array in results[0].items():
        torch.testing.assert_close(array, results[1][name], rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("width", [3, 1500])
def test_kernels_compute_what_units_compute(interpreted, width):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tempered_kernels = importlib.import_module("mvrbm.sampling.tempered_kernels")
    unit, rng = Bernoulli(width).to(device), RandomSource(0)
    with torch.no_grad():
        unit.bias.copy_(rng.normal(unit.bias.shape, unit.bias))
        field, base = (3 * rng.normal((n, width), unit.bias) for n in (4, 1))
        for beta in (rng.uniform((4,), field), rng.uniform((1,), field)):
            numbers = rng.uniform(field.shape, field)
            between = (1 - beta[:, None]) * base + beta[:, None] * field
            expected = (numbers < unit.mean(between)).float()
            assert torch.equal(tempered_kernels.draw(field, base, unit.bias, beta, numbers), expected)
            pull = rng.normal((4,), field)
            betas = torch.stack([beta, beta / 2])
            both = [(b - 1) * pull - unit.log_normalizer((1 - b[:, None]) * base + b[:, None] * field) for b in betas]
            found = tempered_kernels.energies(field, base, unit.bias, betas, pull)
            torch.testing.assert_close(found, torch.stack(both), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [DISCRETE["matrix"], two_layers, REAL["gaussian matrix"]])
def test_full_matrices_give_the_same_chains(monkeypatch, make):
    machine, rng = make(), RandomSource
    start = sample(machine, 6, 1, rng(1)).visible
    mask = {
        name: torch.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1)).expand(x.shape) < 3 for name, x in start.items()
    }
    results = []
    for worth in (math.inf, 0):
        monkeypatch.setattr(sampling, "_WORTH_MULTIPLYING", worth)
        assert (sampling.multiplied_out(machine) is machine) == (worth == 0)
        tempered = ParallelTempering(machine, 5, 4, rng=rng(2)).step(5)
        filled = conditional_mean(machine, start, mask, rng(4), steps=4, burn_in=2)
        weights = annealed_importance_sampling(machine, rng(5), n_chains=7, n_steps=6).log_weights
        results.append([gibbs(machine, start, 4, rng(3)).visible, tempered, filled, {"weights": weights}])
    for full, factors in zip(*results, strict=True):
        for name, array in full.items():
            torch.testing.assert_close(array, factors[name], rtol=1e-10, atol=1e-10)


def test_steps_in_two_calls_are_the_steps_in_one():
    machine = two_layers()
    rng = RandomSource(4)
    split = gibbs(machine, gibbs(machine, sample(machine, 9, 1, rng).visible, 2, rng).visible, 3, rng)
    rng = RandomSource(4)
    whole = gibbs(machine, sample(machine, 9, 1, rng).visible, 5, rng)
    assert all(torch.equal(split.visible[name], whole.visible[name]) for name in whole.visible)
    halves, once = (ParallelTempering(machine, 9, 3, rng=RandomSource(5)) for _ in range(2))
    halves.step(1)
    assert all(torch.equal(x, y) for x, y in zip(halves.step(2).values(), once.step(3).values(), strict=True))


def test_what_is_given_is_not_changed():
    machine = DISCRETE["binary"]()
    start = torch.ones(5, 4, dtype=torch.float64)
    mask = torch.tensor([True, False, False, True])
    gibbs(machine, start, 3, RandomSource(0), mask=mask)
    chains = ParallelTempering(machine, 5, 3, rng=RandomSource(0), init=start)
    first = chains.step()["visible"]
    kept = first.clone()
    chains.step(3)
    assert torch.equal(start, torch.ones_like(start))
    assert torch.equal(first, kept)


@pytest.mark.parametrize("mask", [torch.zeros(4, dtype=torch.bool), torch.zeros(5, 4, dtype=torch.bool), {}])
def test_a_mask_in_which_nothing_is_known_is_an_error(mask):
    machine, start, rng = DISCRETE["binary"](), torch.ones(5, 4), RandomSource(0)
    for call in (
        lambda: gibbs(machine, start, 1, rng, mask=mask),
        lambda: mean_field(machine, start, 1, mask=mask),
        lambda: conditional_mean(machine, start, mask, rng),
        lambda: sample(machine, 5, 1, rng, init=start, mask=mask),
    ):
        with pytest.raises(ValueError, match="no entries are known"):
            call()


def test_errors_say_what_was_given():
    machine = two_layers()
    start = sample(machine, 3, 1, RandomSource(0)).visible
    mask = {"image": torch.ones(2, 2, dtype=torch.bool)}
    rng = RandomSource(0)
    wrong = {
        "steps must be a whole number of at least 1, got 0": lambda: gibbs(machine, start, 0, rng),
        "steps must be a whole number of at least 1, got -1": lambda: mean_field(machine, start, -1),
        "steps must be a whole number of at least 1, got 1.5": lambda: conditional_mean(
            machine, start, mask, rng, steps=1.5
        ),
        "burn_in must be a whole number of at least 0": lambda: conditional_mean(machine, start, mask, rng, burn_in=-1),
        "n must be a whole number of at least 1, got 0": lambda: sample(machine, 0, 1, rng),
        "mask requires init": lambda: sample(machine, 3, 1, rng, mask=mask),
        "init must contain n = 4 states, got 3": lambda: sample(machine, 4, 1, rng, init=start),
        "n_chains must be a whole number of at least 1, got 0": lambda: ParallelTempering(machine, 0, rng=rng),
        "init must contain n_chains = 4 states, got 3": lambda: ParallelTempering(machine, 4, rng=rng, init=start),
    }
    for message, call in wrong.items():
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("betas", [1, [1.0], [0.5, 0.9], [0.5, 0.5, 1.0], [1.0, 0.0], [[0.0, 1.0]]])
def test_ladders_must_increase_to_1(betas):
    with pytest.raises(ValueError, match="betas must contain at least two increasing values"):
        ParallelTempering(DISCRETE["binary"](), 3, betas, rng=RandomSource(0))
