"""Torch modules: the target and the DFlash 2 drafter. No ray, no scheduling."""
