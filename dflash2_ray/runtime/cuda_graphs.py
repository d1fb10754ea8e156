"""Many launches as one: a graph for every bucket of sizes, captured the first time that the bucket is met, replayed ever after.

What is captured reads static tensors only, which its owner fills before every run, and leaves its results in tensors that stand until
the next run of the same pool. A graph is taken into use once its replay has given what the same launches gave
one by one. Where that fails, everything runs launch by launch from then on: the reason is logged once, and told. It must not know
what is computed.
"""

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

logger = logging.getLogger(__name__)
Results = dict[str, torch.Tensor]
T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)
MOST_ROWS = 512  # of a pass: a larger one keeps the device busy for longer than its launches take
_STEPS = (1, 2, 4, 8)
_LEAST_REACH = 1024  # positions


@dataclass(frozen=True)
class Graph:
    """replay: all launches again, on what the static tensors hold now. results: where they leave what they find."""

    replay: Callable[[], None]
    results: Results


class GraphBackend(Protocol):
    """Who captures. One backend is one pool of memory: its graphs may overwrite each other's results."""

    def capture(self, launch: Callable[[], Results]) -> Graph:
        """Record what `launch`, which has run before, enqueues. Raises whatever a capture refuses."""
        ...

    def beside(self, work: Callable[[], T]) -> Callable[[], T]:
        """Begin `work` on a side stream, beside what follows; the result is for whoever calls what is returned, to wait for it."""
        ...


class CudaBackend:
    """`torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()
        self._main, self._side = torch.cuda.Stream(), torch.cuda.Stream()

    def capture(self, launch: Callable[[], Results]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        # other threads of this process may use the device meanwhile, and capture too
        with torch.cuda.graph(graph, pool=self._memory, stream=self._main, capture_error_mode="thread_local"):
            results = launch()
        return Graph(graph.replay, results)

    def beside(self, work: Callable[[], T]) -> Callable[[], T]:
        if not torch.cuda.is_current_stream_capturing():  # launch by launch there is nothing to win
            result = work()
            return lambda: result
        main = torch.cuda.current_stream()
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            result = work()

        def join() -> T:
            main.wait_stream(self._side)
            return result

        return join


class GraphPool(Generic[Key]):
    """The graphs of one kind of work, by bucket. name: of the work, for the log. failure: why graphs are not used any more, else None."""

    def __init__(self, name: str, backend: GraphBackend) -> None:
        self.name = name
        self.backend = backend
        self.failure: str | None = None
        self.num_replays = 0
        self._graphs: dict[Key, Graph] = {}

    def run(self, key: Key, launch: Callable[[], Results]) -> Results:
        """What `launch` gives on its static tensors' present contents. Only while there is no `failure`."""
        graph = self._graphs.get(key)
        if graph is None:
            return self._first(key, launch)
        graph.replay()
        self.num_replays += 1
        return graph.results

    def describe(self) -> dict[str, Any]:
        """Plain values, for reports."""
        return {"num_graphs": len(self._graphs), "num_replays": self.num_replays, "failure": self.failure}

    def _first(self, key: Key, launch: Callable[[], Results]) -> Results:
        expected = {
            name: value.clone() for name, value in launch().items()
        }  # also compiles and loads what a capture could not
        try:
            graph = self.backend.capture(launch)
            graph.replay()
            _compare(graph.results, expected)
        except Exception as error:  # whatever a driver says, the launches themselves have done their work
            self.failure = f"{type(error).__name__}: {error}"
            self._graphs.clear()
            logger.warning("%s runs without CUDA graphs, launch by launch: bucket %s: %s", self.name, key, self.failure)
            return expected
        self._graphs[key] = graph
        return graph.results


def _compare(got: Results, expected: Results) -> None:
    """Raises RuntimeError where a replay differs. Integers follow from what is compared."""
    for name, value in expected.items():
        if value.is_floating_point():
            tolerance = 1e-4 if value.dtype == torch.float32 else 5e-2
            if not torch.allclose(
                got[name].float(),
                value.float(),
                rtol=tolerance,
                atol=tolerance * float(value.abs().max()),
                equal_nan=True,
            ):
                raise RuntimeError(f"a replay gave other {name} than the same launches one by one")


def next_bucket(count: int, most: int) -> int:
    """The bucket of a count: the next of 1, 2, 4, 8, then multiples of 8 up to 32, then of 16; `most` at most."""
    if count <= _STEPS[-1]:
        bucket = next(step for step in _STEPS if step >= count)
    else:
        step = 8 if count <= 32 else 16
        bucket = -(-count // step) * step
    return min(bucket, most)


def next_reach(num_positions: int, most: int) -> int:
    """The bucket of a number of positions, which page tables and attention are sized by: 1024, or the next that is four times the one
    before; `most` at most."""
    reach = _LEAST_REACH
    while reach < num_positions:
        reach *= 4
    return min(reach, most)
