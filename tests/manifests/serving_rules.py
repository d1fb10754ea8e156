"""What must hold between a RayService's Serve configuration and its pods: that the configuration is the one of deploy/serve and valid,
that units fit their pods exactly, and that keys and checkpoints are where the configuration looks for them.

The seats are computed by the service's own placement code.
"""

from collections.abc import Iterator
from pathlib import PurePosixPath

import yaml
from cluster_rules import gpus, groups, one, ray_container
from quantities import amount
from ray.serve.schema import ServeDeploySchema

from dflash2_ray.config import ServiceConfig
from dflash2_ray.engine.placement import NodeFacts, UnitPlacement, map_gpus, place_unit
from dflash2_ray.errors import ConfigError
from dflash2_ray.serving.application import BOOKKEEPER_CPUS, INGRESS_CPUS


def serving_problems(documents: list[dict], deployed_text: str) -> Iterator[str]:
    """`deployed_text`: the file of deploy/serve that this overlay must carry."""
    service = one(documents, "RayService")
    if not service:
        return
    text = service["spec"].get("serveConfigV2", "")
    if text != deployed_text:
        yield "serveConfigV2 is not the file of deploy/serve"
    try:
        schema = ServeDeploySchema.model_validate(yaml.safe_load(text))
        application = schema.applications[0]
        config = ServiceConfig.from_keys(application.args)
    except (ValueError, IndexError, ConfigError, yaml.YAMLError) as error:
        yield f"serveConfigV2: {error}"
        return
    if len(schema.applications) != 1 or application.import_path != "dflash2_ray.app" or application.route_prefix != "/":
        yield "serveConfigV2: expected one application, dflash2_ray.app at /"
    yield from _http_problems(schema, service)
    yield from _duration_problems(config, service)
    yield from _seat_problems(config, service, application)
    yield from _key_problems(config, service, documents)
    yield from _checkpoint_problems(config, service)


def _duration_problems(config: ServiceConfig, service: dict) -> Iterator[str]:
    """An old cluster must outlive what it still answers."""
    delay = service["spec"].get("rayClusterDeletionDelaySeconds", 60)
    if service["spec"].get("upgradeStrategy", {}).get("type") != "None" and delay < (config.request_timeout_s or 0):
        yield f"rayClusterDeletionDelaySeconds {delay} is shorter than request_timeout_s {config.request_timeout_s:g}: an upgrade would cut answers"


def _http_problems(schema: ServeDeploySchema, service: dict) -> Iterator[str]:
    if schema.http_options.host != "0.0.0.0":
        yield f"serveConfigV2: http_options.host is {schema.http_options.host!r}: nothing outside the pod could connect"
    if schema.proxy_location != "EveryNode":
        yield "serveConfigV2: proxy_location is not EveryNode: workers would have no proxy"
    for name, group in _workers(service).items():
        ports = {port["name"]: port["containerPort"] for port in ray_container(group).get("ports", [])}
        if ports.get("serve") != schema.http_options.port:
            yield f"{name}: container port `serve` is {ports.get('serve')}, but Serve listens on {schema.http_options.port}"


def _workers(service: dict) -> dict[str, dict]:
    return {name: group for name, group in groups(service).items() if name != "head"}


def _seat_problems(config: ServiceConfig, service: dict, application: object) -> Iterator[str]:
    """Every unit finds its seats, no GPU is left over, and every pod has the CPUs of what sits there; units that load may add find pods."""
    nodes = _nodes(service, "replicas")
    if any(group.get("labels", {}).keys() & {"ray.io/node-id"} for group in _workers(service).values()):
        yield "labels of Ray's own are set"
    total = sum(node.num_gpus for node in nodes)
    if config.device == "cuda" and not total:
        yield "device is cuda, but no worker has a GPU"
        return
    if config.device == "auto" or (total and config.drafter_placement == "auto"):
        yield "device or drafter_placement is auto: decided while pods are still joining"
    if config.device == "cpu" and total:
        yield "workers have GPUs that device=cpu does not use"
    try:
        seats = map_gpus(config, nodes)
        map_gpus(config.model_copy(update={"num_replicas": config.max_num_replicas}), _nodes(service, "maxReplicas"))
    except ConfigError as error:
        yield str(error)
        return
    placement = place_unit(config, total)
    for node in nodes:
        taken = sum(seat.node == node.name for seat in seats)
        if taken != node.num_gpus:
            yield f"{node.name}: {node.num_gpus} GPUs, of which units take {taken}: not whole-unit shapes"
        group = _workers(service)[node.name.rpartition("-")[0]]
        cpus = amount(ray_container(group)["resources"]["limits"].get("cpu", 0))
        needed = _cpus(placement, config, taken)
        if cpus < needed:
            yield f"{node.name}: {cpus:g} CPUs, but what runs there takes {needed:g}"
    yield from _proxy_problems(config, application, len(nodes), {seat.node for seat in seats if seat.role != "drafter"})


