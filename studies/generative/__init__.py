"""Machines as generative models: likelihood against parameters and training time, and the quality of samples.

`plan` lists the runs and their settings, `run` computes them, and `page` makes the results, figures and page from the
stored runs. `ship` packs two trained machines as the models of digits that come with the package.
"""
