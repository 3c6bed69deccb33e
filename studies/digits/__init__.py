"""Experiments 1 and 2 of the paper: denoising, reconstruction, filters and classification of digits.

`plan` says which runs there are, `work` computes them, `data` gives them digits and patches. From the
stored runs alone `findings` draws its conclusions, `figures` draws pictures and `page` writes the report.
"""
