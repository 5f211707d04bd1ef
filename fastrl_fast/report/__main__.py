"""`python -m fastrl_fast.report`."""

from .. import cli
from . import main

if __name__ == "__main__":
    cli.run(main)
