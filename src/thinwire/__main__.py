"""Let `python -m thinwire` do what the `thinwire` command does."""

import sys

from thinwire.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
