"""``python -m avmp``: the same as the console script ``avmp``."""

import sys

from avmp.cli import main

if __name__ == "__main__":
    sys.exit(main())
