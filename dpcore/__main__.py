"""``python -m dpcore``, the same as ``dpcore``."""

import sys

from dpcore.cli import main

if __name__ == "__main__":
    sys.exit(main())
