"""Where the kernels themselves run: tests in `equality/` need a GPU or Triton's interpreter, which has to be chosen before triton
is imported. `test_interpreted.py` runs them in processes that have chosen it; with a GPU they also run here, compiled."""

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED or torch.cuda.is_available() else ["equality/*"]
