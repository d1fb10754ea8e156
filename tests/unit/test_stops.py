"""Stop strings: the text, its tokens and its counts depend on the text alone, not on how it came in pieces."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dflash2_ray
from dflash2_ray.core.messages import RequestDelta
from dflash2_ray.core.sampling_params import SamplingParams
from dflash2_ray.text.assembly import TextAssembler
from dflash2_ray.text.stop_matcher import StopMatcher
from dflash2_ray.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_folder(Path(dflash2_ray.__file__).parent / "assets" / "target")
TEXT = st.text(alphabet="abc", max_size=14)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3)


def reference(text, stops, include=False):
    """What plain reading finds: the first character at which a stop string is complete, the longest of those."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def pieces_of(text, cuts):
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 14), max_size=6), include=st.booleans())
@settings(max_examples=500, deadline=None, derandomize=True)
def test_any_chunking_gives_the_same_text(text, stops, cuts, include):
    matcher, shown, ended = StopMatcher(stops, include), "", None
    for piece in pieces_of(text, cuts):
        new, ended = matcher.push(piece)
        shown += new
        assert reference(text, stops, include)[0].startswith(shown), "what was shown belongs to the final text"
        if ended is not None:
            break
    if ended is None:
        shown += matcher.finish()
    assert (shown, ended) == reference(text, stops, include)


@pytest.mark.parametrize("stops", [["DEF"], ["DEFGHIJ"], ["DEF", "DEFGHIJ"], ["DEFGHIJ", "DEF"], ["EFX", "K"]])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 11])
@pytest.mark.parametrize("text", ["ABCDEFGHIJK", "ABCDEFX"])
def test_b41_nothing_of_a_stop_is_sent(stops, size, text):
    matcher, shown = StopMatcher(stops), ""
    for start in range(0, len(text), size):
        new, ended = matcher.push(text[start : start + size])
        shown += new
        if ended:
            break
    else:
        shown += matcher.finish()
    assert shown == reference(text, stops)[0]


@given(
    text=st.text(alphabet="abé\U0001f999", min_size=1, max_size=10),
    stops=st.lists(st.text(alphabet="abé\U0001f999", min_size=1, max_size=3), min_size=1, max_size=2),
    cuts=st.lists(st.integers(0, 40), max_size=5),
    min_tokens=st.integers(0, 4),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_tokens_text_and_counts_end_at_the_same_token(text, stops, cuts, min_tokens):
    """Steps of any size: the same text, token ids and usage as one token per step; what a block brought behind is not counted."""
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    params = SamplingParams(stop=tuple(stops), min_tokens=min_tokens)

    def run(steps):
        one, chunks = TextAssembler(TOKENIZER, "r", 3, 0.0, params), []
        for index, step in enumerate(steps):
            counts = ((7, len(step), None),) if index else ()  # the first comes from the prefill
            finish = "length" if index == len(steps) - 1 else None
            chunks.append(one.push(RequestDelta("r", tuple(step), finish, steps=counts, num_speculative_tokens=40)))
            if chunks[-1].generation:
                break
        last = chunks[-1].generation
        assert "".join(chunk.text for chunk in chunks) == last.text
        assert [token for chunk in chunks for token in chunk.token_ids] == last.token_ids
        assert last.usage.completion_tokens == len(last.token_ids)
        stats = last.metrics["speculative_decoding"]
        assert stats["num_spec_steps"] + stats["num_accepted_draft_tokens"] == len(last.token_ids) - len(
            chunks[0].token_ids
        )
        return last.text, last.token_ids, last.finish_reason, last.stop_reason

    edges = [0, *sorted({min(cut, len(ids)) for cut in cuts} - {0, len(ids)}), len(ids)]
    chunked = run([ids[a:b] for a, b in itertools.pairwise(edges)])
    assert chunked == run([[token] for token in ids])
    if min_tokens == 0:
        assert (chunked[0], chunked[3]) == reference(text, stops)
        assert chunked[2] == ("length" if chunked[3] is None else "stop")
