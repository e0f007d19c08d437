"""`python -m enginery` is `engine`."""

from __future__ import annotations

from enginery.cli.main import main

if __name__ == "__main__":
    main()
