"""Exceptions and warnings raised by this package. All exceptions are subclasses of :class:`MVRBMError`."""


class MVRBMError(Exception):
    """Base class for all exceptions raised by this package."""


class InputError(MVRBMError, ValueError):
    """Raised if a data file or an array cannot be read, or if an output file cannot be written."""


class DatasetError(InputError):
    """Raised if a named dataset is unknown or not available on this machine."""


class ShardError(InputError):
    """Raised if a shard cannot be read or does not match the other shards."""


class StorageError(MVRBMError, ValueError):
    """Raised if a model folder is missing, damaged or not readable by this version of the package."""


class MemoryLimitError(MVRBMError, MemoryError):
    """Raised before memory is allocated if a model or a training run requires more than is available."""


class ExportError(MVRBMError, ValueError):
    """Raised if a model cannot be exported."""


class MissingPackageError(MVRBMError, ImportError):
    """Raised if an optional package is not installed. The message contains the command that installs the package."""


class PluginError(MVRBMError, ImportError):
    """Raised if a module with further units or couplings cannot be imported."""


class DivergenceError(MVRBMError, ArithmeticError):
    """Raised if training diverges: a parameter is not finite or far too large, or the energy is unbounded below.

    If possible, the parameters are first restored to their values before the update that diverged.
    """


class DistributedError(MVRBMError, RuntimeError):
    """Raised if another process in a distributed training run fails. The message is that process's error message."""


class ConstantDataWarning(UserWarning):
    """Issued if some entries are constant in the training data, so that the model can only learn their values."""


class RecipeWarning(UserWarning):
    """Issued if a model's training recipe is not suitable for the way the model is used."""
