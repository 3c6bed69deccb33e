"""The command `mvrbm`, one module per group of commands."""

from mvrbm.cli.app import app, main

__all__ = ["app", "main"]
