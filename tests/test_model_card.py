"""Tests of model cards: their contents, and that edited cards are kept."""

import numpy as np
import pytest
import torch

import mvrbm

DATA = np.random.default_rng(0).random((20, 4, 3))


@pytest.fixture(scope="module")
def model():
    return mvrbm.MVRBM((2, 2), rank=2, n_epochs=1, random_state=0).fit(DATA)


def test_the_card_describes_the_model_and_is_replaced_with_it(model, tmp_path):
    told = {"description": "An example.", "data": "Random numbers.", "license": "cc0-1.0", "figures": {"a|b": 0.25}}
    folder = model.save_pretrained(tmp_path / "model", **told)
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert card.startswith('---\nlibrary_name: mvrbm\nlicense: "cc0-1.0"\n')
    n_parameters = sum(parameter.numel() for parameter in model.machine_.parameters())
    for part in (
        "# MVRBM", "An example.", f"{n_parameters} parameters, float64",
        "| visible | bernoulli | 4x3 | kronecker, rank 2 |",
        "| hidden 1 | bernoulli | 2x2 |", "`random_state=0`", "## Data\n\nRandom numbers.", "## License\n\ncc0-1.0",
        "| a\\|b | 0.25 |", 'mvrbm.load("path/to/this/folder")',
    ):  # fmt: skip
        assert part in card
    model.save(folder, overwrite=True)
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    mvrbm.save_pretrained(model.machine_, folder, overwrite=True)
    assert "## License\n\nNot stated." in (folder / "README.md").read_text(encoding="utf-8")
    for tensor, same in zip(mvrbm.load(folder).parameters(), model.machine_.parameters(), strict=True):
        torch.testing.assert_close(tensor, same, rtol=0, atol=0)


def test_the_card_of_a_stack_lists_its_layers(tmp_path):
    stack = mvrbm.DeepMVRBM([(2, 2), (2, 1)], n_epochs=1, random_state=0).fit(DATA)
    card = (stack.save_pretrained(tmp_path / "stack") / "README.md").read_text(encoding="utf-8")
    assert "| hidden 1 | bernoulli | 2x2 | kronecker, rank 1 |\n| hidden 2 | bernoulli | 2x1 |  |\n" in card


@pytest.mark.parametrize("edit", ["text", "metadata", "notes"])
def test_an_edited_card_is_kept(model, tmp_path, edit):
    folder = model.save_pretrained(tmp_path / "model", name="First")
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8")
    edited = {
        "text": text.replace("First", "Mine"),
        "metadata": text.replace("tags:", "language: en\ntags:").replace("library_name: mvrbm\n", ""),
        "notes": "# My notes\n",
    }[edit]
    card.write_text(edited, encoding="utf-8")
    for save in (model.save, model.save_pretrained, lambda *a, **k: mvrbm.save_pretrained(model.machine_, *a, **k)):
        with pytest.warns(UserWarning, match=r"README.md was edited, so it is kept; remove it to have it replaced"):
            save(folder, overwrite=True)
        assert card.read_text(encoding="utf-8") == edited
        mvrbm.load(folder)
    card.unlink()
    model.save_pretrained(folder, overwrite=True, name="Second")
    assert "# Second" in card.read_text(encoding="utf-8")
