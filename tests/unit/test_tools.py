"""Tools of a request, the grammar of a required call, and calls out of text: the same for every way to cut the text."""

import json
import re
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

import dflash2_ray
from dflash2_ray.errors import InvalidRequest
from dflash2_ray.sampling.grammar import GrammarState, GrammarVocabulary
from dflash2_ray.text.tool_calls import ContentDelta, ToolCallParser, call_id, collect, read_call
from dflash2_ray.text.tool_grammar import tool_grammar
from dflash2_ray.text.tools import parse_tools

FILE = Path(dflash2_ray.__file__).parent / "assets" / "target" / "tokenizer.json"


def tool(name="get_weather", parameters=None, **more):
    function = {"name": name, **({} if parameters is None else {"parameters": parameters}), **more}
    return {"type": "function", "function": function}


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


# ---- the request ------------------------------------------------------------------------------------------------------


def test_nothing_is_nothing():
    assert parse_tools(None) is None
    assert parse_tools(None, "none") is None


def test_what_a_request_allows():
    tools = [tool(parameters=CITY, description="d", strict=True), tool("now", description=None)]
    use = parse_tools(tools)
    assert use.tools == (tools[0], tool("now"))
    assert (use.choice, use.name, use.parallel, use.max_calls, use.must_call) == ("auto", None, True, None, False)
    assert use.shown == [tools[0], tool("now")]
    use = parse_tools(tools, "auto", False)
    assert (use.parallel, use.max_calls) == (False, 1)
    use = parse_tools(tools, "none", True)
    assert (use.shown, use.max_calls, use.must_call) == (None, 0, False)
    assert parse_tools(tools, "required").must_call
    use = parse_tools(tools, {"type": "function", "function": {"name": "now"}}, True)
    assert (use.choice, use.name, use.max_calls, use.must_call) == ("named", "now", 1, True)


@pytest.mark.parametrize(
    ("arguments", "param", "told"),
    [
        ((None, "required"), "tool_choice", "only allowed when tools"),
        ((None, None, True), "parallel_tool_calls", "only allowed when tools"),
        (([], None), "tools", "a list of 0"),
        (([tool(f"f{i}") for i in range(129)],), "tools", "a list of 129"),
        (({"a": 1},), "tools", "must be a list"),
        ((["x"],), "tools[0]", "must be an object"),
        (([{"type": "retrieval"}],), "tools[0].type", "got 'retrieval'"),
        (([tool(), {"type": "function"}],), "tools[1].function", "must be an object, got None"),
        (([{**tool(), "x": 1}],), "tools[0].x", "is not offered"),
        (([tool(x=1)],), "tools[0].function.x", "is not offered"),
        (([tool("")],), "tools[0].function.name", "1 to 64"),
        (([tool("a b")],), "tools[0].function.name", "got 'a b'"),
        (([tool(None)],), "tools[0].function.name", "got None"),
        (([tool(), tool()],), "tools[1].function.name", "twice"),
        (([tool(description=3)],), "tools[0].function.description", "must be a string"),
        (([tool(strict=1)],), "tools[0].function.strict", "true or false"),
        (([tool(parameters=[])],), "tools[0].function.parameters", "must be a JSON schema"),
        (([tool(parameters={"type": "string"})],), "tools[0].function.parameters.type", "got 'string'"),
        (([tool(parameters={"properties": {}})],), "tools[0].function.parameters.type", "got None"),
        (([tool(description="x" * 300_000)],), "tools", "at most 262144"),
        (([tool(description="\ud800")],), "tools", "are not JSON"),
        (([tool()], "sometimes"), "tool_choice", "got 'sometimes'"),
        (([tool()], 3), "tool_choice", "must be an object"),
        (([tool()], {"type": "tool"}), "tool_choice.type", "got 'tool'"),
        (([tool()], {"type": "function"}), "tool_choice.function", "must be an object"),
        (([tool()], {"type": "function", "function": {"name": "x"}}), "tool_choice.function.name", "one of the tools"),
        (
            ([tool()], {"type": "function", "function": {"name": ["x"]}}),
            "tool_choice.function.name",
            "one of the tools",
        ),
        (([tool()], {"type": "function", "name": "x"}), "tool_choice.name", "is not offered"),
        (([tool()], None, "yes"), "parallel_tool_calls", "true or false"),
    ],
)
def test_what_is_malformed_is_refused_by_name(arguments, param, told):
    with pytest.raises(InvalidRequest) as caught:
        parse_tools(*arguments)
    assert caught.value.param == param
    assert told in caught.value.message


