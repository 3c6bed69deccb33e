"""Programs for people who work on the package: checks of the code, fuzzing, kill test. None is installed."""
