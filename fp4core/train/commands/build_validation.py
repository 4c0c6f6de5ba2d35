"""`python -m fp4core build-validation`: see fp4core.train.build_validation."""

from __future__ import annotations

from pathlib import Path

from fp4core.recipe import load_inputs

from .options import Parser


def main(argv: list[str]) -> int:
    """Make the fixed validation stream of document collections."""
    from ..build_validation import ValidationJob, build_validation

    options = Parser(
        prog="python -m fp4core build-validation",
        description="Distinct documents, mixed by tokens, hash-shuffled, packed; none that was trained on.",
    )
    options.add_argument(
        "--mix", nargs=2, action="append", required=True, metavar=("WEIGHT", "PATH"),
        help="a collection and its share of the tokens; the report's stream: --mix 82 A --mix 18 B",
    )  # fmt: skip
    options.add_argument("--tokenizer", type=Path, required=True, help="directory that holds tokenizer.json")
    options.add_argument("--out", type=Path, required=True, help="directory of the stream")
    options.add_argument("--sequences", type=int, default=768)
    options.add_argument("--length", type=int, default=8193, help="tokens per sequence: train.sequence + 1")
    options.add_argument("--seed", type=int, default=0, help="of the hash shuffle")
    options.add_argument("--field", default="text", help="column or key of the text (default: text)")
    options.add_argument(
        "--end-of-text", help="token that ends a document (default: the tokenizer's usual one)"
    )
    options.add_argument(
        "--training", type=Path, action="append", default=[], metavar="DIR",
        help="training shards that must not hold these documents; the bound corpus is one of them",
    )  # fmt: skip
    options.add_argument("--inputs", type=Path, default=Path("inputs.yaml"), help="bindings of local files")
    given = options.parse_args(argv)
    mix = tuple((_weight(weight), Path(path)) for weight, path in given.mix)
    bound = load_inputs(given.inputs).corpus if given.inputs.is_file() else None
    training = [*given.training, *([given.inputs.parent / bound.directory] if bound else [])]
    job = ValidationJob(
        mix, given.tokenizer, given.out, given.sequences, given.length, given.seed, given.field,
        given.end_of_text, tuple(training),
    )  # fmt: skip
    build_validation(job, note=lambda line: print(line, flush=True))
    return 0


def _weight(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--mix {text!r}: needed a number, then a path, as in --mix 82 PATH") from None
