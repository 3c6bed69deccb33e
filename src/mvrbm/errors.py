"""Every exception and warning of the package's own. Exceptions share one base class, :class:`MVRBMError`."""


class MVRBMError(Exception):
    """Base class of all exceptions of this package."""


class InputError(MVRBMError, ValueError):
    """A data file or an array that cannot be read, or an output that cannot be written."""


class DatasetError(InputError):
    """A named data set that is unknown, or not on this machine."""


class ShardError(InputError):
    """A shard that cannot be read, or that does not match the other shards."""


class StorageError(MVRBMError, ValueError):
    """A model folder that is missing, damaged, not written by this package, or of another version."""


class MemoryLimitError(MVRBMError, MemoryError):
    """A model or a training run that needs more memory than there is. It is raised before memory is allocated."""


class ExportError(MVRBMError, ValueError):
    """A model that cannot be exported."""


class MissingPackageError(MVRBMError, ImportError):
    """A package that only some functions need is not installed. The message has the command that installs it."""


class DivergenceError(MVRBMError, ArithmeticError):
    """Training has diverged: a parameter is not finite or far too large, or the energy is no longer bounded.

    The machine then has the parameters from before the update that diverged, where these are known.
    """


class DistributedError(MVRBMError, RuntimeError):
    """Another process of a distributed training run has failed; the message is that process's own."""


class ConstantDataWarning(UserWarning):
    """Entries of the training data are constant: a model learns their value, and nothing else of them."""


class RecipeWarning(UserWarning):
    """A model is used for a purpose that its training recipe does not suit."""
