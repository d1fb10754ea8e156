"""Serve deployments and the OpenAI-compatible API. No tensors."""
