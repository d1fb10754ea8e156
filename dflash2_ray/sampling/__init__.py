"""What distribution, which token: everything between logits and a committed token id."""
