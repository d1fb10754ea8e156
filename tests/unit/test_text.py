"""Text: streamed pieces join to one decode and never show half a character (B42), the assembler's chunks and final
Generation, and what a checkpoint says about stopping and sampling."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dflash2_ray
from dflash2_ray.core.messages import RequestDelta, SpeculationStats
from dflash2_ray.errors import CheckpointError
from dflash2_ray.text.assembly import TextAssembler
from dflash2_ray.text.detokenizer import Detokenizer
from dflash2_ray.text.generation_defaults import read_generation_defaults
from dflash2_ray.text.tokenizer import REPLACEMENT, Tokenizer

FOLDER = Path(dflash2_ray.__file__).parent / "assets" / "target"
TOKENIZER = Tokenizer.from_folder(FOLDER)
VOCAB = TOKENIZER._backend.get_vocab_size()
END = 2  # <|im_end|>
LLAMA = "\U0001f999"  # F0 9F A6 99


def byte_ids():
    """Byte → id of the token that is this one byte (GPT-2's printable alphabet)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return {byte: TOKENIZER._backend.token_to_id(character) for byte, character in characters.items()}


BYTES = byte_ids()


def as_ids(data):
    return [BYTES[byte] for byte in data]


def split(ids, cuts):
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [ids[first:last] for first, last in pairwise(edges)]


def stream(pieces):
    detokenizer = Detokenizer(TOKENIZER)
    return [detokenizer.push(piece) for piece in pieces], detokenizer.finish()


def test_every_byte_is_a_token():
    assert None not in BYTES.values()
    assert TOKENIZER.decode(as_ids(LLAMA.encode())) == LLAMA


TOKENS = st.integers(0, VOCAB - 1)
CUTS = st.lists(st.integers(0, 40), max_size=12)


@given(ids=st.lists(TOKENS, max_size=40), cuts=CUTS)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_pieces_of_any_tokens_join_to_one_decode(ids, cuts):
    pieces, end = stream(split(ids, cuts))
    assert "".join(pieces) + end == TOKENIZER.decode(ids)


BYTE_TOKENS = st.one_of(TOKENS, st.sampled_from([0x80, 0xF0, 0x9F, 0xA6, 0x99, 0xE2, 0x82, 0xAC, 0x41]).map(BYTES.get))


@given(ids=st.lists(BYTE_TOKENS, max_size=30), cuts=CUTS)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_pieces_of_broken_bytes_join_to_one_decode(ids, cuts):
    pieces, end = stream(split(ids, cuts))
    assert "".join(pieces) + end == TOKENIZER.decode(ids)


@given(text=st.text(max_size=30), cuts=CUTS, by_byte=st.booleans())
@settings(max_examples=400, deadline=None, derandomize=True)
def test_valid_text_never_shows_half_a_character(text, cuts, by_byte):
    ids = as_ids(text.encode()) if by_byte else TOKENIZER.encode(text)
    pieces, end = stream(split(ids, cuts))
    assert "".join(pieces) + end == text
    for shown in pieces:
        assert REPLACEMENT not in shown or REPLACEMENT in text


@pytest.mark.parametrize("block", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("before", range(8))
def test_b42_a_character_across_every_block_edge(block, before):
    ids = as_ids(b"x" * before + LLAMA.encode() + b"y" * 3 + LLAMA.encode())
    pieces, end = stream([ids[i : i + block] for i in range(0, len(ids), block)])
    assert "".join(pieces) == "x" * before + LLAMA + "yyy" + LLAMA
    assert end == ""
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_b42_text_appears_as_soon_as_it_is_complete():
    pieces, end = stream([[one] for one in as_ids(b"a" + LLAMA.encode() + b"b")])
    assert pieces == ["a", "", "", "", LLAMA, "b"]
    assert end == ""


def test_b42_a_lone_continuation_byte_is_shown_once_it_is_surely_invalid():
    pieces, end = stream([[one] for one in as_ids(b"a\x80b")])
    assert pieces == ["a", "", REPLACEMENT + "b"]
    assert end == ""
    pieces, end = stream([[one] for one in as_ids(b"a\x80")])
    assert (pieces, end) == (["a", ""], REPLACEMENT)


def test_b42_output_cut_inside_a_character():
    pieces, end = stream([[one] for one in as_ids(b"a\xf0\x9f")])
    assert (pieces, end) == (["a", "", ""], TOKENIZER.decode(as_ids(b"a\xf0\x9f"))[1:])
    assert set(end) == {REPLACEMENT}


def test_special_tokens_bring_no_text():
    pieces, end = stream([[1], TOKENIZER.encode("Hello"), [END], TOKENIZER.encode(" world"), [END]])
    assert (pieces, end) == (["", "Hello", "", " world", ""], "")


def test_a_missing_or_broken_tokenizer_is_told(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Tokenizer.from_folder(tmp_path)


# ---- assembly -------------------------------------------------------------------------------------------------------


def assembler(prompt_tokens=5):
    return TextAssembler(TOKENIZER, "r", prompt_tokens, started=0.0)


def test_chunks_and_the_final_generation():
    ids = TOKENIZER.encode("Once upon a time")
    stats = SpeculationStats(3).as_dict()
    one = assembler()
    first = one.push(RequestDelta("r", tuple(ids[:2]), num_speculative_tokens=3, num_cached_tokens=3))
    assert (first.text, first.token_ids, first.finish_reason) == (TOKENIZER.decode(ids[:2]), tuple(ids[:2]), None)
    assert first.generation is None
    last = one.push(RequestDelta("r", tuple(ids[2:]), "length", num_speculative_tokens=3))
    generation = last.generation
    assert last.finish_reason == generation.finish_reason == "length"
    assert first.text + last.text == generation.text == "Once upon a time"
    assert generation.token_ids == ids
    assert generation.request_id == last.request_id == "r"
    assert generation.usage.as_dict() == {
        "prompt_tokens": 5,
        "completion_tokens": len(ids),
        "total_tokens": 5 + len(ids),
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert generation.metrics["speculative_decoding"] == stats
    timing = generation.metrics["timing"]
    assert 0 < timing["time_to_first_token_s"] <= timing["end_to_end_s"]
    assert timing["time_per_output_token_s"] >= 0


def test_one_token_has_no_time_per_token():
    chunk = assembler().push(RequestDelta("r", tuple(TOKENIZER.encode("a")), "length"))
    assert chunk.generation.metrics["timing"]["time_per_output_token_s"] is None


def test_a_stop_tokens_text_is_left_out_but_its_id_stays():
    ids = TOKENIZER.encode("Hello world.")
    one = assembler()
    one.push(RequestDelta("r", tuple(ids[:1])))
    last = one.push(RequestDelta("r", tuple(ids[1:]), "stop", ids[-1]))
    assert last.generation.text == TOKENIZER.decode(ids[:-1])
    assert last.generation.token_ids == ids
    assert last.token_ids == tuple(ids[1:])
    assert last.generation.stop_reason == ids[-1]
    assert last.generation.usage.completion_tokens == len(ids)


def test_end_of_text_brings_no_text():
    ids = [*TOKENIZER.encode("Hello"), END]
    last = assembler().push(RequestDelta("r", tuple(ids), "stop"))
    assert last.generation.text == "Hello"
    assert last.generation.token_ids == ids
    assert last.generation.stop_reason is None


def test_b42_the_end_flushes_what_was_held_back():
    one = assembler()
    shown = [one.push(RequestDelta("r", (token,))).text for token in as_ids(b"a\xf0\x9f")[:-1]]
    last = one.push(RequestDelta("r", tuple(as_ids(b"\x9f")), "length"))
    assert shown == ["a", ""]
    assert set(last.text) == {REPLACEMENT}
    assert last.generation.text == "a" + last.text


@given(text=st.text(max_size=20), cuts=CUTS)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_chunk_texts_join_to_the_text(text, cuts):
    one = assembler()
    *deltas, last = split(as_ids(text.encode()), cuts)
    chunks = [one.push(RequestDelta("r", tuple(ids))) for ids in deltas]
    chunks.append(one.push(RequestDelta("r", tuple(last), "length")))
    assert "".join(chunk.text for chunk in chunks) == chunks[-1].generation.text == text


def test_an_abort_before_any_token_still_gives_a_generation():
    chunk = assembler().push(RequestDelta("r", (), "length"))
    assert (chunk.text, chunk.generation.token_ids, chunk.generation.usage.completion_tokens) == ("", [], 0)


# ---- generation defaults --------------------------------------------------------------------------------------------


def write(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_stop_tokens_of_both_files_count(tmp_path):
    folder = write(tmp_path, config={"eos_token_id": 7}, generation_config={"eos_token_id": [9, 7, 8]})
    assert read_generation_defaults(folder, "auto").eos_token_ids == (9, 7, 8)
    assert read_generation_defaults(folder, "none").eos_token_ids == (7,)


@pytest.mark.parametrize(("value", "expected"), [(None, ()), (0, (0,)), ([], ()), ([4, 4, 5], (4, 5))])
def test_forms_of_stop_tokens(tmp_path, value, expected):
    folder = write(tmp_path, config={"eos_token_id": value})
    assert read_generation_defaults(folder, "auto").eos_token_ids == expected


def test_sampling_defaults(tmp_path):
    own = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": None, "repetition_penalty": 1.1}
    folder = write(tmp_path, generation_config=own)
    expected = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert read_generation_defaults(folder, "auto").sampling == expected
    assert read_generation_defaults(folder, "none").sampling == {}
    write(tmp_path, generation_config={**own, "do_sample": True})
    assert read_generation_defaults(folder, "auto").sampling == expected
    write(tmp_path, generation_config={**own, "do_sample": False})
    assert read_generation_defaults(folder, "auto").sampling == {}


def test_no_files_no_defaults_and_the_embedded_target():
    assert read_generation_defaults(FOLDER, "auto").eos_token_ids == (END,)
    assert read_generation_defaults(FOLDER / "nowhere", "auto").eos_token_ids == ()


@pytest.mark.parametrize("content", ["{", "[1, 2]", "3", "null"])
@pytest.mark.parametrize("name", ["config", "generation_config"])
def test_a_broken_file_is_told(tmp_path, name, content):
    with pytest.raises(CheckpointError, match=name):
        read_generation_defaults(write(tmp_path, **{name: content}), "auto")
