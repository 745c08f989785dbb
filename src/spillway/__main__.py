"""`python -m spillway`: the command line."""

from spillway.cli import main

if __name__ == "__main__":
    main()
