"""Definition of one training update: the recipe, the training state, the negative phase, the gradient and the step.

Start with the module `update`, which combines the other modules and describes an update step by step.

The training loop, callbacks and checkpoints are in :mod:`mvrbm.training`. Faster implementations of the same updates
are in :mod:`mvrbm.backends`.
"""
