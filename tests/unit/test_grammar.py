"""Masks of a constrained request equal those of a fresh matcher for every prefix, whatever happened before."""

import json
import random
from pathlib import Path

import llguidance
import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dflash2_ray
from dflash2_ray.errors import CheckpointError, EngineError, InvalidRequest
from dflash2_ray.sampling.grammar import GrammarState, GrammarVocabulary, constrain

FILE = Path(dflash2_ray.__file__).parent / "assets" / "target" / "tokenizer.json"
TOKENIZER = tokenizers.Tokenizer.from_file(str(FILE))
EOS, SPECIAL, SIZE, PADDED = (0, 2), (0, 1, 2, 3), 2048, 2061
VOCABULARY = GrammarVocabulary(FILE, PADDED, [2, 0, 2])


def regex(pattern):
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def schema(value):
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(value))


def ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def listed(row):
    return row.nonzero().flatten().tolist()


def texts(row):
    return [TOKENIZER.decode([token], skip_special_tokens=False) for token in listed(row)]


GRAMMARS = {
    "digits": regex("[0-9]{2,5}"),
    "any": regex("(?s:.)*"),
    "unicode": regex("(é|\U0001f999|ж){1,3}!"),
    "constant": schema({"const": "a<|im_end|>b"}),
    "enum": schema({"enum": ["one", "one hundred", 1, None]}),
    "object": schema(
        {
            "type": "object",
            "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
            "required": ["name"],
            "additionalProperties": False,
        }
    ),
    "json": schema({"type": "object"}),
    "stuck": schema({"$ref": "#"}),
    "lark": llguidance.LLMatcher.grammar_from_lark(
        'start: "x" tail\ntail: "yy" %json {"type": "array", "items": {"type": "boolean"}} "."'
    ),
}


# ---- the definition: a fresh matcher for each prefix --------------------------------------------------------------


def brute_row(grammar, prefix):
    """Allowed ids behind `prefix`, by a new matcher that takes in one token at a time."""
    if any(token in EOS for token in prefix):
        return set(EOS)
    matcher = llguidance.LLMatcher(VOCABULARY.tokenizer(), grammar, log_level=0)
    for token in prefix:
        assert matcher.consume_token(token), matcher.get_error()
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    found = {int(token) for token in bits.nonzero()[0]} - set(EOS)
    if matcher.is_accepting() or not found:
        found |= set(EOS)
    return found


def brute_masks(grammar, output, drafts):
    rows, refused = [], False
    for count in range(len(drafts) + 1):
        if refused:
            rows.append(set(range(PADDED)))
            continue
        rows.append(brute_row(grammar, [*output, *drafts[:count]]))
        ended = any(token in EOS for token in [*output, *drafts[:count]])
        refused = count < len(drafts) and drafts[count] not in rows[-1] and not ended
    return rows


def check(state, grammar, output, drafts):
    masks = state.masks(output, drafts)
    assert masks.shape == (1 + len(drafts), PADDED)
    assert masks.dtype == torch.bool
    assert [set(listed(row)) for row in masks] == brute_masks(grammar, output, drafts)
    return masks


@settings(max_examples=100, deadline=None)
@given(name=st.sampled_from(sorted(GRAMMARS)), seed=st.integers(0, 10**6), steps=st.integers(1, 12))
def test_masks_are_those_of_a_fresh_matcher(name, seed, steps):
    """Blocks of good and bad drafts, any number accepted; sometimes the request is preempted and comes back, or starts anew."""
    chance, grammar = random.Random(seed), GRAMMARS[name]
    state, output = GrammarState(VOCABULARY, grammar), []
    for _ in range(steps):
        drafts, fits = [], True
        for _ in range(chance.randint(0, 4)):
            good = sorted(brute_row(grammar, [*output, *drafts])) if fits else []
            drafts.append(chance.choice(good) if good and chance.random() < 0.8 else chance.randrange(SIZE))
            fits = drafts[-1] in good
        rows = check(state, grammar, output, drafts)
        for count in range(chance.randint(0, len(drafts)) + 1):  # accept so many drafts, then draw one token
            if count < len(drafts) and rows[count, drafts[count]] and chance.random() < 0.8:
                output.append(drafts[count])
            else:
                output.append(chance.choice(listed(rows[count])))
                break
        if output[-1] in EOS and chance.random() < 0.9:
            output = []
        what = chance.random()
        if what < 0.15:
            state = GrammarState(VOCABULARY, grammar)  # resumed elsewhere: many tokens at once
        elif what < 0.3:
            output = output[: chance.randint(0, len(output))]  # taken back to any point
    check(state, grammar, output, [])


