"""`python -m paper_repro NAME`: runs an experiment and writes what it gave."""

from ._cli import main

if __name__ == "__main__":
    raise SystemExit(main())
