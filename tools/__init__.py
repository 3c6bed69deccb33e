"""Tools for developers of the package, which are not installed: checks of the code, fuzzing and the kill test."""
