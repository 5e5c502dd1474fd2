"""`python -m robopolicy VERB` is `robopolicy VERB`."""

import sys

from robopolicy.cli import main

if __name__ == "__main__":
    sys.exit(main())
