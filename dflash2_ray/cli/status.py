"""`dflash2-ray status`: a running service on one page: whether it is ready, and what of it is not."""

import asyncio
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from dflash2_ray.cli.settings import API_KEY_VARIABLES, console, write_json
from dflash2_ray.errors import ConfigError, DFlash2Error

_TIMEOUT_S = 15.0  # the service itself answers within about five
_CONNECT_S = 5.0
_COLUMNS = ("role", "host", "GPU", "pid", "node")


def status(
    url: Annotated[str, typer.Option(help="Where the service listens.")] = "http://127.0.0.1:8000",
    address: Annotated[
        str,
        typer.Option(
            help="Ask through Ray instead of HTTP: address of the cluster, `auto` on one of its nodes. Also tells why a service has not come up."
        ),
    ] = "",
    app_name: Annotated[str, typer.Option(help="With --address: Serve's name of the application.")] = "default",
    api_key: Annotated[
        str, typer.Option(help="Key of the service. Default: DFLASH2_API_KEY, else OPENAI_API_KEY.")
    ] = "",
    json_path: Annotated[
        str, typer.Option("--json", help="Write the report to this file (- for standard output, without the page).")
    ] = "",
) -> None:
    """Show a running service: units, their ranks and drafters, what is missing, how full it is.

    Exit code 0: ready, perhaps degraded; 1: not ready, or nobody answers; 2: wrong use.
    """
    report = _through_ray(address, app_name) if address else _through_http(url, api_key)
    if json_path:
        write_json(json_path, report)
    if json_path != "-":
        for line in page(address or url, report):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    if report["status"] == "not ready":
        raise typer.Exit(1)


def _through_http(url: str, api_key: str) -> dict[str, Any]:
    """Raises ConfigError for what is no URL, DFlash2Error where no service of ours answers there."""
    import httpx

    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url: expected http://HOST:PORT, got {url!r}")
    key = api_key or next((os.environ[name] for name in API_KEY_VARIABLES if os.environ.get(name)), None)
    try:
        response = httpx.get(
            f"{url.rstrip('/')}/status", headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=_TIMEOUT_S
        )
        report = response.json() if response.status_code == 200 else None
    except httpx.InvalidURL as error:
        raise ConfigError(f"--url: expected http://HOST:PORT, got {url!r}: {error}") from None
    except httpx.HTTPError as error:
        raise DFlash2Error(f"not reachable: {url}: {type(error).__name__}: {error}") from None
    except ValueError:
        report = None
    if response.status_code == 401:
        raise DFlash2Error(f"{url}: this service asks for an API key: --api-key, DFLASH2_API_KEY or OPENAI_API_KEY")
    if not isinstance(report, dict) or "units" not in report:
        raise DFlash2Error(
            f"not ready: {url} answers, but no dflash2_ray service does (HTTP {response.status_code}); it may be starting: "
            "`dflash2-ray status --address auto` on a node of the cluster says how far it is"
        )
    return report


def _through_ray(address: str, app_name: str) -> dict[str, Any]:
    """Raises ConfigError for what is no address, DFlash2Error where there is no such cluster, or no service on it."""
    host, sign, port = address.rpartition(":")
    if address != "auto":
        if not (sign and host and port.isdecimal() and int(port) < 65536):
            raise ConfigError(f"--address: expected auto or HOST:PORT, got {address!r}")
        try:
            socket.create_connection(
                (host.strip("[]"), int(port)), _CONNECT_S
            ).close()  # Ray itself would try for minutes
        except OSError as error:
            raise DFlash2Error(f"not reachable: Ray at {address}: {error}") from None
    import ray
    from ray.serve.exceptions import RayServeException

    from dflash2_ray.engine.client import Client

    started = not ray.is_initialized()
    try:
        if started:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        return asyncio.run(Client(app_name).overview())
    except KeyError:
        raise DFlash2Error(
            f"not ready: no application {app_name!r} of this service is deployed on Ray at {address}"
        ) from None
    except (ConnectionError, RuntimeError, ValueError, RayServeException, ray.exceptions.RayError) as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DFlash2Error(f"not reachable: Ray at {address}: {line}") from None
    finally:
        if started and ray.is_initialized():
            ray.shutdown()


def page(where: str, report: Mapping[str, Any]) -> Iterator[str]:
    """The report as lines of text."""
    model = f"{report['model']} at {where}" if report["model"] else where
    yield f"{model}: {report['status']}" + (f" ({report['why']})" if report["why"] else "")
    states = ", ".join(f"{count} {state.lower()}" for state, count in report["serve"]["units"].items()) or "none"
    yield f"Serve says: application {(report['serve']['application'] or 'unknown').lower()}; units: {states}"
    for unit in report["units"]:
        yield ""
        yield _head(unit)
        if unit["state"] == "serving":
            yield _load(unit)
        yield from _workers(unit.get("workers", ()))


def _head(unit: Mapping[str, Any]) -> str:
    if unit.get("unit") is None:
        return f"a unit: {unit['state']}: {unit['why']}"
    why = f": {unit['why']}" if unit["why"] else ""
    parts = [
        f"unit {unit['unit']} ({unit['replica']}): {unit['state']}{why}",
        f"generation {unit['generation']} of its ranks",
    ]
    if unit["num_rebuilds"]:
        parts.append(f"ranks replaced {unit['num_rebuilds']} times")
    if unit["num_drafter_restarts"]:
        parts.append(f"drafter restarted {unit['num_drafter_restarts']} times")
    return " · ".join([*parts, *(f"no {part}" for part in unit["degraded"])])


def _load(unit: Mapping[str, Any]) -> str:
    parts = [
        f"  {unit['num_requests_running']} requests running, {unit['num_requests_waiting']} waiting",
        f"KV {unit['kv_usage']:.0%} of {unit['num_pages']} pages",
    ]
    if unit["acceptance_length"] is not None:
        parts.append(f"acceptance length {unit['acceptance_length']:.2f}")
    if unit["tokens_per_s"] is not None:
        parts.append(f"{unit['tokens_per_s']:,.0f} tokens/s")
    return " · ".join(parts)


def _workers(workers: Any) -> Iterator[str]:
    rows = [_COLUMNS]
    for worker in workers:
        gpus = ",".join(str(one) for one in worker.get("gpu_ids", ())) or "-"
        rows.append(
            (
                worker["role"],
                str(worker.get("host", "?")),
                gpus,
                str(worker.get("pid", "?")),
                str(worker.get("node_id", "?"))[:8],
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for row in rows if workers else ():
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
