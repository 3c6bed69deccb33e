from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=20, database=None)
settings.load_profile("repeatable")
