"""Apply the settings of a test run in the Python programs that tests start.

Python imports this module when it starts, because `tests/environment.py` adds this folder to PYTHONPATH. The settings
are applied when a program imports PyTorch, so that other programs remain free of it.
"""

import importlib.util
import sys
from pathlib import Path


class _AfterTorch:
    """Import hook that applies the settings after PyTorch has been imported."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(cls)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_apply(module):
            execute(module)
            sys.path.append(str(Path(__file__).parents[1]))
            import environment

            environment.apply_settings()

        spec.loader.exec_module = execute_and_apply
        return spec


sys.meta_path.insert(0, _AfterTorch)
