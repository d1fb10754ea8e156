"""The Serve application: an ingress deployment in front of a unit deployment, and one replica that keeps the books of both."""

import logging
import math
import os
from collections.abc import Sequence
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve._private.constants import DEFAULT_HTTP_PORT
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.context import _get_global_client

from dflash2_ray.config import ServiceConfig
from dflash2_ray.engine.bookkeeper import BOOKKEEPER_DEPLOYMENT, BookkeeperReplica
from dflash2_ray.engine.client import UNIT_DEPLOYMENT
from dflash2_ray.engine.farewell import PATIENCE_S
from dflash2_ray.engine.placement import NodeFacts, UnitPlacement, map_gpus, place_unit
from dflash2_ray.engine.unit import Unit
from dflash2_ray.engine.unit_scaling import POLICY
from dflash2_ray.errors import ConfigError
from dflash2_ray.serving.ingress import Ingress
from dflash2_ray.serving.key_digests import KeyDigests
from dflash2_ray.serving.routes import Guards, api_builder

logger = logging.getLogger("ray.serve")
_KUBERAY = "KUBERAY_GEN_RAY_START_CMD"  # the operator sets it in every Ray pod
INGRESS_CPUS = 0.1
BOOKKEEPER_CPUS = 0.01  # not 0: a head without CPUs would be the place for it
_SESSION_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
_HEALTH_PERIOD_S = 2.0
_MOST_CALLS = (
    10_000  # to a replica at once, beyond what it takes in: Serve's routers go slow where their own limit is met
)
_METRICS_PERIOD_S = 1.0  # of the loads that the number of units follows


def build_application(config: ServiceConfig) -> Application:
    """Bind the deployments. Raises ConfigError for what no machine could serve; the rest is decided where the unit runs."""
    in_flight = config.max_num_seqs + config.max_queued_requests
    nodes = _nodes()
    num_gpus = sum(node.num_gpus for node in nodes)
    if num_gpus:
        _check_gpus(config, nodes)
    placement = place_unit(config, num_gpus)
    if config.wants_drafter:
        config = config.model_copy(update={"drafter_placement": "separate" if placement.separate else "colocated"})
    unit: Any = serve.deployment(
        Unit,
        name=UNIT_DEPLOYMENT,
        **_num_units(config),
        **_router(config),
        max_ongoing_requests=in_flight + _MOST_CALLS,  # our own limit answers first, and describe() always gets through
        ray_actor_options={"num_cpus": placement.bundles[0]["CPU"]},
        placement_group_bundles=[dict(bundle) for bundle in placement.bundles],
        placement_group_strategy=placement.strategy,
        **_label_selector(placement),
        graceful_shutdown_timeout_s=config.drain_timeout_s,
        graceful_shutdown_wait_loop_s=0.1,
        **_logs(config),
        health_check_period_s=_HEALTH_PERIOD_S,
    )
    bookkeeper: Any = serve.deployment(
        BookkeeperReplica,
        name=BOOKKEEPER_DEPLOYMENT,
        max_ongoing_requests=_MOST_CALLS,
        ray_actor_options={"num_cpus": BOOKKEEPER_CPUS},
        graceful_shutdown_timeout_s=2 * PATIENCE_S,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=_HEALTH_PERIOD_S,
        **_logs(config, enable_access_log=False),  # it is called every second
    )
    books = bookkeeper.bind()
    guards = Guards(KeyDigests.read(config.api_keys_file), config.cors_origins, config.max_body_bytes)
    ingress: Any = serve.deployment(
        serve.ingress(api_builder(guards))(Ingress),
        name="ingress",
        **_num_fronts(config),
        max_ongoing_requests=config.max_num_replicas * in_flight
        + _MOST_CALLS,  # a full proxy routes a few requests a second
        ray_actor_options={"num_cpus": INGRESS_CPUS},
        graceful_shutdown_timeout_s=config.drain_timeout_s,
        graceful_shutdown_wait_loop_s=0.1,
        **_logs(config),
    )
    application: Application = ingress.bind(
        config, unit.bind(config, placement, books), books, _http_url(), len(guards.keys.all())
    )
    return application


