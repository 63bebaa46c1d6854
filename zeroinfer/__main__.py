"""``python -m zeroinfer``."""

import sys

try:
    from zeroinfer.cli import main

    if __name__ == "__main__":
        sys.exit(main())
except KeyboardInterrupt:
    # While the program was loading; a verb that runs answers interrupts itself.
    sys.exit(130)