def _nodes(service: dict, count: str) -> list[NodeFacts]:
    """The worker pods as placement sees them, with `replicas` or `maxReplicas` of each group."""
    return [
        NodeFacts(f"{name}-{index}", gpus(group), group.get("labels", {}))
        for name, group in _workers(service).items()
        for index in range(group.get(count, 0))
    ]


def _cpus(placement: UnitPlacement, config: ServiceConfig, num_seats: int) -> float:
    """CPUs of a pod with that many workers; on CPUs, of a pod with all units. Plus one replica of the unit, one ingress and the bookkeeper."""
    workers = num_seats * placement.worker["CPU"]
    if "GPU" not in placement.worker:
        workers = config.num_replicas * sum(bundle["CPU"] for bundle in placement.bundles[1:])
    return workers + placement.bundles[0]["CPU"] + INGRESS_CPUS + BOOKKEEPER_CPUS


def _proxy_problems(config: ServiceConfig, application: object, num_nodes: int, rank_nodes: set[str]) -> Iterator[str]:
    """A pod without a Serve replica has no proxy and never becomes ready."""
    if num_nodes == 1 or len(rank_nodes) == num_nodes == config.num_replicas:
        return
    spread = {deployment.name: deployment.max_replicas_per_node for deployment in application.deployments}  # type: ignore[attr-defined]
    if spread.get("ingress") != 1 or config.num_ingress_replicas != num_nodes:
        yield (
            f"{num_nodes} worker pods, but {config.num_ingress_replicas} ingress replicas, {spread.get('ingress')} per node at most: "
            "a pod without a Serve replica never becomes ready"
        )


def _key_problems(config: ServiceConfig, service: dict, documents: list[dict]) -> Iterator[str]:
    if any(document.get("kind") == "Secret" for document in documents):
        yield "a Secret stands among the manifests"
    for name, group in groups(service).items():
        for entry in ray_container(group).get("env", []):
            if "value" in entry and any(word in entry["name"] for word in ("KEY", "TOKEN", "PASSWORD", "SECRET")):
                yield f"{name}: {entry['name']} is written out; use secretKeyRef"
        if config.api_keys_file is not None and PurePosixPath(config.api_keys_file) not in _secret_files(group):
            yield f"{name}: api_keys_file {config.api_keys_file} is no file of a mounted Secret"
    if config.device == "cuda" and config.api_keys_file is None:
        yield "a GPU service without API keys"


def _secret_files(group: dict) -> set[PurePosixPath]:
    secrets = {
        volume["name"]: [item["path"] for item in volume["secret"].get("items", [])]
        for volume in group["template"]["spec"].get("volumes", [])
        if "secret" in volume
    }
    return {
        PurePosixPath(mount["mountPath"]) / path
        for mount in ray_container(group).get("volumeMounts", [])
        for path in secrets.get(mount["name"], [])
    }


def _checkpoint_problems(config: ServiceConfig, service: dict) -> Iterator[str]:
    if config.target in ("embedded", "smollm2"):
        return
    for name, group in _workers(service).items():
        claims = {
            volume["name"]
            for volume in group["template"]["spec"].get("volumes", [])
            if "persistentVolumeClaim" in volume
        }
        kept = {mount["mountPath"] for mount in ray_container(group).get("volumeMounts", []) if mount["name"] in claims}
        home = {entry["name"]: entry.get("value") for entry in ray_container(group).get("env", [])}.get("HF_HOME")
        if home not in kept:
            yield f"{name}: HF_HOME {home!r} is on no volume: every start would download {config.target} again"
