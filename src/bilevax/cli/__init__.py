"""The command line: parse, call, print. One subcommand a file."""

from bilevax.cli.main import main

__all__ = ["main"]
