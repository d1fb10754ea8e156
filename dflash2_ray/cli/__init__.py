"""The `dflash2-ray` command."""

import sys

import typer

from dflash2_ray.cli.bench import bench
from dflash2_ray.cli.check import check
from dflash2_ray.cli.generate import chat, generate
from dflash2_ray.cli.status import status
from dflash2_ray.cli.verify import verify
from dflash2_ray.errors import ConfigError, DFlash2Error

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Speculative decoding with DFlash 2, in this process. Without a target it runs the tiny embedded pair. "
    "Settings are KEY=VALUE pairs, the same as for `serve run dflash2_ray.app`; `dflash2-ray check --keys` lists them.",
)
for command in (check, generate, chat, bench, verify, status):
    app.command()(command)


def main() -> None:
    """Run; exit code 2 for a configuration that cannot run, 1 for a request that was refused, a failed check, or a service that is not ready."""
    try:
        app()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except DFlash2Error as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
