"""What the processes of rows agree on: when this one began, and how one says that it lacks something."""

import time

STARTED = time.time()
# The exit code of a row that needs something that is not there.
LEFT_OUT = 3


class Missing(Exception):
    """A row needs something that is not there: another row's findings, a package."""
