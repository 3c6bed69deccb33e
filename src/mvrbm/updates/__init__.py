"""Definition of one update: the recipe, the state it changes, the negative phase, the gradient and the step.

Nothing here loops over data, reads files or prints; :mod:`mvrbm.training` does. :mod:`mvrbm.backends` computes the same
updates faster.
"""
