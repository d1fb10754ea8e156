"""`serve run dflash2_ray.app [key=value …]`: the application builder.

Imports nothing heavy: Serve's controller runs this file in a short-lived task on every deploy. Annotations are not
postponed here, because Serve only converts arguments when the annotation is the pydantic class itself.
"""

from typing import TYPE_CHECKING, Any

from dflash2_ray.config import ServiceConfig

if TYPE_CHECKING:
    from ray.serve import Application


def app(args: ServiceConfig) -> "Application":
    """Build the Serve application from one flat configuration; raises ConfigError on a setting that cannot be served."""
    from dflash2_ray.serving.application import build_application

    config = args if isinstance(args, ServiceConfig) else ServiceConfig.from_keys(args)
    return build_application(config)


def __getattr__(name: str) -> Any:
    if name == "default_app":  # `serve build dflash2_ray.app:default_app` wants an application, not a builder
        return app(ServiceConfig())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
