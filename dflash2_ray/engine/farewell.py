"""The last word of a replica that has to go: said until somebody has taken it, unless the whole application goes.

After a redeploy every replica is another one, the bookkeeper too, and for some seconds there is none: what a replica counted or keeps would
be lost with it if it did not wait. It must not know what is said.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import ray
from ray import serve
from ray.serve.exceptions import RayServeException

LOST_CALL = (ray.exceptions.RayError, RayServeException, TimeoutError)
PATIENCE_S = 15.0  # for a successor of the one that listens; a process that starts on a busy machine
_PAUSE_S = 0.25
_STATUS_S = 2.0


async def until_taken(tell: Callable[[], Awaitable[bool]], goes_on: Callable[[], Awaitable[bool]]) -> None:
    """Call `tell` until it returns True, `goes_on` returns False, or `PATIENCE_S` are over. A call that is lost is made again."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with contextlib.suppress(*LOST_CALL):
                    if await tell():
                        return
                if not await goes_on():
                    return
                await asyncio.sleep(_PAUSE_S)


async def application_goes_on() -> bool:
    """False while this replica's application is deleted or Serve is shut down, and when nobody can say."""
    name = serve.get_replica_context().app_name

    def status() -> str | None:
        application = serve.status().applications.get(name)
        return None if application is None else str(application.status.value)

    try:
        return await asyncio.wait_for(asyncio.to_thread(status), _STATUS_S) not in (None, "DELETING")
    except Exception:  # no controller, no head: whatever it raises then
        return False