def _check_gpus(config: ServiceConfig, nodes: Sequence[NodeFacts]) -> None:
    """Raise ConfigError with the map that was tried when the cluster's GPUs do not suffice. Under KubeRay it is logged instead: pods join
    one by one, and an autoscaler adds more for units that wait; the placement groups wait for them."""
    try:
        map_gpus(config, nodes)
    except ConfigError as error:
        if _KUBERAY not in os.environ:
            raise
        logger.warning("waiting for GPUs to join: %s", error)


def _logs(config: ServiceConfig, **settings: Any) -> dict[str, Any]:
    """Serve's option for JSON lines and `settings`; none for text alone, so that what Serve was told stands."""
    if config.log_format == "json":
        settings["encoding"] = "JSON"
    return {"logging_config": settings} if settings else {}


def _num_units(config: ServiceConfig) -> dict[str, Any]:
    """Serve's options for a fixed number of units, or for one that follows the load."""
    limits = config.autoscaling
    if limits is None:
        return {"num_replicas": config.num_replicas}
    policy = AutoscalingPolicy(policy_function=POLICY, policy_kwargs={"limits": limits.model_dump()})
    scaling = AutoscalingConfig(
        min_replicas=limits.min_replicas,
        initial_replicas=config.num_replicas,
        max_replicas=limits.max_replicas,
        upscale_delay_s=limits.upscale_delay_s,
        downscale_delay_s=limits.downscale_delay_s,
        metrics_interval_s=_METRICS_PERIOD_S,
        look_back_period_s=_METRICS_PERIOD_S * 2,
        policy=policy,
    )
    return {"autoscaling_config": scaling}


def _num_fronts(config: ServiceConfig) -> dict[str, Any]:
    """Serve's options for a fixed number of ingress replicas, or, where units follow the load, for one that grows with it in the same
    proportion: another one per so many requests in flight as the first ones were meant for. Never fewer than configured: nodes may need theirs."""
    fronts, limits = config.num_ingress_replicas, config.autoscaling
    if limits is None:
        return {"num_replicas": fronts}
    scaling = AutoscalingConfig(
        min_replicas=fronts,
        initial_replicas=fronts,
        max_replicas=math.ceil(fronts * limits.max_replicas / config.num_replicas),
        target_ongoing_requests=config.num_replicas * config.max_num_seqs / fronts,
        upscale_delay_s=limits.upscale_delay_s,
        downscale_delay_s=limits.downscale_delay_s,
    )
    return {"autoscaling_config": scaling}


def _router(config: ServiceConfig) -> dict[str, Any]:
    """Serve's option for where requests of a session go; none where its own balancing by load stands."""
    return {"request_router_config": {"request_router_class": _SESSION_ROUTER}} if config.routing == "session" else {}


def _label_selector(placement: UnitPlacement) -> dict[str, Any]:
    """Serve's option for node labels by bundle, if any bundle asks for some."""
    if not any(placement.labels):
        return {}
    return {"placement_group_bundle_label_selector": [dict(one) for one in placement.labels]}


def _nodes() -> list[NodeFacts]:
    """The cluster's living nodes; none before Ray runs (`serve build`)."""
    if not ray.is_initialized():
        return []
    return [
        NodeFacts(
            node["NodeManagerHostname"] or node["NodeID"],
            int(node["Resources"].get("GPU", 0)),
            node.get("Labels") or {},
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _http_url() -> str:
    """Where HTTP listens: the port of the Serve that runs, else the one that it will take by default."""
    port = DEFAULT_HTTP_PORT
    if ray.is_initialized():
        try:
            client = _get_global_client(raise_if_no_controller_running=False)
        except Exception:  # a private interface; the banner only loses the port
            client = None
        port = port if client is None else int(client.http_config.port)
    return f"http://127.0.0.1:{port}"