# ---- the grammar of a required call -----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["plain text", "added token"])
def vocabulary(request, tmp_path_factory):
    """(tokenizer, its vocabulary): once with `<tool_call>` as ordinary text, once as Qwen has it, a token that is not special."""
    backend = tokenizers.Tokenizer.from_file(str(FILE))
    if request.param == "added token":
        pieces = ["<tool_call>", "</tool_call>"]
        backend.add_tokens([tokenizers.AddedToken(piece, special=False, normalized=False) for piece in pieces])
        backend.add_tokens(['"}}', '{"', ' {"', "}}\n", "}\n"])  # texts across the borders of the grammar's parts
    path = tmp_path_factory.mktemp("vocabulary") / "tokenizer.json"
    backend.save(str(path))
    return backend, GrammarVocabulary(path, backend.get_vocab_size() + 5, [2, 0])


def takes(vocabulary, grammar, text):
    backend, words = vocabulary
    output = backend.encode(text, add_special_tokens=False).ids
    rows = GrammarState(words, grammar).masks([], output)
    return all(bool(row[token]) for row, token in zip(rows, [*output, 2], strict=True))


def call(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


PARIS, NOW = call("get_weather", '{"city": "Pa</tool_call>}ris é"}'), call("now", "{}")


def test_no_grammar_without_a_required_call():
    assert tool_grammar(None) is None
    assert tool_grammar(parse_tools([tool()])) is None
    assert tool_grammar(parse_tools([tool(parameters={"type": "object", "not": {}})], "auto")) is None
    assert tool_grammar(parse_tools([tool()], "none")) is None


def test_a_required_call(vocabulary):
    grammar = tool_grammar(parse_tools([tool(parameters=CITY), tool("now"), tool("any", {})], "required"))
    for text in (PARIS, NOW, f"{PARIS}\n{NOW}\n{PARIS}", call("any", '{"x": [1, {"y": null}]}')):
        assert takes(vocabulary, grammar, text)
    for text in (
        "",
        "Hello",
        call("later", "{}"),
        call("now", '{"a": 1}'),
        call("get_weather", "{}"),
        f"{NOW}{NOW}",
        f"{NOW}\n",
        "\n" + NOW,
        NOW[:-3],
    ):
        assert not takes(vocabulary, grammar, text)


def test_exactly_one_call(vocabulary):
    tools = [tool(parameters=CITY), tool("now")]
    grammar = tool_grammar(parse_tools(tools, "required", False))
    assert takes(vocabulary, grammar, PARIS)
    assert takes(vocabulary, grammar, NOW)
    assert not takes(vocabulary, grammar, f"{NOW}\n{NOW}")
    grammar = tool_grammar(parse_tools(tools, {"type": "function", "function": {"name": "now"}}))
    assert takes(vocabulary, grammar, NOW)
    assert not takes(vocabulary, grammar, PARIS)
    assert not takes(vocabulary, grammar, f"{NOW}\n{NOW}")


def test_references_stay_inside_their_schema(vocabulary):
    parameters = {
        "type": "object",
        "properties": {"n": {"$ref": "#/$defs/n"}},
        "$defs": {"n": {"enum": [1, 2]}},
        "required": ["n"],
    }
    other = {**parameters, "$defs": {"n": {"enum": ["x"]}}}
    grammar = tool_grammar(parse_tools([tool("a", parameters), tool("ab", other)], "required"))
    assert takes(vocabulary, grammar, call("a", '{"n": 2}'))
    assert takes(vocabulary, grammar, call("ab", '{"n": "x"}'))
    assert not takes(vocabulary, grammar, call("a", '{"n": "x"}'))
    assert not takes(vocabulary, grammar, call("ab", '{"n": 2}'))


def test_special_tokens_never_stand_in_a_call(vocabulary):
    backend, words = vocabulary
    state = GrammarState(words, tool_grammar(parse_tools([tool(parameters=CITY)], "required")))
    output = backend.encode(PARIS, add_special_tokens=False).ids
    for row in state.masks([], output)[:-1]:
        assert not row[:4].any()


def test_a_schema_that_cannot_be_enforced_is_named():
    tools = [tool("a"), tool("b", {"type": "object", "properties": {"x": {"not": {}}}})]
    with pytest.raises(InvalidRequest, match="'not'") as caught:
        tool_grammar(parse_tools(tools, "required"))
    assert caught.value.param == "tools[1].function.parameters.properties.x"
    assert tool_grammar(parse_tools(tools, {"type": "function", "function": {"name": "a"}})) is not None


def test_what_the_grammar_allows_the_parser_reads(vocabulary):
    parser = ToolCallParser("r", 1)
    content, calls = collect([*parser.push(PARIS), *parser.finish()])
    assert content is None
    assert json.loads(calls[0]["function"]["arguments"]) == {"city": "Pa</tool_call>}ris é"}


# ---- calls out of text ------------------------------------------------------------------------------------------------


def parse(pieces, max_calls=None):
    parser = ToolCallParser("request", max_calls)
    events = [event for piece in pieces for event in parser.push(piece)]
    return events + parser.finish()


def flat(events):
    """Contents joined up to the next call; each call as (index, id, name, arguments)."""
    found = []
    for event in events:
        if isinstance(event, ContentDelta):
            assert event.text
            if found and isinstance(found[-1], str):
                found[-1] += event.text
            else:
                found.append(event.text)
        elif event.name is not None:
            found.append((event.index, event.id, event.name, event.arguments))
        else:
            assert event.id is None
            index, known, name, arguments = found[-1]
            assert index == event.index
            found[-1] = (index, known, name, arguments + event.arguments)
    return found


def reference(text):
    """What the text holds, read at once with the library's own decoder: contents and (name, arguments as a value)."""
    found, content, blank = [], "", True
    at = 0

    def tell(piece):
        nonlocal content
        content += piece

    def close(final):
        nonlocal content
        alone = not content.strip(" \t\r\n")
        if content and not (alone and (found or not final) and blank):
            found.append(content)
        content = ""

    while at < len(text):
        match = re.compile(r"<tool_call>[ \t\r\n]*(?=\{)").match(text, at)
        end = None
        if match:
            try:
                value, end = json.JSONDecoder().raw_decode(text, match.end())
            except ValueError:
                end = None
            if end is not None:
                closing = re.compile(r"[ \t\r\n]*</tool_call>").match(text, end)
                name, arguments = value.get("name"), value.get("arguments", {})
                good = closing and isinstance(name, str) and name and isinstance(arguments, dict)
                if good:
                    close(final=False)
                    found.append((name, arguments))
                    at = closing.end()
                    continue
        tell(text[at])
        at += 1
    close(final=True)
    return found


def cut(text, places):
    places = sorted({place % (len(text) + 1) for place in places})
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


PIECES = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<tool_call>\n",
            "\n</tool_call>",
            "{",
            "}",
            '"',
            "\\",
            "\n",
            " ",
            "<",
            "text",
            "é\U0001f999",
            ",",
        ),
        *(
            '{"name": "f", "arguments": {}}',
            '{"name": "g", "arguments": {"x": "}</tool_call><tool_call>{\\"", "y": [{}]}}',
            '{"arguments": {}}',
        ),
        *(
            PARIS,
            NOW,
            '{"name": "f"',
            ', "arguments": {"a": [1,2',
            "]}}",
            "<tool_c",
            "all>",
            '{"name": 3, "arguments": {}}',
            '"arguments": "{}"',
        ),
    ]
)
TEXTS = st.lists(PIECES, max_size=12).map("".join)