def test_twice_the_same_question_twice_the_same_answer():
    state = GrammarState(VOCABULARY, GRAMMARS["object"])
    output, drafts = ids('{"name": "a'), ids('bc", "n": 3}')
    first = state.masks(output, drafts)
    assert torch.equal(first, state.masks(output, drafts))
    state.masks([], [5])
    state.masks(ids('{"name": "zzz'), ids('"}'))
    assert torch.equal(first, state.masks(tuple(output), tuple(drafts)))


# ---- the field case: a digit stands only behind an M ------------------------------------------------------------------


def test_a_rejected_block_leaves_nothing_behind():
    """The block `M 1 x` was drafted, `x` fell; the next block `M 1 2` is judged behind the output alone."""
    grammar = llguidance.LLMatcher.grammar_from_lark('start: "M" /[0-9]/* | "x"*')
    m, one, two, x = (ids(text)[0] for text in ("M", "1", "2", "x"))
    state = GrammarState(VOCABULARY, grammar)
    rows = check(state, grammar, [], [m, one, x])
    assert rows[0, m]
    assert rows[1, one]
    assert not rows[2, x]
    assert rows[3].all(), "behind a refused draft nothing is looked at"
    rows = check(state, grammar, [], [one, two])
    assert not rows[0, one], "no M yet"
    rows = check(state, grammar, [], [m, one, two])
    assert rows[2, two]
    assert not rows[2, x]
    rows = check(state, grammar, [m, one], [two, m])
    assert rows[1, one]
    assert not rows[1, m]


# ---- what is allowed --------------------------------------------------------------------------------------------------


def test_all_end_tokens_and_only_when_complete():
    rows = GrammarState(VOCABULARY, regex("[0-9]{1,2}")).masks([], ids("12"))
    assert not rows[0, list(EOS)].any()
    assert rows[1, list(EOS)].all()
    assert texts(rows[1])[2:] == list("0123456789"), "complete, and may go on"
    assert listed(rows[2]) == list(EOS), "complete, and may not"


def test_behind_an_end_token_only_end_tokens():
    state = GrammarState(VOCABULARY, regex("[0-9]+"))
    for end in EOS:
        assert [listed(row) for row in state.masks([*ids("1"), end], ids("2"))] == [list(EOS)] * 2
        assert [listed(row) for row in state.masks(ids("1"), [end, *ids("2")])][1:] == [list(EOS)] * 2
    assert texts(state.masks(ids("1"), [])[0])[2:] == list("0123456789"), "and the end is forgotten again"


def test_padded_rows_and_special_tokens_are_never_allowed():
    state = GrammarState(VOCABULARY, regex("(?s:.)*"))
    for output in ([], ids("Hello"), ids("é")[:1]):
        row = state.masks(output, [])[0]
        assert not row[SIZE:].any()
        assert not row[[1, 3]].any()
    assert len(listed(state.masks([], [])[0])) > 1800


def test_a_narrower_row_than_the_tokenizer():
    vocabulary = GrammarVocabulary(FILE, 300, EOS)
    rows = GrammarState(vocabulary, regex("(?s:.)*")).masks([], ids("a"))
    assert rows.shape == (2, 300)
    assert rows[0, 4:].sum() > 200


def test_special_token_text_in_a_constant_is_plain_text():
    state, output = GrammarState(VOCABULARY, schema({"const": "<|im_end|>"})), []
    while not (row := state.masks(output, [])[0])[2]:
        assert not row[list(SPECIAL)].any()
        output.append(listed(row)[-1])
    assert TOKENIZER.decode(output, skip_special_tokens=False) == '"<|im_end|>"'


def test_a_character_of_several_tokens():
    state, llama = GrammarState(VOCABULARY, regex("\U0001f999+")), ids("\U0001f999")
    assert len(llama) == 4
    rows = state.masks([], [*llama, llama[0]])
    assert [listed(row) for row in rows[:4]] == [[token] for token in llama]
    assert listed(rows[4]) == [*EOS, llama[0]]
    assert listed(rows[5]) == [llama[1]]


