"""For processes that tests start with TRITON_INTERPRET=1 and this folder on PYTHONPATH: `quick_interpreter` there too."""

import importlib
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
importlib.import_module("triton.experimental.gluon")
importlib.import_module("quick_interpreter").install(importlib.import_module("triton.runtime.interpreter"))
