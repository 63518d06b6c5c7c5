"""`python -m bilevax`, where the command is not installed."""

from bilevax.cli import main

if __name__ == "__main__":
    main()