def test_a_stuck_grammar_may_end():
    assert listed(GrammarState(VOCABULARY, GRAMMARS["stuck"]).masks([], [])[0]) == list(EOS)


@pytest.mark.parametrize("name", sorted(set(GRAMMARS) - {"any", "json", "stuck"}))
def test_random_walks_end_in_a_text_of_the_grammar(name):
    """Random walks under the masks, preferring to end: the text always satisfies the grammar."""
    for seed in range(5):
        chance, state, output = random.Random(seed), GrammarState(VOCABULARY, GRAMMARS[name]), []
        for _ in range(400):
            row = state.masks(output, [])[0]
            if row[2]:
                break
            found = listed(row)
            closing = [token for token in found if TOKENIZER.decode([token]).strip() in ('"', "}", "]", ".", "!")]
            output.append(chance.choice(closing if closing and chance.random() < 0.5 else found))
        else:
            pytest.fail(f"no end in 400 tokens: {TOKENIZER.decode(output)!r}")
        matcher = llguidance.LLMatcher(VOCABULARY.tokenizer(), GRAMMARS[name], log_level=0)
        assert matcher.consume_tokens(output)
        assert matcher.is_accepting()


def test_an_added_token_is_text_unless_it_is_special(tmp_path):
    content = json.loads(FILE.read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for token, (text, special) in enumerate([("<tool_call>", False), ("<secret>", True)], start=SIZE):
        content["added_tokens"].append({"id": token, "content": text, "special": special, **flags})
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    vocabulary = GrammarVocabulary(path, PADDED, EOS)
    rows = GrammarState(vocabulary, regex("<tool_call>x")).masks([], [SIZE])
    assert listed(rows[0]) == [SIZE]
    assert texts(rows[1]) == ["x"]
    row = GrammarState(vocabulary, regex("(<secret>|y)")).masks([], [])[0]
    assert not row[SIZE + 1]
    assert "<" in texts(row)


def test_masks_on_logits():
    logits = torch.randn(2, PADDED)
    before, allowed = logits.clone(), GrammarState(VOCABULARY, regex("[0-9]+")).masks([], ids("1"))
    assert constrain(logits, allowed) is logits
    assert torch.equal(logits[allowed], before[allowed])
    assert torch.isneginf(logits[~allowed]).all()


# ---- refusals ---------------------------------------------------------------------------------------------------------


def test_what_does_not_compile_is_the_clients_error():
    with pytest.raises(InvalidRequest, match="tools: the grammar cannot be used") as caught:
        GrammarState(VOCABULARY, regex("("), param="tools")
    assert caught.value.param == "tools"


def test_a_grammar_beyond_the_limits_is_the_clients_error():
    state, a = GrammarState(VOCABULARY, regex("(a{1,1000}){1,1000}")), ids("a")
    assert state.masks(a, a).shape == (2, PADDED)
    with pytest.raises(InvalidRequest, match="too complex"):
        [state.masks(a * count, []) for count in range(400)]
    assert state.masks(a, a).shape == (2, PADDED), "and the state is as good as new"


def test_an_output_that_breaks_the_grammar_is_the_engines_error_and_does_no_harm():
    state = GrammarState(VOCABULARY, regex("[0-9]+"))
    with pytest.raises(EngineError, match="does not allow token"):
        state.masks(ids("1x"), [])
    check(state, regex("[0-9]+"), ids("1"), ids("2"))


def test_a_vocabulary_reads_nothing_before_it_is_needed(tmp_path):
    vocabulary = GrammarVocabulary(tmp_path / "nowhere.json", 10, [1])
    with pytest.raises(CheckpointError, match=r"nowhere\.json cannot be read"):
        vocabulary.prepare()
    with pytest.raises(InvalidRequest, match="no token that ends"):
        GrammarState(GrammarVocabulary(FILE, PADDED, []), regex("a"))
    with pytest.raises(InvalidRequest, match="no token that ends"):
        GrammarState(GrammarVocabulary(FILE, PADDED, [PADDED]), regex("a"))


def test_the_tokenizer_is_built_once():
    vocabulary = GrammarVocabulary(FILE, PADDED, EOS)
    assert vocabulary.tokenizer() is vocabulary.tokenizer()
