"""Ray actors, placement and the client. No HTTP, no tensors at import."""
