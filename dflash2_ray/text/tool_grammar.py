"""The grammar of an answer that must call a tool: Hermes calls, as Qwen models write them, and nothing else.

`<tool_call>` stands in it as text; where a tokenizer has a token for it, that token is how the text is written.
"""

import json

import llguidance

from dflash2_ray.text.json_schema import AS_TEMPLATES_WRITE, checked_schema, refuse_invalid
from dflash2_ray.text.tool_calls import CLOSE, OPEN
from dflash2_ray.text.tools import ToolUse, parameters_of


def tool_grammar(use: ToolUse | None) -> str | None:
    """A grammar that llguidance reads (`sampling/grammar.py` takes it); None where no call has to be made.

    Calls stand in a row, one newline between two; exactly one where `use.max_calls` is 1. Name first, then arguments that satisfy
    the function's parameters. Raises InvalidRequest naming the schema that cannot be enforced.
    """
    if use is None or not use.must_call:
        return None
    schemas = {
        tool["function"]["name"]: checked_schema(
            parameters_of(tool), f"tools[{index}].function.parameters", AS_TEMPLATES_WRITE
        )
        for index, tool in enumerate(use.tools)
        if use.name in (None, tool["function"]["name"])
    }
    head, tail = OPEN + '\n{"name": "', "}\n" + CLOSE
    choices = " | ".join(f"tool_{index}" for index in range(len(schemas)))
    rules = [
        "start: call" if use.max_calls == 1 else 'start: call ("\\n" call)*',
        f"call: {_text(head)} ({choices}) {_text(tail)}",
    ]
    for index, (name, schema) in enumerate(schemas.items()):
        middle = name + '", "arguments": '
        rules.append(f"tool_{index}: {_text(middle)} %json {schema}")
    grammar = llguidance.LLMatcher.grammar_from_lark("\n".join(rules) + "\n")
    refuse_invalid(grammar, "tools")
    return grammar


def _text(text: str) -> str:
    """`text` as a literal of the grammar language."""
    return json.dumps(text)
