"""`bilevax COMMAND`."""

from __future__ import annotations

import os
import sys

import jax
import tyro

from bilevax.cli import bench, deep
from bilevax.cli.demo import demo
from bilevax.cli.robust import robust
from bilevax.cli.solve import solve


def main(args: list[str] | None = None) -> None:
    """Run the command line; exits with 1 when an answer is not certified, with 2 on bad input."""
    args = sys.argv[1:] if args is None else args
    if args[:1] != ["deep"]:  # whose networks compute in float32 or less
        jax.config.update("jax_enable_x64", True)
    commands = tyro.extras.SubcommandApp()
    commands.command(demo)
    commands.command(solve)
    commands.command(robust)
    experiments = tyro.extras.SubcommandApp()
    experiments.command(bench.linear)
    experiments.command(bench.suite)
    experiments.command(bench.growth)
    commands.command(experiments, name="bench", help="Experiments with known answers.")
    try:
        networks_help = "Networks whose worst group does well."
        commands.command(deep.commands(args), name="deep", help=networks_help)
        code = commands.cli(
            prog="bilevax", description="Certified bilevel optimisation.", args=args
        )
    except ImportError as error:
        if args[:1] != ["deep"]:
            raise
        print(f"bilevax: this needs pip install 'bilevax[deep]' ({error})", file=sys.stderr)
        code = 2
    except (ValueError, OSError) as error:
        print(f"bilevax: {error}", file=sys.stderr)
        code = 2
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print("bilevax: the device has too little memory; take a smaller batch", file=sys.stderr)
        code = 2
    if code == 2 and jax.process_count() > 1:
        sys.stderr.flush()
        os._exit(code)  # the others wait for this process: it must not wait for them
    sys.exit(code)
