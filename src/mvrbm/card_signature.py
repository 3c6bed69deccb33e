"""Sign model cards with a hash, so that cards that a person has edited are recognized and kept."""

import hashlib


def signed_card(text: str) -> str:
    """Append a hash to the text of a model card, in a hidden comment, so that later edits are recognized."""
    return f"{text}\n<!-- sha256 of the lines above: {hashlib.sha256(text.encode()).hexdigest()} -->\n"


def is_unedited_card(text: str) -> bool:
    """Return whether a model card has the hash of its text. Cards written by version 0.2 have no hash."""
    return text == signed_card(text.rpartition("\n<!--")[0])
