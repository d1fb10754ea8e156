"""A local Ray with the service on a free port, for a drill that is a script of its own."""

import contextlib
import os

from ports import free_ports

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")


@contextlib.contextmanager
def local_service(settings):
    """(URL, configuration) of the service with these keys, until the end of the block."""
    import ray
    from ray import serve

    from dflash2_ray.app import app
    from dflash2_ray.config import ServiceConfig

    config = ServiceConfig.from_keys(settings)
    (port,) = free_ports(1)
    ray.init(address="local", include_dashboard=False, num_cpus=4, object_store_memory=100 * 2**20, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(app(config), name="default")
    yield f"http://127.0.0.1:{port}", config
    serve.shutdown()
    ray.shutdown()
