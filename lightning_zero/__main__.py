"""``python -m lightning_zero``: the command line."""

import sys

from lightning_zero.cli import main

sys.exit(main())
