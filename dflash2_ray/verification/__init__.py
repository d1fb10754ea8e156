"""What `dflash2-ray verify` proves: that speculation changes no answer. Two backends, three checks, one report. No tensors."""
