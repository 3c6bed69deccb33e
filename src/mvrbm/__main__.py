"""Entry point for `python -m mvrbm`, which is equivalent to the command `mvrbm`."""

import sys

from mvrbm.cli import main

if __name__ == "__main__":
    sys.exit(main())
