"""Ray-distributed serving with DFlash 2 speculative decoding.

`LLM` runs the engine in this process, `Client` talks to a running service through Ray, `app` builds the Serve
application. Importing the package imports none of torch, transformers and ray: `LLM` and `Client` are lazy.
"""

from typing import TYPE_CHECKING, Any

from dflash2_ray.errors import DFlash2Error

if TYPE_CHECKING:
    from dflash2_ray.engine.client import Client
    from dflash2_ray.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "Client", "DFlash2Error", "__version__", "app"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from dflash2_ray.llm import LLM

        return LLM
    if name == "Client":
        from dflash2_ray.engine.client import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Last, so that the package attribute `app` stays the builder function in every import order (`serve run dflash2_ray.app`).
from dflash2_ray.app import app  # noqa: E402
