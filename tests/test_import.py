import mvrbm


def test_public_names_exist():
    assert all(hasattr(mvrbm, name) for name in mvrbm.__all__)
