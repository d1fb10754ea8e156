"""The choices of one response, each a stream of chunks of its own, taken together."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from dflash2_ray.core.generation import Generation, GenerationChunk


async def rest_of(stream: AsyncIterator[GenerationChunk], first: GenerationChunk) -> Generation:
    last = first
    async for chunk in stream:
        last = chunk
    assert last.generation is not None, "the last chunk carries the generation"
    return last.generation


async def all_of(awaitables: list[Any]) -> list[Any]:
    """Results of all; the first failure cancels the others."""
    tasks = [asyncio.ensure_future(one) for one in awaitables]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def close_all(streams: list[Any]) -> None:
    for stream in streams:
        await stream.aclose()


async def merged(
    streams: list[AsyncIterator[GenerationChunk]], firsts: list[GenerationChunk]
) -> AsyncGenerator[tuple[int, GenerationChunk], None]:
    """(choice index, chunk) of all streams in order of arrival."""
    for index, first in enumerate(firsts):
        yield index, first
    if len(streams) == 1:
        async for chunk in streams[0]:
            yield 0, chunk
        return
    pending = {asyncio.ensure_future(anext(stream, None)): index for index, stream in enumerate(streams)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = pending.pop(task)
                following = task.result()
                if following is not None:
                    pending[asyncio.ensure_future(anext(streams[index], None))] = index
                    yield index, following
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
