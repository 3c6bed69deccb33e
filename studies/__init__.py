"""Experiments: data in, numbers and figures out. Each is a function that a command calls."""
