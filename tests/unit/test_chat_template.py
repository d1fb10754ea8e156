"""Chat templates render as transformers renders them, and everything that cannot be rendered is refused by name."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import dflash2_ray
from dflash2_ray.errors import CheckpointError, ConfigError, InvalidRequest
from dflash2_ray.text.chat_template import ROLES, ChatTemplate, check_messages

FOLDER = Path(dflash2_ray.__file__).parent / "assets" / "target"
HELLO = [{"role": "user", "content": "Hello"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    *HELLO,
    {"role": "assistant", "content": "Hi <b>'there'</b> & \"all\""},
    {"role": "user", "content": "  two\nlines \U0001f999 "},
]


def test_the_embedded_template():
    expected = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert ChatTemplate.from_folder(FOLDER).render(HELLO) == expected


SOURCES = [
    (FOLDER / "chat_template.jinja").read_text(),
    "{{ bos_token }}{% for m in messages %}\n  {% if loop.first %}\n[{{ m.role }}] {% endif %}\n{{ m.content | trim }}{{ eos_token }}"
    "{% endfor %}\n{% if add_generation_prompt %}>{% endif %}",
    "{{ messages | tojson }}{{ messages | tojson(indent=2) }}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}",
    "{% set n = namespace(x=0) %}{% for m in messages %}{% set n.x = n.x + m.content | length %}{% endfor %}{{ n.x }}",
    "{{ pad_token }}{{ missing is defined }}{% if tools %}tools{% endif %}",
    "{% if tools is not none %}tools{% endif %}{% if documents is not none %}documents{% endif %}",
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((FOLDER / "tokenizer.json").read_bytes())
    settings = json.loads((FOLDER / "tokenizer_config.json").read_text())
    settings["bos_token"] = {"content": "<|im_start|>", "__type": "AddedToken"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


@pytest.mark.parametrize("messages", [HELLO, TALK], ids=["hello", "talk"])
@pytest.mark.parametrize("source", SOURCES, ids=range(len(SOURCES)))
def test_renders_as_transformers_does(folder, source, messages):
    (folder / "chat_template.jinja").write_text(source)
    expected = AutoTokenizer.from_pretrained(str(folder)).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert ChatTemplate.from_folder(folder).render(messages) == expected


def test_a_template_has_an_end():
    """Time and size are those of the messages' making: the same template renders others."""
    slow = ChatTemplate(
        "{% for a in messages %}{% for b in messages %}{% set x = b.content %}{% endfor %}{% endfor %}ok", {}
    )
    assert slow.render(HELLO * 10) == "ok"
    with pytest.raises(InvalidRequest, match=r"longer than 2 s") as caught:
        slow.render(HELLO * 20_000)
    assert caught.value.param == "messages"
    wordy = ChatTemplate("{% for a in messages %}{% for b in messages %}{{ b.content }}{% endfor %}{% endfor %}", {})
    with pytest.raises(InvalidRequest, match="more than 16777216 characters"):
        wordy.render([{"role": "user", "content": "x" * 200_000}] * 10)
    assert wordy.render(HELLO) == "Hello"


def test_a_long_complaint_of_a_template_is_cut():
    loud = ChatTemplate("{{ raise_exception(messages[0].content) }}", {})
    with pytest.raises(InvalidRequest) as caught:
        loud.render([{"role": "user", "content": "x" * 10_000}])
    assert len(str(caught.value)) < 400


def test_the_clock_is_offered():
    assert len(ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {}).render(HELLO)) == 10


# ---- where the template comes from ----------------------------------------------------------------------------------


def settings(folder, **keys):
    (folder / "tokenizer_config.json").write_text(json.dumps(keys))
    return folder


def test_the_file_goes_before_the_tokenizers_own(tmp_path):
    settings(tmp_path, chat_template="own")
    assert ChatTemplate.from_folder(tmp_path).render(HELLO) == "own"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert ChatTemplate.from_folder(tmp_path).render(HELLO) == "file"
    override = tmp_path / "other.txt"
    override.write_text("override é")
    assert ChatTemplate.from_folder(tmp_path, str(override)).render(HELLO) == "override é"


def test_named_templates(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert ChatTemplate.from_folder(settings(tmp_path, chat_template=named)).render(HELLO) == "plain"
    with pytest.raises(InvalidRequest, match="no chat template"):
        ChatTemplate.from_folder(settings(tmp_path, chat_template=named[:1])).render(HELLO)


@pytest.mark.parametrize("keys", [{}, {"chat_template": None}])
def test_without_a_template_the_request_is_refused(tmp_path, keys):
    with pytest.raises(InvalidRequest, match="chat_template=PATH") as caught:
        ChatTemplate.from_folder(settings(tmp_path, **keys)).render(HELLO)
    assert caught.value.param == "messages"


def test_a_bad_override_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="chat_template: cannot read"):
        ChatTemplate.from_folder(FOLDER, str(tmp_path / "nowhere.jinja"))
    with pytest.raises(ConfigError, match="chat_template: cannot read"):
        ChatTemplate.from_folder(FOLDER, str(tmp_path))
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="chat_template: cannot read"):
        ChatTemplate.from_folder(FOLDER, str(tmp_path / "latin"))
    (tmp_path / "broken").write_text("fine\n{% for %}")
    with pytest.raises(ConfigError, match="chat_template: line 2") as caught:
        ChatTemplate.from_folder(FOLDER, str(tmp_path / "broken"))
    assert not isinstance(caught.value, CheckpointError)