@settings(max_examples=400, deadline=None)
@given(text=TEXTS, places=st.lists(st.integers(0, 10**4), max_size=30))
@example(text="<tool_call>" * 3 + NOW[11:], places=[])
@example(text=PARIS + "\n" + NOW, places=range(300))
@example(text="  \n" + NOW + " \n" + NOW + "\n ", places=range(300))
@example(
    text='<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "f", "arguments": {}}</tool_call>', places=[50]
)
def test_every_way_to_cut_gives_the_same(text, places):
    whole = flat(parse([text]))
    assert flat(parse(cut(text, places))) == whole
    assert flat(parse(text)) == whole, "character by character"


@settings(max_examples=400, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(
            [PARIS, NOW, "\n", " ", "Hello é", "<tool_c", "<tool_call>x", "}{", "<tool_call>\n{}\n</tool_call>"]
        ),
        max_size=8,
    )
)
def test_what_is_found_is_what_a_plain_reader_finds(parts):
    text = "".join(parts)
    told = [one if isinstance(one, str) else (one[2], json.loads(one[3])) for one in flat(parse(text))]
    assert told == reference(text)


@settings(max_examples=400, deadline=None)
@given(text=TEXTS)
def test_nothing_is_lost_or_doubled(text):
    """Contents and calls, each call in its frame, with white space where it stands alone, are the text."""
    found = flat(parse(text))
    blank = r"[ \t\r\n]*"
    parts = [
        re.escape(one)
        if isinstance(one, str)
        else rf"<tool_call>{blank}\{{[\s\S]*?{re.escape(one[3])}[\s\S]*?\}}{blank}</tool_call>"
        for one in found
    ]
    assert re.fullmatch(blank + blank.join(parts) + blank, text)
    if not any(isinstance(one, tuple) for one in found):
        assert "".join(found) == text


CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
FOUND = (0, call_id("request", 0), "f", '{"x": 1}')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("Hello", ["Hello"]),
        ("\n ", ["\n "]),
        (CALL, [FOUND]),
        (f"\n\n{CALL}\n", [FOUND]),
        (f"Let me look.\n{CALL}", ["Let me look.\n", FOUND]),
        (f"{CALL}\nDone.", [FOUND, "\nDone."]),
        (f"{CALL} and {CALL}", [FOUND, " and ", (1, call_id("request", 1), *FOUND[2:])]),
        (f"{CALL}\n{CALL}", [FOUND, (1, call_id("request", 1), *FOUND[2:])]),
        (f"a{CALL}b", ["a", FOUND, "b"]),
        (CALL.replace("\n", ""), [FOUND]),
        (CALL.replace("\n", " \t\r\n "), [FOUND]),
        (
            CALL.replace('{"x": 1}', '{ "x" :1.50e3,\n"é": "\\u00e9"}'),
            [(*FOUND[:3], '{ "x" :1.50e3,\n"é": "\\u00e9"}')],
        ),
        (CALL.replace('{"x": 1}', '"{\\"x\\": 1}"'), [FOUND]),
        (CALL.replace(', "arguments": {"x": 1}', ""), [(*FOUND[:3], "{}")]),
        (CALL.replace('"name": "f", ', "").replace("}}", '}, "name": "f"}'), [FOUND]),
        (
            CALL.replace('{"x": 1}', '{"x": "</tool_call>}{<tool_call>"}'),
            [(*FOUND[:3], '{"x": "</tool_call>}{<tool_call>"}')],
        ),
        (CALL.replace('{"x": 1}', '{"x": "\\\\"}'), [(*FOUND[:3], '{"x": "\\\\"}')]),
        (CALL.replace('{"x": 1}', '{"name": "g", "arguments": {}}'), [(*FOUND[:3], '{"name": "g", "arguments": {}}')]),
        (CALL.replace('"f"', '"\\u0066"'), [FOUND]),
        (f"<tool_call>{CALL}", ["<tool_call>", FOUND]),
        (f'<tool_call>\n{{"name": "g", {CALL}', ['<tool_call>\n{"name": "g", ', FOUND]),
        (f'<tool_call>\n{{"name": "g\n{CALL}', ['<tool_call>\n{"name": "g\n', FOUND]),
        (CALL.replace("</tool_call>", CALL), ['<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n', FOUND]),
        *(
            (text, [text])
            for text in (
                "<tool_call>",
                "a <tool_call",
                "<tool_call></tool_call>",
                "<tool_call>\n{}\n</tool_call>",
                "<tool_call>\n[1]\n</tool_call>",
                CALL[:-1],
                CALL[:20],
                CALL.replace('"f"', "3"),
                CALL.replace('"f"', '""'),
                CALL.replace('"f"', "null"),
                CALL.replace('"f"', '"\\ud800"'),
                CALL.replace("1}", "1,}"),
                CALL.replace("1}", "01}"),
                CALL.replace("1}", "NaN}"),
                CALL.replace("1}", "}"),
                CALL.replace('"x"', "x"),
                CALL.replace('{"x": 1}', "[1]"),
                CALL.replace('{"x": 1}', "null"),
                CALL.replace('{"x": 1}', '"x"'),
                CALL.replace('{"x": 1}', '"{\\"x\\": }"'),
                CALL.replace('{"x": 1}', '"{\\"x\\": \\"\\ud800\\"}"'),
                CALL.replace('{"x": 1}', '{"x": "a\nb"}'),
                CALL.replace('{"x": 1}', '{"a":' * 5000 + "1" + "}" * 5000),
                CALL.replace("}}", "}} x"),
                CALL.replace("</tool_call>", "</tool_cal>"),
                CALL.replace('{"name": "f", "arguments": {"x": 1}}', '{"name": "f" "arguments": {"x": 1}}'),
            )
        ),
    ],
)
def test_what_a_text_holds(text, expected):
    assert flat(parse([text])) == expected
    assert flat(parse(text)) == expected


