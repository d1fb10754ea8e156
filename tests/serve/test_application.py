"""Every spelling of the import path leads to the builder; settings are validated before anything starts."""

import subprocess
import sys

import pytest

from dflash2_ray.config import ServiceConfig
from dflash2_ray.errors import ConfigError


@pytest.mark.parametrize(
    "spelling", ["dflash2_ray.app", "dflash2_ray:app", "dflash2_ray.app:app", "dflash2_ray.app.app"]
)
def test_spellings_lead_to_the_builder(service, spelling):
    from ray._common.utils import import_attr
    from ray.serve import Application
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

    builder = import_attr(spelling)
    built = call_user_app_builder_with_args_if_necessary(builder, {"max_num_seqs": "3", "num_speculative_tokens": "5"})
    assert isinstance(built, Application)


def test_default_app_for_serve_build(service):
    from ray._common.utils import import_attr
    from ray.serve import Application

    assert isinstance(import_attr("dflash2_ray.app:default_app"), Application)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"dtyp": "float32"}, "did you mean 'dtype'"),
        ({"max_num_seqs": "many"}, "max_num_seqs"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"drafter_placement": "elsewhere"}, "drafter_placement"),
    ],
)
def test_settings_that_cannot_be_served(settings, says):
    from dflash2_ray.app import app

    with pytest.raises((ConfigError, ValueError), match=says):
        app(ServiceConfig.from_keys(settings))


@pytest.mark.parametrize("under_kuberay", [False, True])
def test_gpus_that_have_not_joined_yet(under_kuberay, monkeypatch):
    """A fixed cluster is told at once; pods of KubeRay may still be on their way, so the unit's placement group waits for them."""
    from dflash2_ray.engine.placement import NodeFacts
    from dflash2_ray.serving import application

    monkeypatch.setattr(application, "_nodes", lambda: [NodeFacts("first-pod", 2)])
    monkeypatch.delenv("KUBERAY_GEN_RAY_START_CMD", raising=False)
    config = ServiceConfig(device="cuda", tensor_parallel_size=2, drafter_placement="separate", num_replicas=2)
    if not under_kuberay:
        with pytest.raises(ConfigError, match="drafter; tried: first-pod"):
            application.build_application(config)
        return
    monkeypatch.setenv("KUBERAY_GEN_RAY_START_CMD", "ray start")
    unit = application.build_application(config)._bound_deployment.init_args[1]._bound_deployment
    assert [bundle.get("GPU") for bundle in unit._replica_config.placement_group_bundles] == [None, 2.0, 1.0]


def ingress_of(config):
    from dflash2_ray.serving import application

    return application.build_application(config)._bound_deployment


def test_fronts_follow_the_load_where_units_do():
    fixed = ingress_of(ServiceConfig(num_ingress_replicas=2))
    assert (fixed.num_replicas, fixed._deployment_config.autoscaling_config) == (2, None)
    config = ServiceConfig(
        num_replicas=2,
        num_ingress_replicas=3,
        max_num_seqs=6,
        autoscaling={"min_replicas": 1, "max_replicas": 5, "upscale_delay_s": 7},
    )
    scaling = ingress_of(config)._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.initial_replicas, scaling.max_replicas) == (3, 3, 8)
    assert (scaling.get_target_ongoing_requests(), scaling.upscale_delay_s) == (4.0, 7.0)


def test_the_banner_s_address_is_where_serve_listens(service, monkeypatch):
    import ray

    from dflash2_ray.serving import application

    assert application._http_url() == service.url
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    assert application._http_url() == "http://127.0.0.1:8000"


def test_importing_the_package_is_cheap():
    code = (
        "import sys, dflash2_ray, dflash2_ray.config; from dflash2_ray.app import app; assert callable(app); "
        "print([m for m in ('torch', 'ray', 'transformers', 'triton') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_the_front_never_imports_torch():
    code = (
        "import sys, dflash2_ray.serving.application; "
        "print([m for m in ('torch', 'transformers', 'triton') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
