"""Target ranks as real processes, for the tests beside this file: each runs `work(shard, *arguments)` and sends back its result."""

import multiprocessing
import os
import traceback

import torch

from dflash2_ray.models.tensor_parallel import Shard
from dflash2_ray.runtime.process_group import RankGroupLink, host_store, join_store

HOST = "127.0.0.1"
PATIENCE_S = 60.0


def _rank(rank, size, port, timeout_s, pipe, work, arguments):
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    try:
        store = join_store(HOST, port, size, PATIENCE_S)
        link = RankGroupLink(store, rank=rank, size=size, host=HOST, device="cpu", generation=0, timeout_s=timeout_s)
        pipe.send(("ok", work(Shard(rank, size, link), *arguments)))
    except BaseException as error:
        pipe.send((type(error).__name__, f"{error}\n{traceback.format_exc()}"))


def start_ranks(size, work, *arguments, timeout_s=PATIENCE_S):
    """(processes, pipes, store) of `size` ranks; the store must live as long as they do."""
    spawn = multiprocessing.get_context("spawn")
    store = host_store(HOST, size, PATIENCE_S)
    processes, pipes = [], []
    for rank in range(size):
        mine, theirs = spawn.Pipe()
        process = spawn.Process(
            target=_rank, args=(rank, size, store.port, timeout_s, theirs, work, arguments), daemon=True
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(mine)
    return processes, pipes, store


def on_ranks(size, work, *arguments):
    """Every rank's result, in order of ranks."""
    processes, pipes, store = start_ranks(size, work, *arguments)
    try:
        results = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(120), f"rank {rank} has nothing to say"
            kind, value = pipe.recv()
            assert kind == "ok", f"rank {rank}: {kind}: {value}"
            results.append(value)
        return results
    finally:
        for process in processes:
            process.kill()
            process.join()
        del store
