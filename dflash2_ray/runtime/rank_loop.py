"""How target ranks stay in step: rank 0 says what every pass computes, the others compute it and decide nothing.

One framed channel from rank 0 to each follower carries the flat batch of every pass; a follower waits there, not in a
collective, so an idle rank 0 trips no timeout. What a follower does is a function of the message alone. Messages carry
generation and number; one that does not fit ends the follower, and with it the group. It must not know requests or drafts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dflash2_ray.errors import UnitLost
from dflash2_ray.models.attention_batch import Span
from dflash2_ray.models.target import Target
from dflash2_ray.runtime.channel import Channel, ChannelClosed, Listener
from dflash2_ray.runtime.input_batch import InputBatch, lay_out


class Followers:
    """Rank 0's side: every other rank's channel."""

    def __init__(self, channels: Sequence[Channel], generation: int) -> None:
        self._channels = channels
        self._generation = generation
        self._number = 0

    @classmethod
    def accept(cls, listener: Listener, count: int, generation: int) -> "Followers":
        """Wait for `count` followers: they have joined the group already, so they are alive and on their way. No other peer
        knows the listener's token. Raises OSError when the listener is closed meanwhile."""
        channels = [listener.accept() for _ in range(count)]
        listener.close()
        return cls(channels, generation)

    def publish(self, batch: InputBatch) -> None:
        """Tell every follower to run this batch. Raises UnitLost."""
        self._number += 1
        message = {"generation": self._generation, "number": self._number, **_pack(batch)}
        try:
            for channel in self._channels:
                channel.send(message)
        except ChannelClosed as error:
            raise UnitLost(f"a target rank went away: {error}") from None

    def close(self) -> None:
        """End the followers' loops."""
        for channel in self._channels:
            channel.close()


def follow(target: Target, cache: Any, channel: Channel, generation: int, device: str) -> str:
    """A follower's life; returns why it ended. Raises UnitLost when a collective fails or a message does not fit."""
    number = 0
    while True:
        try:
            message = channel.receive()
        except (ChannelClosed, ValueError) as error:
            return f"rank 0 went away: {error}"
        number += 1
        if (message["generation"], message["number"]) != (generation, number):
            raise UnitLost(
                f"target rank {target.shard.rank}: expected pass {number} of generation {generation}, got pass "
                f"{message['number']} of generation {message['generation']}"
            )
        run_pass(target, cache, _unpack(message).on(device))


def run_pass(target: Target, cache: Any, batch: InputBatch) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """One pass over a batch that lies on the device, the same calls on every rank: (logits of the rows that want them, tapped features)."""
    hidden, features = target.forward(batch.token_ids, batch.positions, batch.attention, cache)
    if batch.num_logit_rows == 0:
        return None, features
    rows = hidden if batch.logit_rows is None else hidden.index_select(0, batch.logit_rows)
    return target.logits(rows), features


def _pack(batch: InputBatch) -> dict[str, Any]:
    return {
        "token_ids": batch.token_ids.tolist(),
        "positions": batch.positions.tolist(),
        "slots": batch.attention.slots.tolist(),
        "spans": [(span.row_start, span.num_rows, span.kv_len, list(span.page_ids)) for span in batch.attention.spans],
        "page_size": batch.attention.page_size,
        "logit_rows": None if batch.logit_rows is None else batch.logit_rows.tolist(),
        "num_logit_rows": batch.num_logit_rows,
    }


def _unpack(message: Mapping[str, Any]) -> InputBatch:
    return lay_out(
        message["token_ids"], message["positions"], message["slots"], message["logit_rows"],
        [Span(*span) for span in message["spans"]], message["page_size"],
        row_starts=(), num_logit_rows=message["num_logit_rows"], num_sampling_rows=0,  # rank 0 alone reads logits
    )  # fmt: skip
