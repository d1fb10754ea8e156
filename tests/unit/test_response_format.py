"""`response_format` becomes a grammar or is refused by name: nothing that is asked for is ignored."""

import json
import math
from pathlib import Path

import llguidance
import pytest
import tokenizers

import dflash2_ray
from dflash2_ray.errors import InvalidRequest
from dflash2_ray.sampling.grammar import GrammarState, GrammarVocabulary
from dflash2_ray.text.response_format import response_grammar

FILE = Path(dflash2_ray.__file__).parent / "assets" / "target" / "tokenizer.json"
TOKENIZER = tokenizers.Tokenizer.from_file(str(FILE))
VOCABULARY = GrammarVocabulary(FILE, 2048, [2])


def takes(grammar, text):
    """Whether `text`, token by token under the masks, is a complete text of `grammar`."""
    output = TOKENIZER.encode(text, add_special_tokens=False).ids
    rows = GrammarState(VOCABULARY, grammar).masks([], output)
    return all(bool(row[token]) for row, token in zip(rows, [*output, 2], strict=True))


def json_schema(schema, **more):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


@pytest.mark.parametrize("value", [None, {"type": "text"}])
def test_any_text_needs_no_grammar(value):
    assert response_grammar(value) is None


def test_a_json_object():
    grammar = response_grammar({"type": "json_object"})
    for text in ("{}", '{"a": [1, null, {"b": "é\\n"}]}', '{\n  "x": -1.5e3\n}'):
        assert takes(grammar, text)
    for text in ("[]", "3", '{"a": }', "{} ", "x{}"):
        assert not takes(grammar, text)


def test_a_schema():
    schema = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["x", "y"]},
            "sizes": {"type": "array", "items": {"$ref": "#/$defs/size"}, "maxItems": 2},
        },
        "required": ["kind", "sizes"],
        "additionalProperties": False,
        "$defs": {"size": {"type": "integer", "minimum": 1, "maximum": 20}},
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.org/x",
        "title": "T",
        "description": "D",
    }
    for strict in (True, False, None):
        grammar = response_grammar(json_schema(schema, strict=strict, description="what it is"))
        assert takes(grammar, '{"kind": "x", "sizes": [1, 20]}')
        assert takes(grammar, '{"kind":"y","sizes":[]}')
        for text in (
            '{"kind": "z", "sizes": []}',
            '{"kind": "x", "sizes": [21]}',
            '{"kind": "x"}',
            '{"kind": "x", "sizes": [1, 2, 3]}',
        ):
            assert not takes(grammar, text)


@pytest.mark.parametrize("key", ["regex", "pattern"])
def test_a_regular_expression(key):
    grammar = response_grammar({"type": "regex", key: r"(a/b|\n|é+)\d{2}"})
    assert takes(grammar, "a/b12")
    assert takes(grammar, "éé00")
    assert takes(grammar, "\n77")
    assert not takes(grammar, "a/b123")
    assert not takes(grammar, "ab12")


@pytest.mark.parametrize(
    ("value", "param", "told"),
    [
        ("text", "response_format", "must be an object"),
        ([], "response_format", "must be an object"),
        ({}, "response_format.type", "must be one of text, json_object, json_schema, regex, got None"),
        ({"type": "xml"}, "response_format.type", "got 'xml'"),
        ({"type": ["text"]}, "response_format.type", "must be one of"),
        ({"type": "text", "schema": {}}, "response_format.schema", "is not offered"),
        ({"type": "json_object", "schema": {}}, "response_format.schema", "is not offered"),
        ({"type": "json_schema"}, "response_format.json_schema", "must be an object, got None"),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, "response_format.json_schema.name", "got None"),
        (json_schema({}, name="a b"), "response_format.json_schema.name", "got 'a b'"),
        (json_schema({}, name="a" * 65), "response_format.json_schema.name", "1 to 64"),
        (json_schema({}, name="a\n"), "response_format.json_schema.name", "1 to 64"),
        (json_schema({}, strict="yes"), "response_format.json_schema.strict", "true or false"),
        (json_schema({}, description=3), "response_format.json_schema.description", "must be a string"),
        (json_schema({}, colour=3), "response_format.json_schema.colour", "is not offered"),
        (json_schema(None), "response_format.json_schema.schema", "must be a JSON schema"),
        (json_schema("{}"), "response_format.json_schema.schema", "must be a JSON schema"),
        ({"type": "regex"}, "response_format.regex", "got None"),
        ({"type": "regex", "regex": 3}, "response_format.regex", "got 3"),
        ({"type": "regex", "regex": "a", "pattern": "a"}, "response_format.pattern", "give one"),
        ({"type": "regex", "regex": "("}, "response_format.regex", "unclosed group"),
        ({"type": "regex", "pattern": "(?=a)b"}, "response_format.pattern", "look-around"),
        ({"type": "regex", "regex": r"\bword"}, "response_format.regex", "cannot be enforced"),
        ({"type": "regex", "regex": r"(a)\1"}, "response_format.regex", "backreferences"),
        ({"type": "regex", "regex": "a\\"}, "response_format.regex", "backslash"),
        ({"type": "regex", "regex": "a\ud800"}, "response_format.regex", "surrogate"),
        ({"type": "regex", "regex": "a" * 20000}, "response_format.regex", "20000 bytes, at most 16384"),
        ({"type": "regex", "regex": "a", "x": 1}, "response_format.x", "is not offered"),
    ],
)
def test_what_is_malformed_is_refused_by_name(value, param, told):
    with pytest.raises(InvalidRequest) as caught:
        response_grammar(value)
    assert caught.value.param == param
    assert told in caught.value.message
    assert len(caught.value.message) < 500


