"""The study of sequences: models of the other tools against plain formulas, and the command."""

import gzip
import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mvrbm.io.alignments import as_alignment
from mvrbm.likelihood import log_likelihood, pseudo_log_likelihood
from studies import __main__, sequences

rng = np.random.default_rng(0)

# Largest error of annealing, in nats per site. See tests/THRESHOLDS.md.
LIKELIHOOD = 0.005


def test_the_pseudo_likelihood_of_a_potts_model_is_the_mean_of_its_conditionals():
    bias, couplings = rng.standard_normal((3, 4)), rng.standard_normal((3, 4, 3, 4))
    couplings += couplings.transpose(2, 3, 0, 1)
    couplings[np.arange(3), :, np.arange(3)] = 0
    codes = rng.integers(0, 4, (5, 3))

    def energy(x):
        pairs = itertools.combinations(range(3), 2)
        return -sum(bias[i, x[i]] for i in range(3)) - sum(couplings[i, x[i], j, x[j]] for i, j in pairs)

    logs = []
    for x, site in itertools.product(codes, range(3)):
        weights = [np.exp(-energy([*x[:site], letter, *x[site + 1 :]])) for letter in range(4)]
        logs.append(np.log(weights[x[site]] / sum(weights)))
    states = torch.from_numpy(np.eye(4)[codes])
    found = sequences.potts_pseudo_likelihood(torch.from_numpy(bias), torch.from_numpy(couplings), states)
    assert found == pytest.approx(np.mean(logs))


@torch.no_grad()
def test_machines_of_rbms_have_the_same_free_energy():
    weights, vbias, hbias = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 4, 5), (3, 4), 5))
    params = {"weight_matrix": weights, "vbias": vbias, "hbias": hbias}
    machine = sequences.from_rbms(SimpleNamespace(**{key: torch.from_numpy(array) for key, array in params.items()}))
    codes = rng.integers(0, 4, (6, 3))
    exact = [
        -sum(vbias[i, x[i]] for i in range(3)) - np.log1p(np.exp(hbias + sum(weights[i, x[i]] for i in range(3)))).sum()
        for x in codes
    ]
    states = torch.from_numpy(np.eye(4, dtype=np.float32)[codes])
    np.testing.assert_allclose(machine.free_energy(states).numpy(), exact, rtol=1e-5)


def test_contacts_are_counted_at_three_ranks():
    scores, distances = np.zeros((8, 8)), np.full((8, 8), 20.0)
    first, second = np.triu_indices(8, 5)  # six pairs that are at least five sites apart
    scores[first, second] = scores[second, first] = [6, 5, 4, 3, 2, 1]
    scores = np.pad(scores, (0, 12))
    distances = np.pad(distances, (0, 12), constant_values=20)
    for pair in (0, 1, 4):
        distances[first[pair], second[pair]] = distances[second[pair], first[pair]] = 5
    assert sequences.contacts(scores, distances) == pytest.approx([3 / 10, 3 / 20, 3 / 40])


def test_curves_do_not_count_the_time_of_measuring(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(sequences.time, "process_time", lambda: next(clock))

    def slow(machine, states):
        for _ in range(5):
            next(clock)
        return 0.0

    monkeypatch.setattr(sequences, "pseudo_likelihood", slow)
    monkeypatch.setattr(sequences, "one_hot", lambda alignment: torch.zeros(2, 3, 4))
    curve = sequences.Curve(SimpleNamespace(test=None))
    curve.on_train_begin(None)
    for step in range(1, 6):
        curve.measure(step, None)
    assert [seconds for seconds, _ in curve.points] == [1, 2, 4]


@pytest.fixture
def family(tmp_path):
    """Folder with sequences of four sites, in which the last letter repeats the first."""
    codes = rng.integers(0, 3, (15_100, 4))
    codes[:, 3] = codes[:, 0]
    rows = ["".join("ACD"[letter] for letter in x) for x in codes]
    (tmp_path / "sequences").mkdir()
    with gzip.open(tmp_path / "sequences" / "lattice_proteins.fasta.gz", "wt") as file:
        file.write("".join(f">{number}\n{row}\n" for number, row in enumerate(rows)))
    return tmp_path


def test_the_command_scores_sequences(family, monkeypatch, capsys):
    monkeypatch.setitem(sequences._ANNEALING, "lattice", (50, 50, 10))
    monkeypatch.setitem(sequences.MODELS, "lattice", {"tiny": {"hidden_shape": (2, 2), "rank": 1}})
    folders = ["--data-dir", str(family), "--out", str(family / "out"), "--work", str(family / "work")]
    arguments = ["sequences", "ours", "--only", "lattice-0", "--epochs", "20", "--seeds", "1", "--validate"]
    assert __main__.main([*arguments, *folders]) == 0
    (row,) = json.loads((family / "out" / "validation.json").read_text())["rows"]
    low, high = row["interval"]
    assert low <= row["nats"] <= high
    assert row["parameters"] == 2 * 4 + 2 * 20 + 4 * 20 + 4  # an alphabet of 20 amino acids
    assert len(row["curve"]) >= 1
    assert "lattice: tiny" in capsys.readouterr().out


@torch.no_grad()
def test_likelihoods_are_per_site(monkeypatch):
    monkeypatch.setitem(sequences._ANNEALING, "lattice", (100, 100, 20))
    generator = torch.Generator().manual_seed(0)
    shapes = {"weight_matrix": (3, 4, 5), "vbias": (3, 4), "hbias": (5,)}
    params = {name: 0.5 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    machine = sequences.from_rbms(SimpleNamespace(**params))
    every = as_alignment(["".join(letters) for letters in itertools.product("ABCD", repeat=3)] * 2, "ABCD")
    found = sequences.measure(machine, sequences.Family(every, every), "lattice", 0)
    exact = float(log_likelihood(machine, sequences.one_hot(every)).mean()) / 3
    assert abs(found["nats"] - exact) < LIKELIHOOD


@torch.no_grad()
def test_pseudo_likelihoods_are_per_site():
    params = SimpleNamespace(weight_matrix=torch.randn(3, 4, 5), vbias=torch.zeros(3, 4), hbias=torch.zeros(5))
    machine = sequences.from_rbms(params)
    states = torch.eye(4)[torch.from_numpy(rng.integers(0, 4, (6, 3)))]
    exact = pseudo_log_likelihood(machine, states, n_sites=None).values.mean() / 3
    assert sequences.pseudo_likelihood(machine, states) == pytest.approx(float(exact))