def test_a_broken_template_of_the_checkpoint_is_a_checkpoint_error(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ ")
    with pytest.raises(CheckpointError, match="chat_template: line 1"):
        ChatTemplate.from_folder(tmp_path)


def test_an_undecodable_template_of_the_checkpoint_is_a_checkpoint_error(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError):
        ChatTemplate.from_folder(tmp_path)


@pytest.mark.parametrize("content", ["{", "[1]", "3", "null"])
def test_a_broken_tokenizer_config_is_a_checkpoint_error(tmp_path, content):
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(CheckpointError, match="tokenizer_config"):
        ChatTemplate.from_folder(tmp_path)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([], "non-empty list"),
        (None, "non-empty list"),
        ("Hello", "non-empty list"),
        ({"role": "user", "content": "x"}, "non-empty list"),
        (["Hello"], r"messages\[0\] must be an object"),
        ([*HELLO, 3], r"messages\[1\] must be an object"),
        ([{"content": "x"}], r"messages\[0\]\.role"),
        ([*HELLO, {"role": "robot", "content": "x"}], r"messages\[1\]\.role .*got 'robot'"),
        ([{"role": ["user"], "content": "x"}], r"messages\[0\]\.role"),
        ([{"role": "user"}], r"messages\[0\]\.content must be"),
        ([{"role": "user", "content": None}], r"messages\[0\]\.content must be"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content must be"),
        ([{"role": "user", "content": []}], r"messages\[0\]\.content must be"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\]\.content: only parts of type 'text'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], r"got .?image_url"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "input_audio"}]}], r"got .?input_audio"),
        ([{"role": "assistant", "content": "x", "tool_calls": []}], r"messages\[0\]\.tool_calls must be a list"),
        ([{"role": "user", "content": "x", "tool_calls": [1]}], r"messages\[0\]\.tool_calls is not offered"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            r"tool_calls\[0\]\.function\.arguments must be",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}],
            r"tool_calls\[0\]\.function must hold a name",
        ),
    ],
)
def test_bad_messages_are_refused_by_name(messages, told):
    with pytest.raises(InvalidRequest, match=told) as caught:
        ChatTemplate("x", {}).render(messages)
    assert caught.value.param.startswith("messages")


def test_an_unknown_key_is_the_param():
    with pytest.raises(InvalidRequest) as caught:
        check_messages([*HELLO, {"role": "user", "content": "x", "colour": 1}])
    assert caught.value.param == "messages[1].colour"


def test_every_role_and_text_parts_are_taken():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": role, "content": parts, "name": "n"} for role in ROLES]
    assert [turn["content"] for turn in check_messages(messages)] == ["ab"] * len(ROLES)
    assert [turn["role"] for turn in check_messages(tuple(messages))] == list(ROLES)
    assert messages[0]["content"] is parts, "the caller's messages stay as they are"
    assert ChatTemplate("{{ messages[0].content }}{{ messages[0].name }}", {}).render(messages) == "abn"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('only user turns') }}",
        "{{ messages[9].content.x }}",
        "{{ 1 + messages[0].content }}",
        "{{ messages[0].content.__class__.__mro__ }}",
        "{{ messages[0].content.nothing() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_that_refuses_is_the_clients_error(source):
    with pytest.raises(InvalidRequest, match="refuses them") as caught:
        ChatTemplate(source, {}).render(HELLO)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / (messages | length - 1) }}",
        "{{ messages[0].content.index('absent') }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_a_template_that_fails_in_python_is_the_clients_error_too(source):
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, {}).render(HELLO)


def test_a_refusal_names_the_templates_own_words():
    with pytest.raises(InvalidRequest, match="only user turns"):
        ChatTemplate("{{ raise_exception('only user turns') }}", {}).render(HELLO)


def test_tools_and_calls_reach_the_template_as_objects():
    source = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.x }}{% endfor %}{% endfor %}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 7}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "ok"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    text = ChatTemplate(source, {}).render(messages, tools)
    assert text == "f " + HELLO[0]["content"] + "7ok"
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate("{{ messages }}", {}).render(HELLO, tools)
    assert caught.value.param == "tools"
