"""Loading of checkpoints for :func:`mvrbm.load`: a trainer that continues where the checkpoint was taken."""

from pathlib import Path
from typing import Any

import torch

from mvrbm.devices import resolve_device
from mvrbm.errors import StorageError
from mvrbm.saving import CHECKPOINT, read_machine, register
from mvrbm.training import checkpoint
from mvrbm.training.trainer import Trainer


@register(CHECKPOINT)
def load_checkpoint(folder: Path, config: dict[str, Any], device: str | torch.device) -> Trainer:
    """Return a trainer that continues a checkpoint, or the newest checkpoint of a folder. For :func:`mvrbm.load`."""
    path = folder if (folder / "trainer.json").is_file() else checkpoint.newest(folder)
    if path is None:
        raise StorageError(f"{folder} holds no checkpoint")
    plain = checkpoint.read_plain(path)
    known = {name: plain["settings"][name] for name in ("seed", "missing_steps") if plain["settings"].get(name)}
    trainer = Trainer(read_machine(path).to(resolve_device(device)), plain["recipe_asked"], **known)
    if plain.get("scheduler") is not None:
        raise StorageError(f"{path} was made with a scheduler: build the same Trainer and call its resume method")
    trainer.resume_from(path)
    return trainer
