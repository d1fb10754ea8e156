"""A graph that is not there: what `torch.cuda.CUDAGraph` records and replays, on `pretended_cuda`.

A capture notes every launch with the very tensors that it worked on, and refuses whatever makes the host wait. A replay launches them again, and
writes every result where the capture left it; numbers of the host stay what they were. Before it, everything that graphs of the same pool
computed is spoilt: what a replay does not write itself is garbage, and what somebody kept of an earlier one too.
"""

import torch
from pretended_cuda import _PRESENT, _tensors, _unwrapped

from dflash2_ray.runtime.cuda_graphs import Graph

GARBAGE = -77_777  # no index, slot or token


class _Recording:
    """steps: (launch, its results, each with whether it is a new tensor), in order."""

    def __init__(self):
        self.steps = []

    def note(self, compute, results):
        self.steps.append((compute, results))

    def replay(self):
        for compute, results in self.steps:
            for (old, is_new), fresh in zip(results, _tensors([compute()]), strict=True):
                if is_new:
                    old.copy_(_unwrapped(fresh))

    def spoil(self):
        for _, results in self.steps:
            for one, is_new in results:
                if is_new:
                    one.fill_(float("nan") if one.is_floating_point() else 1 if one.dtype == torch.bool else GARBAGE)


class RecordedBackend:
    """A `GraphBackend`. captures, num_replays: so far. refuse: a message with which every capture fails."""

    def __init__(self):
        self.captures = []
        self.num_replays = 0
        self.refuse = None
        self._num_beside = 0

    def capture(self, launch):
        gpu = _PRESENT[-1]
        if self.refuse:
            raise RuntimeError(self.refuse)
        recording = gpu.recorder = _Recording()
        try:
            results = launch()
        finally:
            gpu.recorder = None
        assert self._num_beside == 0, "a side stream was not waited for"
        self.captures.append(recording)

        @torch.inference_mode()
        def replay():
            self.num_replays += 1
            for one in self.captures:
                one.spoil()
            gpu.replay(recording.replay)

        return Graph(replay, results)

    def beside(self, work):
        result = work()
        self._num_beside += 1

        def join():
            self._num_beside -= 1
            return result

        return join
