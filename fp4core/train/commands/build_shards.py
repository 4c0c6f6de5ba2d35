"""`python -m fp4core build-shards`: see fp4core.train.build_shards."""

from __future__ import annotations

from pathlib import Path

from .options import Parser


def main(argv: list[str]) -> int:
    """Make training token shards of document collections."""
    from ..build_shards import SHARD_TOKENS, ShardJob, build_shards

    options = Parser(
        prog="python -m fp4core build-shards",
        description="Token shards of documents (Parquet or JSON lines); goes on after an interruption.",
    )
    options.add_argument(
        "documents", nargs="+", type=Path, metavar="PATH", help="files or directories of documents"
    )
    options.add_argument("--tokenizer", type=Path, required=True, help="directory that holds tokenizer.json")
    options.add_argument("--out", type=Path, required=True, help="directory of the shards")
    options.add_argument("--field", default="text", help="column or key of the text (default: text)")
    options.add_argument(
        "--end-of-text", help="token that ends a document (default: the tokenizer's usual one)"
    )
    options.add_argument("--shard-tokens", type=int, default=SHARD_TOKENS, help="tokens that fill a shard")
    options.add_argument(
        "--exclude", type=Path, action="append", default=[], metavar="DIR",
        help="validation stream whose documents are left out; may be repeated",
    )  # fmt: skip
    given = options.parse_args(argv)
    job = ShardJob(
        tuple(given.documents), given.tokenizer, given.out, given.field, given.end_of_text,
        given.shard_tokens, tuple(given.exclude),
    )  # fmt: skip
    build_shards(job, note=lambda line: print(line, flush=True))
    return 0
