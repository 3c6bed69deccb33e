"""Experiment 3 of the paper: super-resolution of photographs.

`plan` lists the runs and their settings, `run` computes them, and `page` makes the results, figures and page from the
stored runs.
"""
