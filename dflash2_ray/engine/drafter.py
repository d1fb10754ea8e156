"""The actor class that holds a separate drafter: model, candidate selector and context cache, served over a framed socket."""

import secrets
from typing import Any

import ray

from dflash2_ray.config import ServiceConfig
from dflash2_ray.core.log_lines import write_logs
from dflash2_ray.engine.worker_actor import WorkerActor


class Drafter(WorkerActor):
    """It serves one target at a time; when that goes away it waits for the next one."""

    def __init__(self) -> None:
        super().__init__()
        self._server: Any = None

    def load(self, config: ServiceConfig) -> dict[str, Any]:
        """Load the drafter; returns the address where a target connects. Raises ConfigError."""
        from dflash2_ray.runtime.build import build_drafter_runner, draw_blueprint
        from dflash2_ray.runtime.drafter_server import DrafterServer
        from dflash2_ray.runtime.warm_up import warm_up_drafter

        write_logs(config.log_format, "drafter")
        blueprint = draw_blueprint(config, self._note)
        runner = build_drafter_runner(blueprint)
        warm_up_drafter(runner, blueprint.config.num_speculative_tokens)
        self._server = DrafterServer(runner, secrets.token_hex(16), host=ray.util.get_node_ip_address())
        return dict(self._server.address)

    def run(self) -> str:
        """Serve one target after the other, for life; returns why it ended."""
        self._server.serve()
        return "stopped"
