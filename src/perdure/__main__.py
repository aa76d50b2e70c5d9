"""`python -m perdure` is the `perdure` program."""

from perdure.cli import main

if __name__ == "__main__":
    main()
