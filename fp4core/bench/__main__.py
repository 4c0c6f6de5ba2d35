"""``python -m fp4core.bench NAME [options]``: as ``python -m fp4core bench NAME``."""

from __future__ import annotations

import sys

from fp4core.bench import main

if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1:]))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
