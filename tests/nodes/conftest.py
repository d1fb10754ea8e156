"""A Ray cluster of three simulated nodes on this machine: a head for the fronts, one node for targets, one for drafters."""

import os

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # replicas at priority 15 starve beside anything else that computes
