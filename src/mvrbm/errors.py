"""Exceptions and warnings raised by this package. All exceptions are subclasses of :class:`MVRBMError`."""


class MVRBMError(Exception):
    """Base class for all exceptions raised by this package."""


class InputError(MVRBMError, ValueError):
    """Raised when a data file or an array cannot be read, or when an output file cannot be written."""


class DatasetError(InputError):
    """Raised when a named dataset is unknown or not available on this machine."""


class ShardError(InputError):
    """Raised when a shard cannot be read or does not match the other shards."""


class StorageError(MVRBMError, ValueError):
    """Raised when a model or checkpoint folder is missing, damaged or not readable by this version of the package."""


class MemoryLimitError(MVRBMError, MemoryError):
    """Raised before allocating memory when a model or a training run requires more memory than is available."""


class ExportError(MVRBMError, ValueError):
    """Raised when a model cannot be exported."""


class MissingPackageError(MVRBMError, ImportError):
    """Raised when an optional package is not installed. The message contains the command that installs the package."""


class PluginError(MVRBMError, ImportError):
    """Raised when a plugin that defines additional units or couplings cannot be imported."""


class DivergenceError(MVRBMError, ArithmeticError):
    """Raised when training diverges.

    Training has diverged if the loss or a parameter is not finite, if the factors of a coupling are so large that all
    units saturate, or if the energy is unbounded below.

    If possible, the parameters are restored to their values before the diverging update.
    """


class DistributedError(MVRBMError, RuntimeError):
    """Raised when another process in a distributed training run fails. The message is copied from that process."""


class ConstantDataWarning(UserWarning):
    """Issued when at least half of the entries in a layer are constant across all training samples."""


class AlignmentWarning(UserWarning):
    """Issued when letters of sequences are replaced or removed, or when names occur more than once."""


class MixingWarning(UserWarning):
    """Issued when Gibbs chains were too short to forget their initial states."""


class RecipeWarning(UserWarning):
    """Issued when a model generates samples but was trained with settings that lead to poor samples."""
