"""``python -m zeroinfer``."""

import sys

from zeroinfer.cli import main

if __name__ == "__main__":
    sys.exit(main())
