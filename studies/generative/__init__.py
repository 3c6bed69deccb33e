"""Machines as generative models: likelihood against parameters and seconds, and the quality of samples.

`data` has the data, `training` trains machines in resumable chunks, `quality` judges samples, `work` has the runs,
`plan` lists them, `findings` and `figures` read their results, and `study` has the report and the command.
"""
