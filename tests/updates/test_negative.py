"""The random numbers that chains use in each update, and the chains that several processes share."""

import pytest
import torch

from backend_runs import DEFAULT, Case, start, with_negative
from mvrbm import Bernoulli, BoltzmannMachine, Kronecker, RandomSource
from mvrbm.backends.graph import GraphBackend
from mvrbm.backends.reference import ReferenceBackend
from mvrbm.data.sources import as_source
from mvrbm.distributed import World
from mvrbm.training import CD, PCD, TemperedPCD
from mvrbm.updates.gradient import WHOLE
from mvrbm.updates.negative import _SharedNumbers

LIKE = torch.empty(0)


@pytest.mark.parametrize("by_graph", [False, True])
@pytest.mark.parametrize("negative", [CD(40), PCD(4, 40), TemperedPCD(4, 3, 39), TemperedPCD(4, 3, 40)], ids=repr)
def test_no_random_number_is_used_twice(negative, by_graph, monkeypatch):
    """Every draw of update `t` belongs to step `t` of the run's source, however many steps the chains take."""
    drawn = []
    uniform = RandomSource._uniform

    def recorded(self, shape, like, draw):
        drawn.append((self.key, int(self._step), draw, self._first_row))
        return uniform(self, shape, like, draw)

    monkeypatch.setattr(RandomSource, "_uniform", recorded)
    layers = {"x": lambda: Bernoulli((3, 2))}
    run = start(Case(layers, lambda: Bernoulli((2, 2)), [1], with_negative(DEFAULT, negative), [8] * 4))
    drawn.clear()
    if by_graph:
        backend = GraphBackend(run.settings, run.state, as_source(run.batches[0], run.state.machine))
    else:
        backend = ReferenceBackend(run.settings)
    counts = []
    for batch in run.batches:
        before = len(drawn)
        if by_graph:
            backend.epoch([run.state], torch.arange(8)[None], lambda: False)
        else:
            backend.update(run.state, batch, 1.0, WHOLE)
        counts.append(len(drawn) - before)
    assert len(set(drawn)) == len(drawn)
    assert [(key, step) for key, step, _, _ in drawn] == [
        (run.state.rng.key, update) for update, count in enumerate(counts) for _ in range(count)
    ]


def numbers_of(rank, seed=7):
    share = TemperedPCD(5, 3).share(World(rank, 2))
    return share, _SharedNumbers(RandomSource(seed).at_step(4, draw=2, first_row=1), share)


def test_processes_draw_the_numbers_of_one_process():
    alone = RandomSource(7).at_step(4, draw=2)
    shared = [numbers_of(rank) for rank in range(2)]
    for draw in ("uniform", "normal"):
        expected = getattr(alone, draw)((15, 2, 3), LIKE).unflatten(0, (3, 5))
        parts = [getattr(rng, draw)((3 * share.n_chains, 2, 3), LIKE).unflatten(0, (3, -1)) for share, rng in shared]
        assert torch.equal(torch.cat(parts, 1), expected)
    exchanges = [rng.uniform((1, share.n_chains), LIKE) for share, rng in shared]
    assert torch.equal(torch.cat(exchanges, 1), alone.uniform((1, 5), LIKE))


def test_sources_derived_from_a_share_have_its_rows_and_its_seed():
    derivations = {
        "split": lambda rng: rng.split(2)[1],
        "stream": lambda rng: rng.stream(3),
        "step": lambda rng: rng.at_step(9),
        "next step": lambda rng: rng.next_step() or rng,
    }
    for derive in derivations.values():
        share, rng = numbers_of(1)
        expected = derive(RandomSource(7).at_step(4, draw=2)).uniform((15, 2), LIKE).unflatten(0, (3, 5))[:, 2:]
        assert torch.equal(derive(rng).uniform((3 * share.n_chains, 2), LIKE), expected.flatten(0, 1))


def test_shares_have_no_position_from_which_other_code_could_draw():
    _, rng = numbers_of(1)
    assert rng.key == RandomSource(7).key
    with pytest.raises(NotImplementedError, match="not consecutive"):
        rng.position  # noqa: B018


def test_processes_advance_the_tempered_chains_of_one_process():
    machine = BoltzmannMachine({"x": Bernoulli((3, 2))}, Bernoulli((2, 2)), {"x": Kronecker(1)}, std=1.0, seed=1)
    batch = {"x": RandomSource(2).uniform((5, 3, 2), LIKE).round()}
    masks = machine.as_masks(None, batch)
    field = machine.hidden_field(batch).detach()
    negative = TemperedPCD(5, 3, 2)

    def drawn(phase, chains):
        return phase.draw(machine, batch, masks, field, RandomSource(7).at_step(1), chains)["x"]

    start = negative.start(machine, batch, RandomSource(0))
    expected = drawn(negative, dict(start))
    parts = [
        drawn(negative.share(World(rank, 2)), negative.share_of_chains(start, World(rank, 2).part_of(5)))
        for rank in range(2)
    ]
    assert torch.equal(torch.cat(parts), expected)