def test_a_number_of_many_digits_is_still_a_call():
    text = CALL.replace("1}", "9" * 10_000 + "}")
    assert flat(parse([text]))[0][3] == '{"x": ' + "9" * 10_000 + "}"


def test_text_that_may_become_a_call_is_held_back():
    parser = ToolCallParser("r")
    assert parser.push("Hi <tool") == [ContentDelta("Hi ")]
    assert parser.push("_box> <") == [ContentDelta("<tool_box> ")]
    assert parser.push(CALL[1:-1]) == []
    first, second = parser.push(">")
    assert first.to_openai() == {
        "index": 0,
        "id": call_id("r", 0),
        "type": "function",
        "function": {"name": "f", "arguments": ""},
    }
    assert second.to_openai() == {"index": 0, "function": {"arguments": '{"x": 1}'}}
    assert parser.push("\n") == parser.finish() == []


def test_ids_are_a_function_of_request_and_index():
    assert call_id("r", 0) == call_id("r", 0)
    assert len({call_id(request, index) for request in ("r", "r1", "") for index in range(20)}) == 60
    assert re.fullmatch(r"call_[0-9a-f]{24}", call_id("é", 3))


def test_calls_beyond_the_limit_are_content():
    assert flat(parse([f"{CALL}\n{CALL}"], 1)) == [FOUND, f"\n{CALL}"]
    assert flat(parse(f"{CALL}\n{CALL}", 1)) == [FOUND, f"\n{CALL}"]
    assert flat(parse([CALL], 0)) == [CALL]


def test_the_message_of_an_answer():
    content, calls = collect(parse([f"a{CALL}b{CALL}"]))
    assert content == "ab"
    assert [one["id"] for one in calls] == [call_id("request", 0), call_id("request", 1)]
    assert calls[0]["function"] == {"name": "f", "arguments": '{"x": 1}'}
    assert collect(parse([""])) == (None, [])


def test_time_grows_with_the_text_alone():
    """Neither many malformed calls nor one long call makes the parser read twice."""
    assert flat(parse(["<tool_call>" * 50_000])) == ["<tool_call>" * 50_000]
    assert flat(parse(['<tool_call>{"' * 50_000])) == ['<tool_call>{"' * 50_000]
    text = CALL.replace("1}", '"' + "x{" * 50_000 + '"}')
    assert len(flat(parse([text[i : i + 50] for i in range(0, len(text), 50)]))) == 1


def test_the_last_of_two_equal_keys_counts():
    assert read_call('{"name": "a", "arguments": {}, "name": "b", "arguments": {"x": 1}}') == ("b", '{"x": 1}')
