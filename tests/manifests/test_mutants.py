"""Manifests that somebody could have written by mistake: each is refused, with a sentence that names the mistake."""

import pytest
from rendering import rendered

CLUSTER = "spec.rayClusterConfig"
HEAD = f"{CLUSTER}.headGroupSpec"
UNITS = f"{CLUSTER}.workerGroupSpecs.0"
DRAFTERS = f"{CLUSTER}.workerGroupSpecs.1"
CONTAINER = "template.spec.containers.0"
GONE = object()


def _set(document, path, value):
    """`~` stands for a dot inside a key."""
    *parents, last = [int(step) if step.isdigit() else step.replace("~", ".") for step in path.split(".")]
    for step in parents:
        document = document[step] if isinstance(step, int) else document.setdefault(step, {})
    if value is GONE:
        del document[last]
    elif callable(value):
        document[last] = value(document[last])
    elif isinstance(last, int) and last == len(document):
        document.append(value)
    else:
        document[last] = value


def _replaced(old, new):
    def change(text):
        assert old in text
        return text.replace(old, new)

    return change


# overlay, kind, path, new value, what is said
MUTANTS = [
    # types: what an API server would refuse, or drop without a word
    ("cpu-dev", "RayService", "spec.serveConfigv2", "x", "'serveConfigv2' was unexpected"),
    ("cpu-dev", "RayService", f"{CLUSTER}.workerGroups", [], "'workerGroups' was unexpected"),
    ("cpu-dev", "RayService", f"{UNITS}.minReplica", 1, "'minReplica' was unexpected"),
    ("cpu-dev", "RayService", f"{UNITS}.groupName", GONE, "'groupName' is a required property"),
    ("cpu-dev", "RayService", f"{UNITS}.replicas", "1", "is not of type 'integer'"),
    ("cpu-dev", "RayService", f"{HEAD}.rayStartParams.num-cpus", 0, "is not of type 'string'"),
    ("cpu-dev", "RayService", f"{UNITS}.{CONTAINER}.readinessProbes", {}, "'readinessProbes' was unexpected"),
    ("cpu-dev", "RayService", "spec.upgradeStrategy.type", "Rolling", "'Rolling' is not one of"),
    ("multi-node", "RayService", f"{CLUSTER}.autoscalerOptions.idleTimeout", 5, "'idleTimeout' was unexpected"),
    ("ha", "RayService", f"{CLUSTER}.gcsFaultToleranceOptions.address", "x", "'address' was unexpected"),
    ("single-node", "PodMonitor", "spec.podMetricsEndpoints.0.ports", "x", "'ports' was unexpected"),
    ("single-node", "PrometheusRule", "spec.groups.0.rules.0.expression", "x", "'expression' was unexpected"),
    ("single-node", "NetworkPolicy", "spec.ingres", [], "'ingres' was unexpected"),
    ("single-node", "PersistentVolumeClaim", "spec.accessMode", "x", "'accessMode' was unexpected"),
    ("ha", "StatefulSet", "spec.template.spec.container", [], "'container' was unexpected"),
    ("cpu-dev", "NetworkPolicy", "kind", "NetworkPolicies", "unknown kind"),
    # the operator's own rules
    ("cpu-dev", "RayService", "metadata.name", "d" * 48, "DNS-1035"),
    ("cpu-dev", "RayService", "metadata.name", "2flash", "DNS-1035"),
    ("cpu-dev", "RayService", f"{HEAD}.resources", {"CPU": "0"}, "resources stand in rayStartParams and in"),
    ("cpu-dev", "RayService", f"{UNITS}.rayStartParams.labels", "a=b", "labels belong in the group's `labels`"),
    ("cpu-dev", "RayService", f"{UNITS}.minReplicas", 2, "minReplicas <= replicas <= maxReplicas"),
    ("cpu-dev", "RayService", f"{UNITS}.maxReplicas", 3, "out of reach without enableInTreeAutoscaling"),
    (
        "multi-node",
        "RayService",
        f"{UNITS}.template.spec.restartPolicy",
        "Always",
        "restartPolicy must be Never or unset",
    ),
    (
        "multi-node",
        "RayService",
        f"{CLUSTER}.enableInTreeAutoscaling",
        GONE,
        "autoscalerOptions without enableInTreeAutoscaling",
    ),
    (
        "multi-node",
        "RayService",
        "spec.upgradeStrategy",
        {"type": "NewClusterWithIncrementalUpgrade"},
        "incremental upgrades need",
    ),
    ("cpu-dev", "RayService", f"{CLUSTER}.authOptions.enableK8sTokenAuth", True, "does not work with RayService"),
    (
        "ha",
        "RayService",
        f"{CLUSTER}.gcsFaultToleranceOptions.redisPassword",
        {"value": "secret"},
        "must come from a Secret",
    ),
    (
        "ha",
        "RayService",
        f"{CLUSTER}.gcsFaultToleranceOptions.externalStorageNamespace",
        "x",
        "two clusters of an upgrade would share it",
    ),
    (
        "ha",
        "RayService",
        "metadata.annotations",
        lambda old: {**old, "ray.io/ft-enabled": "true"},
        "contradict gcsFaultToleranceOptions",
    ),
    ("ha", "RayService", f"{HEAD}.rayStartParams.redis-password", "secret", "outside gcsFaultToleranceOptions"),
    # our own: the cluster
    ("cpu-dev", "RayService", f"{CLUSTER}.rayVersion", "2.59.0", "not the one in constraints.txt"),
    ("cpu-dev", "RayService", f"{CLUSTER}.authOptions", {"mode": "disabled"}, "would be open"),
    (
        "single-node",
        "RayService",
        f"{HEAD}.{CONTAINER}.resources.limits",
        {"memory": "8Gi", "nvidia.com/gpu": "1"},
        "head: has 1 GPUs",
    ),
    ("cpu-dev", "RayService", f"{HEAD}.rayStartParams.num-cpus", "2", "replicas could be placed there"),
    (
        "cpu-dev",
        "RayService",
        f"{HEAD}.rayStartParams.dashboard-host",
        GONE,
        "could not deploy the Serve configuration",
    ),
    ("cpu-dev", "RayService", f"{HEAD}.{CONTAINER}.resources.limits.memory", "4Gi", "below 8Gi"),
    ("cpu-dev", "RayService", "spec.excludeHeadPodFromServeSvc", False, "clients would depend on the head"),
    ("cpu-dev", "RayService", "spec.upgradeStrategy", GONE, "upgradeStrategy.type is not stated"),
    ("cpu-dev", "RayService", "spec.rayClusterDeletionDelaySeconds", 30, "shorter than the pods'"),
    ("multi-node", "RayService", "spec.rayClusterDeletionDelaySeconds", 300, "an upgrade would cut answers"),
    (
        "cpu-dev",
        "RayService",
        "metadata.annotations",
        {"dflash2/gcs-fault-tolerance": "none"},
        "initializing-timeout is not set",
    ),
    (
        "cpu-dev",
        "RayService",
        "metadata.annotations",
        {"ray.io/initializing-timeout": "30m"},
        "when the head is lost is not stated",
    ),
    ("cpu-dev", "RayService", f"{UNITS}.{CONTAINER}.image", "registry:5000/dflash2-ray", "no fixed tag"),
    ("cpu-dev", "RayService", f"{UNITS}.template.spec.securityContext", GONE, "may run as root"),
    (
        "single-node",
        "RayService",
        f"{UNITS}.{CONTAINER}.volumeMounts.2",
        {"name": "shm", "mountPath": "/dev/shm"},
        "mounts /dev/shm itself",
    ),
    ("single-node", "RayService", f"{UNITS}.template.spec.priorityClassName", "urgent", "is not among the manifests"),
    ("single-node", "RayService", f"{UNITS}.template.spec.priorityClassName", GONE, "without a priority class"),
    ("single-node", "PersistentVolumeClaim", "metadata.name", "cache", "claim 'dflash2-models' is not among"),
    # probes
    ("cpu-dev", "RayService", f"{UNITS}.{CONTAINER}.readinessProbe", GONE, "does not ask Ray's agent"),
    (
        "cpu-dev",
        "RayService",
        f"{UNITS}.{CONTAINER}.livenessProbe",
        GONE,
        "the liveness probe does not ask Ray's agent",
    ),
    ("cpu-dev", "RayService", f"{HEAD}.{CONTAINER}.livenessProbe.httpGet.port", 52366, "on port 52365"),
    (
        "cpu-dev",
        "RayService",
        f"{UNITS}.{CONTAINER}.readinessProbe.exec.command.2",
        _replaced(":8000/", ":8001/"),
        "does not ask the Serve proxy",
    ),
    (
        "cpu-dev",
        "RayService",
        f"{UNITS}.{CONTAINER}.readinessProbe.timeoutSeconds",
        2,
        "cut off before its own questions",
    ),
    (
        "cpu-dev",
        "RayService",
        f"{UNITS}.{CONTAINER}.livenessProbe",
        {"exec": {"command": ["wget http://localhost:52365/api/healthz && wget http://localhost:8000/-/healthz"]}},
        "killed while a model loads",
    ),
    # the Serve configuration and what it needs
    (
        "cpu-dev",
        "RayService",
        "spec.serveConfigV2",
        _replaced("max_num_seqs: 8", "max_num_seqs: 9"),
        "not the file of deploy/serve",
    ),
    (
        "cpu-dev",
        "RayService",
        "spec.serveConfigV2",
        _replaced("max_num_seqs", "max_num_seq"),
        "did you mean 'max_num_seqs'",
    ),
    ("cpu-dev", "RayService", "spec.serveConfigV2", _replaced("applications:", "aplications:"), "serveConfigV2: "),
    (
        "cpu-dev",
        "RayService",
        "spec.serveConfigV2",
        _replaced("dflash2_ray.app", "other.app"),
        "expected one application",
    ),
    (
        "cpu-dev",
        "RayService",
        "spec.serveConfigV2",
        _replaced("0.0.0.0", "127.0.0.1"),
        "nothing outside the pod could connect",
    ),
    ("cpu-dev", "RayService", "spec.serveConfigV2", _replaced("EveryNode", "HeadOnly"), "workers would have no proxy"),
    ("cpu-dev", "RayService", "spec.serveConfigV2", _replaced("port: 8000", "port: 8001"), "but Serve listens on 8001"),
    ("cpu-dev", "RayService", f"{UNITS}.{CONTAINER}.ports.0.containerPort", 8001, "`serve` is 8001"),
    ("single-node", "RayService", "spec.serveConfigV2", _replaced("size: 2", "size: 3"), "needs 1 free GPU"),
    (
        "single-node",
        "RayService",
        "spec.serveConfigV2",
        _replaced("size: 2", "size: 1"),
        "of which units take 2: not whole-unit shapes",
    ),
    (
        "single-node",
        "RayService",
        f"{UNITS}.{CONTAINER}.resources.limits.nvidia~com/gpu",
        "4",
        "the same in requests and limits",
    ),
    (
        "single-node",
        "RayService",
        f"{UNITS}.{CONTAINER}.resources",
        {"requests": {"nvidia.com/gpu": "4"}, "limits": {"nvidia.com/gpu": "4", "cpu": "8", "memory": "9Gi"}},
        "4 GPUs, of which units take 3",
    ),
    (
        "single-node",
        "RayService",
        f"{UNITS}.{CONTAINER}.resources.limits.cpu",
        "3",
        "3 CPUs, but what runs there takes 3.2",
    ),
    (
        "single-node",
        "RayService",
        f"{UNITS}.{CONTAINER}.resources",
        {"limits": {"memory": "9Gi"}},
        "device is cuda, but no worker has a GPU",
    ),
    (
        "single-node",
        "RayService",
        "spec.serveConfigV2",
        _replaced("drafter_placement: separate", "drafter_placement: auto"),
        "pods are still joining",
    ),
    (
        "multi-node",
        "RayService",
        "spec.serveConfigV2",
        _replaced("num_replicas: 2", "num_replicas: 2\n    autoscaling: 1-5"),
        "unit 4 needs",
    ),
    ("multi-node", "RayService", f"{DRAFTERS}.labels", {"dflash2/drafter": "yes"}, "with labels dflash2/drafters=yes"),
    ("multi-node", "RayService", f"{DRAFTERS}.replicas", 3, "not whole-unit shapes"),
    (
        "multi-node",
        "RayService",
        "spec.serveConfigV2",
        _replaced("num_ingress_replicas: 4", "num_ingress_replicas: 2"),
        "never becomes ready",
    ),
    (
        "multi-node",
        "RayService",
        "spec.serveConfigV2",
        _replaced("max_replicas_per_node: 1", "max_ongoing_requests: 9"),
        "never becomes ready",
    ),
    (
        "single-node",
        "RayService",
        "spec.serveConfigV2",
        _replaced("api-keys/keys", "api-keys/key"),
        "no file of a mounted Secret",
    ),
    ("single-node", "RayService", f"{HEAD}.{CONTAINER}.volumeMounts", [], "head: api_keys_file"),
    (
        "single-node",
        "RayService",
        f"{UNITS}.{CONTAINER}.env.0",
        {"name": "DFLASH2_API_KEYS", "value": "k"},
        "DFLASH2_API_KEYS is written out",
    ),
    ("single-node", "RayService", f"{UNITS}.{CONTAINER}.env.1.value", "/tmp", "HF_HOME '/tmp' is on no volume"),
    # the network
    ("cpu-dev", "RayService", f"{UNITS}.rayStartParams.metrics-export-port", "8081", "but Ray exports on 8081"),
    ("cpu-dev", "RayService", f"{UNITS}.template.metadata.labels.app", "dflash", "no NetworkPolicy selects"),
    ("single-node", "PodMonitor", "spec.selector.matchLabels.app", "dflash", "the PodMonitor does not select it"),
    (
        "single-node",
        "PodMonitor",
        "spec.podMetricsEndpoints.0.port",
        "metric",
        "scrapes ports that no pod has: ['metric']",
    ),
    ("single-node", "PodMonitor", "spec.podMetricsEndpoints.1", GONE, "leaves out Ray's metrics or the service's"),
    ("single-node", "PodMonitor", "spec.podMetricsEndpoints.1.path", "/metric", "a path other than /metrics"),
    (
        "single-node",
        "PodMonitor",
        "spec.podMetricsEndpoints.1.authorization",
        GONE,
        "asks for a key, and the PodMonitor has none",
    ),
    ("single-node", "NetworkPolicy", "spec.policyTypes", ["Ingress"], "does not close both directions"),
    ("single-node", "NetworkPolicy", "spec.ingress.1.from", [], "lets everybody in"),
    ("single-node", "NetworkPolicy", "spec.ingress.1.ports.0.port", 22, "opens ['22'"),
    ("single-node", "NetworkPolicy", "spec.ingress.0.ports", [{"port": 6379}], "cannot reach each other on every port"),
    ("single-node", "NetworkPolicy", "spec.egress.1", GONE, "closes port 53"),
    ("single-node", "NetworkPolicy", "metadata.namespace", "other", "expected one namespace"),
]


@pytest.mark.parametrize(
    ("overlay", "kind", "path", "value", "says"), MUTANTS, ids=[f"{row[0]}-{row[2]}-{row[4][:24]}" for row in MUTANTS]
)
def test_mistakes_are_refused(overlay, kind, path, value, says, problems_of):
    documents = rendered(overlay)
    document = next(one for one in documents if one["kind"] == kind)
    _set(document, path, value)
    problems = problems_of(documents, overlay)
    assert any(says in problem for problem in problems), problems


@pytest.mark.parametrize(
    "kind", ["RayService", "NetworkPolicy", "PodMonitor", "PriorityClass", "PersistentVolumeClaim"]
)
def test_a_missing_document_is_missed(kind, problems_of):
    documents = [document for document in rendered("single-node") if document["kind"] != kind]
    assert problems_of(documents, "single-node")


def test_secrets_stay_out(problems_of):
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "keys", "namespace": "dflash2"},
        "stringData": {"keys": "k"},
    }
    assert "a Secret stands among the manifests" in problems_of([*rendered("cpu-dev"), secret], "cpu-dev")
