"""Work that ends at a time on the event loop's clock."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar

from dflash2_ray.errors import DeadlinePassed

_Item = TypeVar("_Item")


@contextlib.asynccontextmanager
async def until(deadline: float | None) -> AsyncIterator[None]:
    """Raise DeadlinePassed inside the block at `deadline` (the loop's clock); None: never."""
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError:
        if deadline is None or asyncio.get_running_loop().time() < deadline:
            raise
        raise DeadlinePassed("the request took longer than request_timeout_s") from None


async def before(deadline: float | None, items: AsyncGenerator[_Item, None]) -> AsyncGenerator[_Item, None]:
    """The items; DeadlinePassed instead of the one that would come too late."""
    async with contextlib.aclosing(items):
        while True:
            async with until(deadline):
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    return
            yield item
