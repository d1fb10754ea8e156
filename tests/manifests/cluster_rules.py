"""What must hold of a RayService's cluster beyond types: the operator's own checks, and what this service needs of its pods.

Every rule yields sentences; no sentence means nothing was found. It knows nothing of Serve's configuration.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from quantities import amount, seconds

ROOT = Path(__file__).parents[2]
FAULT_TOLERANCE = "dflash2/gcs-fault-tolerance"
_RESOURCE_PARAMS = {"num-cpus", "num-gpus", "memory", "resources"}


def one(documents: list[dict], kind: str) -> dict:
    """The only document of a kind; {} when there is none or there are several."""
    found = [document for document in documents if document.get("kind") == kind]
    return found[0] if len(found) == 1 else {}


def groups(service: dict) -> dict[str, dict]:
    """Head and worker groups by name."""
    cluster = service["spec"]["rayClusterConfig"]
    return {
        "head": cluster["headGroupSpec"],
        **{group["groupName"]: group for group in cluster.get("workerGroupSpecs", [])},
    }


def ray_container(group: dict) -> dict:
    """The operator takes the first one."""
    return group["template"]["spec"]["containers"][0]


def gpus(group: dict) -> int:
    limits = ray_container(group).get("resources", {}).get("limits", {})
    return sum(int(count) for name, count in limits.items() if "gpu" in name.lower())


def cluster_problems(documents: list[dict]) -> Iterator[str]:
    service = one(documents, "RayService")
    if not service:
        yield "expected exactly one RayService"
        return
    name = service["metadata"]["name"]
    if len(name) > 47 or not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name):
        yield f"name {name!r} is no DNS-1035 label of at most 47 characters"
    yield from _operator_problems(service)
    yield from _head_problems(service)
    yield from _upgrade_problems(service)
    for group_name, group in groups(service).items():
        yield from _pod_problems(group_name, group, documents)
        yield from _probe_problems(group_name, group)
    yield from _fault_tolerance_problems(service)


def _operator_problems(service: dict) -> Iterator[str]:
    cluster = service["spec"]["rayClusterConfig"]
    pinned = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.M)
    if pinned is None or cluster.get("rayVersion") != pinned[1]:
        yield f"rayVersion {cluster.get('rayVersion')!r} is not the one in constraints.txt"
    if cluster.get("authOptions", {}).get("mode") != "token":
        yield "authOptions.mode is not `token`: dashboard, job and Serve APIs would be open"
    if cluster.get("authOptions", {}).get("enableK8sTokenAuth"):
        yield "enableK8sTokenAuth does not work with RayService"
    autoscaling = cluster.get("enableInTreeAutoscaling", False)
    if "autoscalerOptions" in cluster and not autoscaling:
        yield "autoscalerOptions without enableInTreeAutoscaling"
    for name, group in groups(service).items():
        params = group.get("rayStartParams", {})
        if group.get("resources") and _RESOURCE_PARAMS & params.keys():
            yield f"{name}: resources stand in rayStartParams and in `resources`"
        if "labels" in params:
            yield f"{name}: labels belong in the group's `labels`, not in rayStartParams"
        if group["template"]["spec"].get("restartPolicy") not in (None, "Never") and autoscaling:
            yield f"{name}: restartPolicy must be Never or unset with autoscaler v2"
        if name == "head":
            continue
        least, now, most = group["minReplicas"], group.get("replicas", 0), group["maxReplicas"]
        if not least <= now <= most:
            yield f"{name}: expected minReplicas <= replicas <= maxReplicas, got {least}, {now}, {most}"
        if most > least and not autoscaling:
            yield f"{name}: maxReplicas {most} is out of reach without enableInTreeAutoscaling"
        if "idleTimeoutSeconds" in group and not autoscaling:
            yield f"{name}: idleTimeoutSeconds needs autoscaler v2"


def _head_problems(service: dict) -> Iterator[str]:
    head = groups(service)["head"]
    params = head.get("rayStartParams", {})
    if gpus(head):
        yield f"head: has {gpus(head)} GPUs; nothing runs there that could use them"
    if params.get("num-cpus") != "0":
        yield 'head: num-cpus is not "0": replicas could be placed there, and would be lost with it'
    if params.get("dashboard-host") != "0.0.0.0":
        yield "head: dashboard-host is not 0.0.0.0: the operator could not deploy the Serve configuration"
    if amount(ray_container(head).get("resources", {}).get("limits", {}).get("memory", 0)) < 8 * 2**30:
        yield "head: memory limit below 8Gi"
    if not service["spec"].get("excludeHeadPodFromServeSvc"):
        yield "head: excludeHeadPodFromServeSvc is not set: clients would depend on the head"


def _upgrade_problems(service: dict) -> Iterator[str]:
    spec = service["spec"]
    strategy = spec.get("upgradeStrategy", {})
    if "type" not in strategy:
        yield "upgradeStrategy.type is not stated"
    if strategy.get("type") == "NewClusterWithIncrementalUpgrade":
        options = strategy.get("clusterUpgradeOptions") or {}
        if not spec["rayClusterConfig"].get("enableInTreeAutoscaling") or not options:
            yield "incremental upgrades need autoscaling and clusterUpgradeOptions"
        elif options["stepSizePercent"] > options.get("maxSurgePercent", 100):
            yield "stepSizePercent is larger than maxSurgePercent"
    graces = [group["template"]["spec"].get("terminationGracePeriodSeconds", 30) for group in groups(service).values()]
    if spec.get("rayClusterDeletionDelaySeconds", 60) < max(graces):
        yield "rayClusterDeletionDelaySeconds is shorter than the pods' terminationGracePeriodSeconds"
    if seconds(service["metadata"].get("annotations", {}).get("ray.io/initializing-timeout", 0)) < 600:
        yield "ray.io/initializing-timeout is not set, or too short for a model to be downloaded and loaded"


def _pod_problems(name: str, group: dict, documents: list[dict]) -> Iterator[str]:
    pod, container = group["template"]["spec"], ray_container(group)
    image = container.get("image", "")
    if ":" not in image.rpartition("/")[2] or image.endswith(":latest"):
        yield f"{name}: image {image!r} has no fixed tag"
    if (
        not pod.get("securityContext", {}).get("runAsNonRoot")
        or container.get("securityContext", {}).get("allowPrivilegeEscalation") is not False
    ):
        yield f"{name}: may run as root or gain privileges"
    if container.get("resources", {}).get("limits", {}).get("memory") is None:
        yield f"{name}: no memory limit, from which Ray and the object store take their sizes"
    requests, limits = (container.get("resources", {}).get(key, {}) for key in ("requests", "limits"))
    for resource in limits.keys() | requests.keys():
        if "gpu" in resource and requests.get(resource) != limits.get(resource):
            yield f"{name}: {resource} must be the same in requests and limits"
    volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
    for mount in container.get("volumeMounts", []):
        if mount["name"] not in volumes:
            yield f"{name}: mounts a volume {mount['name']!r} that the pod lacks"
        if mount["mountPath"] == "/dev/shm":
            yield f"{name}: the operator mounts /dev/shm itself"
    claims = {document["metadata"]["name"] for document in documents if document.get("kind") == "PersistentVolumeClaim"}
    for volume in volumes.values():
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        if claim is not None and claim not in claims:
            yield f"{name}: claim {claim!r} is not among the manifests"
    priority = pod.get("priorityClassName")
    if priority is not None and priority not in {
        d["metadata"]["name"] for d in documents if d.get("kind") == "PriorityClass"
    }:
        yield f"{name}: priority class {priority!r} is not among the manifests"
    if gpus(group) and priority is None:
        yield f"{name}: GPU pods without a priority class"


def _probe_problems(name: str, group: dict) -> Iterator[str]:
    container = ray_container(group)
    readiness, liveness = (probe_urls(container.get(key)) for key in ("readinessProbe", "livenessProbe"))
    agent = group.get("rayStartParams", {}).get("dashboard-agent-listen-port", "52365")
    for kind, asked in (("readiness", readiness), ("liveness", liveness)):
        if not any(re.search(rf":{agent}/api/(local_raylet_)?healthz$", url) for url in asked):
            yield f"{name}: the {kind} probe does not ask Ray's agent on port {agent}"
        probe = container.get(f"{kind}Probe") or {}
        waits = re.findall(r"wget -T (\d+)", " ".join(probe.get("exec", {}).get("command", [])))
        if waits and sum(map(int, waits)) > probe.get("timeoutSeconds", 1):
            yield f"{name}: the {kind} probe is cut off before its own questions are"
    ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
    proxy = f":{ports.get('serve')}/-/healthz"
    if name == "head":
        if any("/-/healthz" in url for url in readiness):
            yield "head: readiness waits for a Serve proxy, but Serve is deployed only once the head is ready"
    elif not any(url.endswith(proxy) for url in readiness):
        yield f"{name}: the readiness probe does not ask the Serve proxy on the port named `serve`"
    if any("/-/healthz" in url for url in liveness):
        yield f"{name}: the liveness probe asks the Serve proxy: pods would be killed while a model loads"


def probe_urls(probe: dict | None) -> list[str]:
    """host:port/path of everything that a probe asks."""
    if not probe:
        return []
    if "httpGet" in probe:
        return [f"localhost:{probe['httpGet']['port']}{probe['httpGet']['path']}"]
    return re.findall(r"http://(localhost:\d+/\S+)", " ".join(probe.get("exec", {}).get("command", [])))


def _fault_tolerance_problems(service: dict) -> Iterator[str]:
    options = service["spec"]["rayClusterConfig"].get("gcsFaultToleranceOptions")
    annotations = service["metadata"].get("annotations", {})
    if options is None:
        if annotations.get(FAULT_TOLERANCE) != "none":
            yield f"neither gcsFaultToleranceOptions nor the annotation {FAULT_TOLERANCE}: none: what happens when the head is lost is not stated"
        return
    if (
        FAULT_TOLERANCE in annotations
        or {"ray.io/ft-enabled", "ray.io/external-storage-namespace"} & annotations.keys()
    ):
        yield "annotations contradict gcsFaultToleranceOptions"
    if "value" in options.get("redisPassword", {}) or "valueFrom" not in options.get("redisPassword", {}):
        yield "the Redis password must come from a Secret"
    if "externalStorageNamespace" in options:
        yield "externalStorageNamespace is the operator's to choose: two clusters of an upgrade would share it"
    head = groups(service)["head"]
    names = {entry["name"] for entry in ray_container(head).get("env", [])}
    if {"redis-password", "redis-username"} & head.get("rayStartParams", {}).keys() or {
        "REDIS_PASSWORD",
        "REDIS_USERNAME",
        "RAY_REDIS_ADDRESS",
    } & names:
        yield "head: Redis settings stand outside gcsFaultToleranceOptions"
