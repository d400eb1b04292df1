"""Run the command line as ``python -m fsdp2_strategy``."""

import sys

from fsdp2_strategy.cli import main

if __name__ == "__main__":
    sys.exit(main())
