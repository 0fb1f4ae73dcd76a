"""`python -m attnscope`: the command line."""

from attnscope.cli import main

main()
