"""``python -m slimctl`` is the command ``slimctl``."""

from __future__ import annotations

from slimctl.cli.main import main

if __name__ == "__main__":
    main()
