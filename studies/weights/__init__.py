"""The shipped super-resolution weights: the choice of their settings, their training and all measurements.

`images` has the photographs and the measures, `training` the cells that train, `measuring` the cells that measure
finished models, and `study` the command. The paper's own experiment on super-resolution is in `studies.superres`.
"""
