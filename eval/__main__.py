"""Command line: python -m eval {validate,downstream,export,dgrad,traces,collect,pretrained} ...

Exit codes: 0 done, 2 wrong input (one line that starts with "error:"), 1 anything unexpected.
"""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "validate": "eval.validate",
    "downstream": "eval.downstream",
    "export": "eval.export",
    "dgrad": "eval.dgrad",
    "traces": "eval.traces",
    "collect": "eval.collect",
    "published": "eval.published",
    "pretrained": "eval.pretrained",
}


def main(arguments: list[str]) -> int:
    """Run one command; its module is imported only now, so that none pays for another's libraries."""
    if not arguments or arguments[0] not in COMMANDS:
        usage = f"usage: python -m eval {{{','.join(COMMANDS)}}} [--help]"
        if arguments and arguments[0] in ("-h", "--help"):
            print(usage)
            return 0
        print(f"error: got {arguments[0] if arguments else 'no command'}; {usage}", file=sys.stderr)
        return 2
    try:
        importlib.import_module(COMMANDS[arguments[0]]).main(arguments[1:])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
