"""`python -m fp4core COMMAND`: every command of the package, each imported only when it is asked for.

Exit codes: 0 done · 1 the run failed · 2 wrong input · 75 stopped early, the same command goes on.
Errors are one line on stderr.
"""

from __future__ import annotations

import importlib
import os
import sys

# command -> (module, what it does); the module has main(argv) -> exit code
COMMANDS = {
    "data": (
        "fp4core.train.commands.data",
        "tokenizer, token shards and the fixed validation stream of a study",
    ),
    "train": ("fp4core.train.commands.train", "the long trajectory of one route and seed; starts or resumes"),
    "probe": ("fp4core.train.commands.probe", "tokens/s, MFU and memory of one route over a window of steps"),
    "head-screen": (
        "fp4core.train.commands.head_screen",
        "three output heads: rate, loss and gradient difference",
    ),
    "bench": ("fp4core.bench", "kernel and boundary timings"),
    "doctor": ("fp4core.train.commands.doctor", "what this machine can run, and what a study still lacks"),
    "bind": ("fp4core.train.commands.bind", "enter local files with their hashes into inputs.yaml"),
    "build-shards": ("fp4core.train.commands.build_shards", "token shards of a user's documents"),
    "build-validation": (
        "fp4core.train.commands.build_validation",
        "the fixed validation stream of a user's documents",
    ),
}
EXIT_RUN, EXIT_INPUT, EXIT_STOPPED, EXIT_INTERRUPTED = 1, 2, 75, 130


def usage() -> str:
    """The list of commands."""
    lines = [f"  {name:<18}{text}" for name, (_, text) in COMMANDS.items()]
    return "usage: python -m fp4core COMMAND [options]\n\n" + "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else EXIT_INPUT
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        from fp4core.recipe import nearest

        print(f"error: unknown command {name!r}{nearest(name, COMMANDS)}\n{usage()}", file=sys.stderr)
        return EXIT_INPUT
    from fp4core.train.errors import EchoedError, EchoedRunError, RunError, StopEarly

    try:
        return importlib.import_module(COMMANDS[name][0]).main(rest)
    except StopEarly as stop:
        if _rank() == "0":
            print(f"stopped: {stop}", flush=True)
        return EXIT_STOPPED
    except EchoedError:
        return EXIT_INPUT
    except EchoedRunError:
        return EXIT_RUN
    except ValueError as error:
        return _fail(str(error), EXIT_INPUT)
    except (RunError, OSError) as error:
        return _fail(str(error), EXIT_RUN)
    except KeyboardInterrupt:
        return _fail("interrupted; the same command goes on from the last checkpoint", EXIT_INTERRUPTED)


def _rank() -> str:
    return os.environ.get("RANK", "0")


def _fail(message: str, code: int) -> int:
    place = "" if _rank() == "0" else f"rank {_rank()}: "
    print(f"{place}error: " + " ".join(message.split("\n")), file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
