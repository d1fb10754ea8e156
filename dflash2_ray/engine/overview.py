"""The state of a whole service at a glance: what every unit says of itself, and what Serve says of those that say nothing.

Bounded in time whatever hangs: a unit that does not answer is a row that says so. It must not know HTTP.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray import serve
from ray.serve.exceptions import RayServeException

from dflash2_ray.core.spec_counters import SpecCounters

_NO_UNIT = (ray.exceptions.RayError, RayServeException)
_SERVING = "serving"


def unit_row(facts: Mapping[str, Any] | None, why: str | None) -> dict[str, Any]:
    """The numbers of one unit from its description; facts: None while it has none, for the reason `why`. kv_usage: share of the pages, 0 to 1;
    tokens_per_s: of decode steps lately, None while nothing runs."""
    if facts is None:
        return {"state": "not serving", "why": why}
    step_s, tokens = (facts["step_control"][name] for name in ("real_step_s", "tokens_per_step"))
    runs = bool(facts["num_requests_running"] and step_s)
    return {
        "state": _SERVING,
        "why": None,
        "model": facts["model"],
        "num_requests_running": facts["num_requests_running"],
        "num_requests_waiting": facts["num_requests_waiting"],
        "num_pages": facts["num_pages"],
        "kv_usage": 1 - facts["num_free_pages"] / facts["num_pages"],
        "acceptance_length": SpecCounters(**facts["spec_counters"]).acceptance_length,
        "tokens_per_s": tokens / step_s if runs else None,
    }


async def overview(handle: Any, timeout_s: float) -> dict[str, Any]:
    """status: `ready`, `degraded` or `not ready`; why; model; degraded: what is missing; units: a row per running unit; serve: what Serve
    says of application and unit deployment, and how many units are in which state. `handle`: of the unit deployment."""
    units, said = await asyncio.gather(_ask_units(handle, timeout_s), _ask_serve(handle, timeout_s))
    serving = [unit for unit in units if unit["state"] == _SERVING]
    missing = [f"{_name(unit)}: {unit['why']}" for unit in units if unit["state"] != _SERVING]
    if said["deployment"] != "UPSCALING":  # more than there were is not less than there should be
        missing += [
            f"{count} of the units: {state.lower()}"
            for state, count in said["units"].items()
            if state not in ("RUNNING", "STOPPING")
        ]
    degraded = missing + [f"{_name(unit)}: no {part}" for unit in serving for part in unit["degraded"]]
    why = "; ".join(degraded) or None
    if not serving:
        why = (
            "; ".join(part for part in (why, said["message"]) if part)
            or f"no unit runs in application {handle.app_name!r}"
        )
    return {
        "status": "not ready" if not serving else "degraded" if degraded else "ready",
        "why": why,
        "model": serving[0]["model"] if serving else None,
        "degraded": degraded,
        "units": units,
        "serve": said,
    }


def _name(unit: Mapping[str, Any]) -> str:
    return "a unit" if unit.get("unit") is None else f"unit {unit['unit']}"


async def _ask_units(handle: Any, timeout_s: float) -> list[dict[str, Any]]:
    """What each running unit answers, by number; those without an answer last."""
    response = handle.broadcast("overview")
    try:
        async with asyncio.timeout(timeout_s):
            calls: Sequence[
                Any
            ] = await response._fetch_replica_results_async()  # its public form loses all answers when one is late
    except (TimeoutError, *_NO_UNIT):
        return []
    asked = [asyncio.ensure_future(call.get_async()) for call in calls]
    if not asked:
        return []
    _, late = await asyncio.wait(asked, timeout=timeout_s)
    for one in late:
        one.cancel()
    rows = [
        _row(one, timeout_s) if one not in late else unit_row(None, f"no answer within {timeout_s:g} s")
        for one in asked
    ]
    return sorted(rows, key=lambda row: (row.get("unit") is None, row.get("unit")))


def _row(answer: "asyncio.Future[dict[str, Any]]", timeout_s: float) -> dict[str, Any]:
    error = answer.exception()
    if error is None:
        return answer.result()
    if isinstance(error, _NO_UNIT):
        return unit_row(None, f"gone: {type(error).__name__}")
    raise error


async def _ask_serve(handle: Any, timeout_s: float) -> dict[str, Any]:
    """application: Serve's status of it, None where it is not known; message; units: how many by state."""
    said: dict[str, Any] = {"application": None, "deployment": None, "message": "", "units": {}}
    try:
        status = await asyncio.wait_for(asyncio.to_thread(serve.status), timeout_s)
    except (TimeoutError, *_NO_UNIT) as error:
        return said | {"message": f"Serve's controller does not answer: {type(error).__name__}"}
    application = status.applications.get(handle.app_name)
    if application is None:
        return said | {"message": f"Serve knows no application {handle.app_name!r}"}
    said |= {"application": application.status.value, "message": application.message}
    deployment = application.deployments.get(handle.deployment_name)
    if deployment is None:
        return said
    states = {str(getattr(state, "value", state)): count for state, count in deployment.replica_states.items() if count}
    message = "; ".join(part for part in (application.message, deployment.message) if part)
    return said | {"deployment": deployment.status.value, "message": message, "units": states}
