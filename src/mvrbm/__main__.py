"""`python -m mvrbm` is the command `mvrbm`."""

import sys

from mvrbm.cli import main

if __name__ == "__main__":
    sys.exit(main())
