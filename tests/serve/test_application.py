"""Every spelling of the import path leads to the builder; settings are validated before anything starts."""

import subprocess
import sys

import pytest

from dflash2_ray.config import ServiceConfig
from dflash2_ray.errors import ConfigError


@pytest.mark.parametrize("spelling", ["dflash2_ray.app", "dflash2_ray:app", "dflash2_ray.app:app", "dflash2_ray.app.app"])
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
