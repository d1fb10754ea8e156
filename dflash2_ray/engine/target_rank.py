"""The actor class that holds one target rank. Rank 0 also runs the step loop next to the device, and a colocated drafter.

Ray is called for its life cycle only; requests and deltas travel over a framed socket, tensors over the ranks' own group.
"""

import secrets
import threading
from dataclasses import asdict
from typing import Any

import ray

from dflash2_ray.config import ServiceConfig
from dflash2_ray.core.log_lines import write_logs
from dflash2_ray.engine.worker_actor import WorkerActor

PROBE_TEXT = (
    "Write a Python function that returns the first ten prime numbers, and explain in a few words how it works."
)


class TargetRank(WorkerActor):
    """Of several ranks rank 0 opens the `rendezvous` first; then all `load`, rank 0 does its `warm_up`, and all `run`."""

    def __init__(self) -> None:
        super().__init__()
        self._store: Any = None
        self._listener: Any = None
        self._loop: Any = None
        self._blueprint: Any = None
        self._follow: Any = None
        self._server: Any = None
        self._lock = threading.Lock()

    def open_rendezvous(self, generation: int, size: int, timeout_s: float) -> dict[str, Any]:
        """On rank 0: where the others find the store of the group, and the channel of the passes."""
        from dflash2_ray.runtime.channel import Listener
        from dflash2_ray.runtime.process_group import host_store

        host = ray.util.get_node_ip_address()
        self._store = host_store(host, size, timeout_s)
        self._listener = Listener(host, secrets.token_hex(16))
        return {
            "generation": generation,
            "host": host,
            "store_port": self._store.port,
            "channel": dict(self._listener.address),
            "timeout_s": timeout_s,
        }

    def load(self, config: ServiceConfig, rank: int, size: int, rendezvous: dict[str, Any] | None) -> None:
        """Load this rank's part and join the others. Raises ConfigError, or UnitLost when one does not come."""
        from dflash2_ray.models.tensor_parallel import Shard
        from dflash2_ray.runtime.build import agreed, build_from_blueprint, draw_blueprint, load_target

        write_logs(config.log_format, f"target rank {rank}")
        blueprint = self._blueprint = draw_blueprint(config, self._note)
        if rendezvous is None:
            self._loop = build_from_blueprint(blueprint, config, self._note)
            return
        shard = Shard(rank, size, self._join(rank, size, rendezvous, blueprint.config.device))
        if rank == 0:
            from dflash2_ray.runtime.rank_loop import Followers

            followers = Followers.accept(self._listener, size - 1, rendezvous["generation"])
            self._loop = build_from_blueprint(blueprint, config, self._note, shard=shard, followers=followers)
            return
        from dflash2_ray.runtime.channel import Channel
        from dflash2_ray.runtime.rank_loop import follow

        channel = Channel.connect(rendezvous["channel"], rendezvous["timeout_s"])
        channel.set_timeout(None)
        blueprint = agreed(blueprint, shard)
        target = load_target(blueprint, shard, self._note)
        cache = target.allocate_cache(blueprint.config.num_kv_pages, blueprint.config.page_size)
        self._follow = lambda: follow(target, cache, channel, rendezvous["generation"], blueprint.config.device)

    def _join(self, rank: int, size: int, rendezvous: dict[str, Any], device: str) -> Any:
        from dflash2_ray.runtime.process_group import RankGroupLink, join_store

        timeout_s = rendezvous["timeout_s"]
        store = self._store or join_store(rendezvous["host"], rendezvous["store_port"], size, timeout_s)
        return RankGroupLink(
            store,
            rank=rank,
            size=size,
            host=ray.util.get_node_ip_address(),
            device=device,
            generation=rendezvous["generation"],
            timeout_s=timeout_s,
        )

    def warm_up(self, config: ServiceConfig, drafter_address: dict[str, Any] | None) -> dict[str, Any]:
        """On rank 0, while the others run: a first pass through every part, then the start-up probe; returns what runs, and where to
        connect. Raises ConfigError when the probe's result is refused."""
        from dflash2_ray.runtime.loop_server import LoopServer, connect_drafter
        from dflash2_ray.runtime.warm_up import warm_up

        if drafter_address is not None:
            connect_drafter(self._loop, drafter_address)
        warm_up(self._loop, self._note)
        probe = self._probe(config)
        host, token = ray.util.get_node_ip_address(), secrets.token_hex(16)
        with self._lock:
            self._server = LoopServer(self._loop, host, token)
        return {
            "host": host,
            "port": self._server.listener.port,
            "token": token,
            "target_folder": str(self._blueprint.target_folder),
            "facts": self._loop.describe(),
            "probe": probe,
        }

    def _probe(self, config: ServiceConfig) -> dict[str, Any] | None:
        from dflash2_ray.runtime.start_probe import NUM_TOKENS, judge, start_probe
        from dflash2_ray.text.text_side import TextSide

        if config.startup_probe == "off":
            return None
        self._note("start-up probe", 0, NUM_TOKENS)
        text = TextSide(self._blueprint.target_folder, config.generation_config, config.chat_template)
        probe = start_probe(self._loop, text.some_prompt(PROBE_TEXT))
        judge(probe, config)
        self._note("start-up probe", NUM_TOKENS, NUM_TOKENS)
        return asdict(probe)

    def run(self) -> str:
        """Serve until the unit goes away, or follow until rank 0 does; returns why it ended."""
        return str(self._follow() if self._follow is not None else self._server.run())

    def describe(self) -> dict[str, Any]:
        """What the step loop of rank 0 runs, and how full it is."""
        return dict(self._server.loop.describe())
