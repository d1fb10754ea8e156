"""Where positions lie in a tensor of pages: position p in slot pages[p // page_size] * page_size + p % page_size."""

from collections.abc import Sequence


def add_slots(slots: list[int], pages: Sequence[int], page_size: int, start: int, stop: int) -> None:
    """Append the slots of positions start … stop - 1, page by page."""
    while start < stop:
        index, offset = divmod(start, page_size)
        first = pages[index] * page_size + offset
        count = page_size - offset
        if count > stop - start:
            count = stop - start
        slots += range(first, first + count)
        start += count


def slots_of(pages: Sequence[int], page_size: int, start: int, stop: int) -> list[int]:
    """The same as a list of its own."""
    slots: list[int] = []
    add_slots(slots, pages, page_size, start, stop)
    return slots
