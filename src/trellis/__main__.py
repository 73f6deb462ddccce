"""`python -m trellis`: the command, for a shell that does not find `trellis`."""

import sys

from trellis_start import main

if __name__ == "__main__":
    sys.exit(main())
