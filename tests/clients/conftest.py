import os
from pathlib import Path

import foreign  # noqa: F401  # before anything else
from ranks import CONTEXT

os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # here the server that ranks are forked from finds modules
CONTEXT.set_forkserver_preload(["foreign"])
