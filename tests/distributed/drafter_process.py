"""A drafter in a process of its own, for the tests: `python drafter_process.py '{json}'`.

Keys: `embedded` (configuration keys of the embedded pair) or `folder` (a drafter checkpoint with `share.pt`); `path` (a Unix
socket); `gated`: every draft waits for one line on standard input. Prints its address, then why each target left.
"""

import json
import sys
from pathlib import Path

import torch

from dflash2_ray.config import ServiceConfig
from dflash2_ray.models.dflash2 import load_drafter
from dflash2_ray.models.drafter_config import read_drafter_config
from dflash2_ray.models.target_share import TargetShare
from dflash2_ray.runtime.build import build_drafter_runner, draw_blueprint
from dflash2_ray.runtime.drafter_runner import DrafterRunner
from dflash2_ray.runtime.drafter_server import DrafterServer
from dflash2_ray.runtime.warm_up import warm_up_drafter


def tiny_drafter(folder):
    """The drafter of `conftest.tiny_folder`, with the embedding and head that lie beside it."""
    embedding, head = torch.load(Path(folder) / "share.pt")
    rows, hidden = embedding.shape
    share = TargetShare(embedding, lambda states: states @ head.T, head, rows, hidden, 4)
    return load_drafter(Path(folder), read_drafter_config(Path(folder)), share, dtype="float32", device="cpu")


class GatedRunner(DrafterRunner):
    def propose(self, wanted):
        sys.stdin.readline()
        return super().propose(wanted)


def main(options):
    torch.set_num_threads(1)
    if "embedded" in options:
        runner = build_drafter_runner(draw_blueprint(ServiceConfig.from_keys(options["embedded"])))
        warm_up_drafter(runner, 3)
    else:
        kind = GatedRunner if options.get("gated") else DrafterRunner
        runner = kind(tiny_drafter(options["folder"]), max_num_requests=32)
    server = DrafterServer(runner, "secret", path=options.get("path"))
    print(json.dumps(server.address), flush=True)
    while not server.stopped:
        print(json.dumps(server.run()), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
