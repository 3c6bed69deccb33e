"""Handle the outputs and checkpoints of training commands (--out, --log, --checkpoints, --resume and --force)."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from mvrbm.cli import options as opt
from mvrbm.cli.errors import UsageError
from mvrbm.interrupt import INTERRUPTS

# File in the checkpoint folder that contains the output paths of the training run. Resuming may replace these outputs.
_OUTPUTS = "outputs.json"

_RESUME_HELP = "Resume from the newest checkpoint."
_MISMATCH_HELP = "Resume even if the data or settings differ."

Folder = Annotated[Path | None, opt.new("Folder for saving a checkpoint after each epoch.", "--checkpoints")]
Resume = Annotated[bool, opt.new(_RESUME_HELP, "--resume")]
IgnoreMismatch = Annotated[bool, opt.new(_MISMATCH_HELP, "--ignore-mismatch")]


def fit(model: Any, *data: Any, **arguments: Any) -> tuple[float, BaseException | None]:
    """Fit a model and return the seconds that it took, and the interrupt that ended training early, if any.

    After an interrupt, the partially trained model is usable.
    """
    began = time.perf_counter()
    try:
        model.fit(*data, **arguments)
    except INTERRUPTS as error:
        if not getattr(model, "interrupted_", False):
            raise  # a second Ctrl-C stops training immediately, without saving
        return time.perf_counter() - began, error
    return time.perf_counter() - began, None


def note_trained(resumed: bool, epochs: int | None, trained: int) -> None:
    """Print a note if a resumed run had already trained for more epochs than the option --epochs requests."""
    if resumed and epochs is not None and trained > epochs:
        opt.note(f"--epochs {epochs} has no effect because the run was already trained for {trained:,} epochs")


@dataclass(frozen=True)
class Resuming:
    """Options that specify how a training command handles the results of an earlier run."""

    out: Path | None
    checkpoints: Path | None
    resume: bool
    ignore_mismatch: bool
    force: bool
    log: Path | None = None

    def after_restart(self) -> Resuming:
        """Return these options, changed to resume the run if torchrun has restarted this process."""
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
            return self
        return replace(self, resume=self.checkpoints is not None, force=True)

    def check(self) -> bool:
        """Return whether to resume from an existing checkpoint. Raise an error if an output cannot be written."""
        from mvrbm.io.atomic import check_folder, check_output
        from mvrbm.training.checkpoints import stored_checkpoints

        if self.resume and self.checkpoints is None:
            raise UsageError("--resume requires --checkpoints FOLDER")
        if self.ignore_mismatch and not self.resume:
            raise UsageError("--ignore-mismatch requires --resume")
        own = self._own_outputs()
        if self.out is not None:
            opt.check_model_out(self.out, self.force or str(self.out.resolve()) in own)
            for option, path in (("--log", self.log), ("--checkpoints", self.checkpoints)):
                if path is not None and self.out.resolve() in (path.resolve(), *path.resolve().parents):
                    raise ValueError(
                        f"{option} {path} is inside the model folder {self.out}; choose a path outside this folder"
                    )
        if self.log is not None:
            check_output(self.log, self.force or str(self.log.resolve()) in own)
        if self.checkpoints is None or not stored_checkpoints(check_folder(self.checkpoints)):
            return False
        if not (self.resume or self.force):
            raise ValueError(
                f"{self.checkpoints} contains checkpoints of an earlier run; use --resume to continue that run, or "
                "--force to start over"
            )
        return self.resume

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Context manager for training, which records the outputs in the checkpoint folder.

        Unless the run resumes, it replaces earlier checkpoints. They are kept if training fails before the first
        checkpoint, for example because an argument is invalid. All processes must enter the context together.
        """
        from mvrbm.distributed import World

        world = World.here()
        with contextlib.ExitStack() as stack:
            with world.raise_together(ValueError, OSError):
                if world.is_main and self.checkpoints is not None:
                    stack.enter_context(self._writing_to(self.checkpoints))
            yield

    @contextlib.contextmanager
    def _writing_to(self, folder: Path) -> Iterator[None]:
        from mvrbm.io.atomic import replace_file
        from mvrbm.training.checkpoints import replace_checkpoints, stored_checkpoints

        if self.resume and not stored_checkpoints(folder):
            opt.note(f"{folder} contains no checkpoints, so training starts from the beginning")
        is_new = not folder.exists()
        outputs = [str(path.resolve()) for path in (self.out, self.log) if path is not None]
        with contextlib.nullcontext() if self.resume else replace_checkpoints(folder, [_OUTPUTS]):
            folder.mkdir(parents=True, exist_ok=True)
            with replace_file(folder / _OUTPUTS) as file:
                file.write(json.dumps({"outputs": outputs}).encode())
            try:
                yield
            except BaseException:
                if not stored_checkpoints(folder):
                    (folder / _OUTPUTS).unlink()
                    if is_new:
                        folder.rmdir()
                raise

    def _own_outputs(self) -> list[str]:
        """Return the output paths of the run to resume, or an empty list if there is no such run."""
        from mvrbm.saving import read_json

        if not self.resume or self.checkpoints is None or not (self.checkpoints / _OUTPUTS).is_file():
            return []
        found = read_json(self.checkpoints / _OUTPUTS).get("outputs")
        return found if isinstance(found, list) else []

    def interrupted(self, progress: str, cause: BaseException, *, saved: bool) -> opt.Interrupted:
        """Return the exception that reports an interrupt.

        `progress` is appended to "interrupted" in the message. `saved` indicates whether the model was saved.
        """
        where = f"the partially trained model was saved to {self.out}" if saved else "no model was saved"
        advice = "use --checkpoints to make training resumable"
        if self.checkpoints is not None:
            advice = "run the same command with --resume to continue"
        return opt.Interrupted(f"interrupted{progress}: {where}; {advice}", cause)
