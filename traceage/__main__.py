"""`python -m traceage`."""

from traceage.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
