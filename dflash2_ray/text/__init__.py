"""Text in, token ids out, and back: tokenizer, chat template, incremental detokenisation. No tensors."""
