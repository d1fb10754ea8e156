"""The lines that tell a newcomer what runs and how to try it."""

from typing import Any


def banner(facts: dict[str, Any], url: str, num_keys: int = 0) -> str:
    """`facts`: what the unit says of itself; `url`: where HTTP listens; `num_keys`: API keys that are taken."""
    config = facts["config"]
    tokens = config["num_speculative_tokens"]
    drafter = f"{config['drafter']} ({config['drafter_placement']})" if tokens else "none (plain decoding)"
    capacity = config["num_kv_pages"] * config["page_size"]
    lines = [
        f"dflash2_ray serves {facts['model']} at {url} · "
        + (f"auth on, {num_keys} API keys" if num_keys else "auth off"),
        f"  dtype {config['dtype']} on {config['device']} · target ranks {config['tensor_parallel_size']} · drafter {drafter}",
        f"  num_speculative_tokens {tokens} · context {config['max_model_len']} tokens · KV capacity {capacity} tokens "
        f"({config['num_kv_pages']} pages, {config['kv_bytes'] / 2**20:.0f} MiB) · up to {config['max_num_seqs']} requests at once",
        f"  operators: {_by_implementation(facts['operators'])}",
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' "
        '-d \'{"messages": [{"role": "user", "content": "Write a short story about a shy bird."}]}\'',
    ]
    return "\n".join(lines)


def _by_implementation(operators: dict[str, str]) -> str:
    """`implementation: operator, operator · implementation: …`."""
    names: dict[str, list[str]] = {}
    for name, implementation in operators.items():
        names.setdefault(implementation, []).append(name)
    return " · ".join(f"{implementation}: {', '.join(own)}" for implementation, own in names.items())
