"""Experiments 1 and 2 of the paper: denoising, reconstruction, filters and classification of digits.

`plan` lists the runs and their settings, `run` computes them, and `page` makes the results, figures and page from the
stored runs.
"""
