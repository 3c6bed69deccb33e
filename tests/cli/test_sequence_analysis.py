"""mvrbm sequences contacts and mutations: tables, precision, plots, and one line for bad input."""

import csv
import json

import numpy as np
import pytest

from mvrbm import SequenceRBM
from mvrbm.cli import main
from mvrbm.sequences import contact_map, contact_precision, load_lattice_proteins, mutation_scan, ranked_pairs


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    alignment, distances = load_lattice_proteins()
    model = SequenceRBM((4, 3), rank=2, n_epochs=2, random_state=0).fit(alignment.sequences[:200])
    model.save(folder / "model")
    (folder / "few.fasta").write_text("".join(f">{n}\n{s}\n" for n, s in enumerate(alignment.sequences[:20])))
    pairs = [(i, j) for i in range(27) for j in range(i + 1, 27) if (i, j) != (2, 20)]
    (folder / "pairs.txt").write_text("".join(f"{i + 1} {j + 1} {distances[i, j]}\n" for i, j in pairs))
    return folder, model, alignment, distances


@pytest.fixture
def place(trained, monkeypatch, tmp_path):
    monkeypatch.chdir(trained[0])
    return trained, tmp_path


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_contacts_are_sorted_by_score(place, capsys):
    (_, model, alignment, distances), out = place
    found, picture = out / "contacts.csv", out / "map.png"
    words = ["sequences", "contacts", "model", str(found), "--sequences", "few.fasta", "--distances", "pairs.txt"]
    assert main([*words, "--threshold", "1.1", "--plot", str(picture), "--json"]) == 0
    scores = contact_map(model, alignment.sequences[:20])
    first, second = ranked_pairs(scores)
    rows = rows_of(found)
    assert [(int(row["site_1"]) - 1, int(row["site_2"]) - 1) for row in rows] == list(zip(first, second, strict=True))
    np.testing.assert_allclose([float(row["score"]) for row in rows], scores[first, second], rtol=1e-5)
    known = distances.copy()
    known[2, 20] = known[20, 2] = np.nan
    assert sum(row["distance"] == "" for row in rows) == 1
    precision = contact_precision(scores, known, threshold=1.1)
    expected = {"L/2": precision[12], "L": precision[26], "2L": precision[53]}
    assert json.loads(capsys.readouterr().out)["precision"] == pytest.approx(expected)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_contacts_need_only_a_model(place, capsys):
    (_, model, *_), out = place
    assert main(["sequences", "contacts", "model", str(out / "all.csv"), "--separation", "0"]) == 0
    assert "351 pairs of sites" in capsys.readouterr().out
    scores = contact_map(model)
    best = rows_of(out / "all.csv")[0]
    np.testing.assert_allclose(float(best["score"]), scores.max(), rtol=1e-5)


@pytest.mark.parametrize("given", ["letters", "file"])
def test_mutations_are_listed_with_their_effects(place, capsys, given):
    (_, model, alignment, _), out = place
    sequence = alignment.sequences[0]
    reference = sequence if given == "letters" else "few.fasta"
    words = ["sequences", "mutations", "model", str(out / "scan.csv"), "--reference", reference]
    assert main([*words, "--plot", str(out / "scan.svg")]) == 0
    printed = capsys.readouterr()
    assert ("20 sequences; the first one (0) is used" in printed.err) == (given == "file")
    rows, scan = rows_of(out / "scan.csv"), mutation_scan(model, sequence)
    assert len(rows) == 27 * 19
    for row in rows[::40]:
        site, letter = int(row["site"]), row["to"]
        assert row["mutation"] == f"{sequence[site - 1]}{site}{letter}"
        effect = scan[site - 1, model.alphabet_.letters.index(letter)]
        np.testing.assert_allclose(float(row["change"]), effect, rtol=1e-5)
    assert b"<svg" in (out / "scan.svg").read_bytes()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["contacts", "model", "OUT.txt"], "must end in .csv"),
        (["contacts", "model", "OUT.csv", "--plot", "map.gif"], "must end in .png, .svg or .pdf"),
        (["contacts", "model", "OUT.csv", "--separation", "26"], "--separation 26 excludes all pairs of sites because"),
        (["contacts", "model", "OUT.csv", "--threshold", "6"], "has no effect without --distances"),
        (["contacts", "model", "OUT.csv", "--distances", "few.fasta"], "few.fasta, line 1: expected numbers"),
        (["contacts", "model", "OUT.csv", "--distances", "none.txt"], "none.txt: no such file"),
        (["mutations", "model", "OUT.csv", "--reference", "AAA"], "have 3 sites, but the model has 27"),
        (["mutations", "model", "OUT.csv", "--reference", "wild.fasta"], "wild.fasta: no such file"),
        (["mutations", "model", "OUT.csv", "--reference", "?" * 27], "unknown letters are not supported here"),
        (["contacts", "few.fasta", "OUT.csv"], "few.fasta"),
    ],
)
def test_bad_input_gives_one_line(place, capsys, words, message):
    _, out = place
    assert main(["sequences", *(word.replace("OUT", str(out / "out")) for word in words)]) in (1, 2)
    printed = capsys.readouterr()
    lines = printed.err.strip().splitlines()
    assert message in lines[-1]
    assert len(lines) == 1
    assert not list(out.iterdir())
