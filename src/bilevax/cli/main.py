"""`bilevax COMMAND`."""

from __future__ import annotations

import os
import sys
from typing import Any

import jax
import tyro

from bilevax import __version__
from bilevax.cache import enable_cache_as_asked
from bilevax.cli.meta import meta
from bilevax.cli.predict import predict
from bilevax.cli.robust import robust
from bilevax.cli.solve import demo, solve

#: The first line of the help.
PURPOSE = (
    "Train classifiers whose worst group does well (robust, predict, deep), and solve bilevel "
    "problems with a certificate (demo, solve, bench). --version says which version this is."
)


def main(args: list[str] | None = None) -> None:
    """Run the command line; exits with 1 when an answer is not certified, with 2 on bad input."""
    args = sys.argv[1:] if args is None else list(args)
    if args == ["--version"]:
        print(f"bilevax {__version__}")
        sys.exit(0)
    if args[:1] != ["deep"]:  # whose networks compute in float32 or less
        jax.config.update("jax_enable_x64", True)
    _enable_cache()
    try:
        code = _commands(args).cli(prog="bilevax", description=PURPOSE, args=args)
    except ImportError as error:
        if args[:1] != ["deep"]:
            raise
        code = _refuse(f"this needs pip install 'bilevax[deep]' ({error})")
    except (ValueError, OSError) as error:
        code = _refuse(str(error))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        code = _refuse("the device has too little memory; take a smaller batch")
    if code == 2 and jax.process_count() > 1:
        sys.stderr.flush()
        os._exit(code)  # the others wait for this process: it must not wait for them
    sys.exit(code)


def _commands(args: list[str]) -> tyro.extras.SubcommandApp:
    """All commands; those that import much are complete only where they are asked for."""
    commands = tyro.extras.SubcommandApp()
    for command in (robust, predict, meta, demo, solve):
        commands.command(command)
    completion = any(arg.startswith("--tyro-") for arg in args)  # a shell's, which needs them all
    bench: Any = lambda: 2  # never called
    deep: Any = bench
    if completion or args[:1] == ["bench"]:
        from bilevax.cli.bench import commands as bench
    if completion or args[:1] == ["deep"]:
        from bilevax.cli.deep import commands as networks

        deep = networks(args)
    commands.command(bench, name="bench", help="Experiments with known answers.")
    commands.command(deep, name="deep", help="Networks whose worst group does well.")
    return commands


def _enable_cache() -> None:
    """Keep compiled programs on disk; a folder that JAX was given already stays."""
    config: Any = jax.config
    try:
        enable_cache_as_asked(default=config.jax_compilation_cache_dir is None)
    except (OSError, RuntimeError) as error:
        print(f"bilevax: compiled programs are not kept on disk: {error}", file=sys.stderr)


def _refuse(why: str) -> int:
    print(f"bilevax: {why}", file=sys.stderr)
    return 2