SCHEMA = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("schema", "param", "told"),
    [
        ({"type": "array", "uniqueItems": True}, SCHEMA, "'uniqueItems'"),
        ({"not": {}}, SCHEMA, "'not'"),
        ({"if": {}, "then": {}}, SCHEMA, "'if'"),
        ({"properties": {"a": {"contains": {}}}}, SCHEMA + ".properties.a", "'contains'"),
        ({"properties": {"a": {"maximun": 3}}}, SCHEMA + ".properties.a", "'maximun'"),
        (
            {"$defs": {"unused": {"anyOf": [{}, {"propertyNames": {}}]}}},
            SCHEMA + ".$defs.unused.anyOf[1]",
            "'propertyNames'",
        ),
        ({"type": "string", "nullable": True}, SCHEMA, "'nullable'"),
        ({"type": "object", "x-guidance": {"lenient": True}}, SCHEMA, "'x-guidance'"),
        ({"items": {"$id": "x"}}, SCHEMA + ".items", "'$id'"),
        ({"items": [{}, {"dependentRequired": {}}]}, SCHEMA + ".items[1]", "'dependentRequired'"),
        ({"additionalProperties": {"unevaluatedItems": False}}, SCHEMA + ".additionalProperties", "'unevaluatedItems'"),
        ({"$ref": "https://example.org/x"}, SCHEMA + ".$ref", "must point into the same schema"),
        ({"$ref": 3}, SCHEMA + ".$ref", "must point into the same schema"),
        ({"$ref": "#/$defs/none"}, SCHEMA, "does not exist"),
        ({"type": "integer", "format": "int32"}, SCHEMA + ".format", "strings only"),
        ({"type": "string", "format": "postcode"}, SCHEMA, "Unknown format"),
        ({"properties": []}, SCHEMA + ".properties", "must be an object of schemas"),
        ({"properties": {"a": 3}}, SCHEMA + ".properties.a", "must be a JSON schema"),
        ({"anyOf": {}}, SCHEMA + ".anyOf", "must be a list of schemas"),
        ({"items": "x"}, SCHEMA + ".items", "must be a JSON schema"),
        ({"type": "strin"}, SCHEMA, "Invalid type"),
        ({"enum": []}, SCHEMA, "cannot be enforced"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, SCHEMA, "cannot be enforced"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]}, SCHEMA, "oneOf"),
        ({"type": "string", "pattern": "(?=a)"}, SCHEMA, "look-ahead"),
        ({"const": math.nan}, SCHEMA, "is not JSON"),
        ({"const": "\ud800"}, SCHEMA, "is not JSON"),
        ({"enum": ["x" * 300_000]}, SCHEMA, "at most 262144"),
        ({"enum": ["é" * 140_000]}, SCHEMA, "at most 262144"),
    ],
)
def test_what_would_not_be_enforced_is_refused_by_name(schema, param, told):
    with pytest.raises(InvalidRequest) as caught:
        response_grammar(json_schema(schema))
    assert caught.value.param == param
    assert told in caught.value.message


def test_values_are_no_schemas():
    """Keywords inside constants, defaults and property names mean nothing."""
    schema = {
        "type": "object",
        "properties": {
            "not": {"const": {"not": 1}},
            "uniqueItems": {"enum": [{"if": 1}]},
            "n": {"default": {"contains": 1}, "type": "null"},
        },
        "examples": [{"x-guidance": 1}],
    }
    assert takes(response_grammar(json_schema(schema)), '{"not":{"not":1},"n":null}')


@pytest.mark.parametrize("depth", [65, 500, 5000])
def test_a_deep_schema_is_refused(depth):
    schema = {}
    for _ in range(depth):
        schema = {"items": schema}
    with pytest.raises(InvalidRequest) as caught:
        response_grammar(json_schema(schema))
    assert "deep" in caught.value.message or "not JSON" in caught.value.message
    assert len(caught.value.message) < 400


def test_a_schema_as_deep_as_is_taken():
    schema = {"const": 1}
    for _ in range(60):
        schema = {"type": "array", "items": schema}
    assert takes(response_grammar(json_schema(schema)), "[" * 60 + "1" + "]" * 60)


def test_the_grammar_is_plain_text_that_says_the_schema():
    grammar = response_grammar(json_schema({"const": "é"}))
    assert isinstance(grammar, str)
    schema = json.loads(grammar)["grammars"][0]["json_schema"]
    assert schema.pop("x-guidance")
    assert schema == {"const": "é"}
    assert llguidance.LLMatcher.validate_grammar(grammar) == ""
