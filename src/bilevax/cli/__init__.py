"""The command line: parse, call, print."""

from bilevax.cli.main import main

__all__ = ["main"]
