"""Exceptions and warnings of this package. All exceptions derive from :class:`MVRBMError`."""


class MVRBMError(Exception):
    """Base class of all exceptions of this package."""


class InputError(MVRBMError, ValueError):
    """A data file or an array cannot be read, or an output cannot be written."""


class DatasetError(InputError):
    """A named data set is unknown, or not on this machine."""


class ShardError(InputError):
    """A shard cannot be read, or does not match the other shards."""


class StorageError(MVRBMError, ValueError):
    """A model folder is missing or damaged, or this version of the package cannot read it."""


class MemoryLimitError(MVRBMError, MemoryError):
    """A model or a training run needs more memory than is available. Raised before memory is allocated."""


class ExportError(MVRBMError, ValueError):
    """A model cannot be exported."""


class MissingPackageError(MVRBMError, ImportError):
    """An optional package is not installed. The message contains the command that installs it."""


class DivergenceError(MVRBMError, ArithmeticError):
    """Training has diverged: a parameter is not finite or far too large, or the energy is no longer bounded.

    If possible, the parameters are restored to their values before the update that diverged.
    """


class DistributedError(MVRBMError, RuntimeError):
    """Another process of a distributed training run has failed. The message is the message of that process."""


class ConstantDataWarning(UserWarning):
    """Some entries of the training data are constant, so the model can only learn their value."""


class RecipeWarning(UserWarning):
    """A model is used for a purpose for which its training recipe is not suitable."""
