"""``python -m guard``: the same as the command ``guard``."""

from guard.cli import main

if __name__ == "__main__":
    main()
