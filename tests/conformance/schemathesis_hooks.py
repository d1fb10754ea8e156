"""What every generated request and every answer of the schema test shares: small generations, and one shape of errors."""

import schemathesis

LONGEST = 4  # tokens per generated request, and choices


@schemathesis.hook
def before_call(context, case, kwargs):
    """Keeps valid requests short; wrong values stay as they were generated."""
    body = case.body
    if not isinstance(body, dict) or not {"prompt", "messages"} & set(body):
        return
    for name in ("max_tokens", "max_completion_tokens", "n"):
        value = body.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > LONGEST:
            body[name] = LONGEST
    if body.get("max_tokens") is None and body.get("max_completion_tokens") is None:
        body["max_tokens"] = LONGEST


@schemathesis.check
def openai_error_shape(ctx, response, case):
    """Every failure, whoever noticed it, is the OpenAI error object with its four fields."""
    if response.status_code < 400 or case.method.upper() == "HEAD":
        return
    body = response.json()
    assert set(body) == {"error"}, f"not an error object: {body}"
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}, f"fields of the error: {error}"
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert all(error[name] is None or isinstance(error[name], str) for name in ("param", "code"))
