"""Manifests and images as files; only `test_serve_configs.py` starts a Ray cluster, of its own."""

import os

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # replicas at priority 15 starve beside anything else that computes

import pytest
from cluster_rules import cluster_problems
from network_rules import network_problems
from rendering import serve_config_text
from schemas import type_problems
from serving_rules import serving_problems


@pytest.fixture(scope="session")
def problems_of():
    """All sentences that schemas and rules have to say about an overlay's documents. Types first: rules rely on them."""

    def find(documents, overlay):
        found = [problem for document in documents for problem in type_problems(document)]
        if not found:
            found += [
                *cluster_problems(documents),
                *serving_problems(documents, serve_config_text(overlay)),
                *network_problems(documents),
            ]
        return found

    return find
