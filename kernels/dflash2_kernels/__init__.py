"""Operators of DFlash 2 drafting and verification: one file each, a torch reference beside every kernel.

This package knows nothing of `dflash2_ray`.
"""
