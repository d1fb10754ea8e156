"""Numbers as Kubernetes writes them."""

_UNITS = {"m": 1e-3, "": 1, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def amount(text: str | int | float) -> float:
    """`500m`, `2`, `8Gi` as a plain number."""
    text = str(text)
    digits = text.rstrip("mkMGTi")
    return float(digits) * _UNITS[text[len(digits) :]]


def seconds(text: str | int) -> float:
    """`30m`, `1h`, `90s` or plain seconds."""
    text = str(text)
    return float(text.rstrip("smh")) * {"s": 1, "m": 60, "h": 3600}.get(text[-1], 1)
