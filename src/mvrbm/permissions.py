"""The permissions that new files and folders have by custom; temporary ones are made with narrower ones."""

import os


def usual_mode(most: int) -> int:
    """Return the permissions `most` less what the user's umask takes away."""
    mask = os.umask(0)
    os.umask(mask)
    return most & ~mask
