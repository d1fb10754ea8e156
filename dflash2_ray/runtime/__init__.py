"""One process per device: KV cache, runners, loops, links. No ray, no HTTP."""
