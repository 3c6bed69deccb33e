"""Experiment 3 of the paper: super-resolution of photographs.

`plan` says which runs there are, `work` computes them, `data` gives them images. From the stored runs alone
`findings` draws its conclusions, `figures` draws pictures and `page` writes the report.
"""
