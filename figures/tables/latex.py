"""LaTeX of a Table: a complete document per table, booktabs rules, aligned decimals, ASCII only."""

from __future__ import annotations

import unicodedata
from itertools import groupby

from figures.numbers import FIGURE_SPACE, PUNCTUATION_SPACE
from figures.tables.model import Column, Table, blocks, cell, notes

_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "−": r"$-$",
    "×": r"$\times$",
    "·": r"$\cdot$",
    "±": r"$\pm$",
    "≤": r"$\le$",
    "≥": r"$\ge$",
    "≈": r"$\approx$",
    "→": r"$\rightarrow$",
    "–": "--",
    "—": "---",
    "’": "'",
    "“": "``",
    "”": "''",
    "…": r"\ldots{}",
    "†": r"\textdagger{}",
    "‡": r"\textdaggerdbl{}",
    "ᵀ": r"$^{\mathsf{T}}$",
    "α": r"$\alpha$",
    "β": r"$\beta$",
    "θ": r"$\theta$",
    "Δ": r"$\Delta$",
    "²": r"$^2$",
    "₁": r"$_1$",
    "₂": r"$_2$",
    "₃": r"$_3$",
    FIGURE_SPACE: r"\phantom{0}",
    PUNCTUATION_SPACE: r"\phantom{.}",
    "\u00a0": "~",
}


def latex_escape(text: str) -> str:
    """ASCII LaTeX of ``text``; a character that is not in the list becomes its name's best ASCII, else
    '?'."""
    out = []
    for char in text:
        if char in _LATEX:
            out.append(_LATEX[char])
        elif ord(char) < 128:
            out.append(char)
        else:
            plain = unicodedata.normalize("NFKD", char).encode("ascii", "ignore").decode()
            out.append(plain or "?")
    return "".join(out)


def to_latex(table: Table) -> str:
    """A complete document with one booktabs table; ``docmute`` lets a paper \\input it as it is."""
    columns = table.shown
    landscape, size = _latex_layout(table)
    long = len(table.rows) > 40
    spec = "".join(
        rf">{{\raggedright\arraybackslash}}p{{{column.width:.2f}\linewidth}}"
        if column.width
        else "r"
        if column.numeric
        else "l"
        for column in columns
    )
    head = _latex_head(columns)
    body: list[str] = []
    for number, (heading, rows) in enumerate(blocks(table)):
        if heading:
            body += ([r"\addlinespace"] if number else []) + [
                rf"\multicolumn{{{len(columns)}}}{{l}}{{\textit{{{latex_escape(heading)}}}}} \\"
            ]
        for index, row in rows:
            if index and any(column.width for column in columns):
                body.append(r"\addlinespace")
            if index in table.summary and index - 1 not in table.summary:
                body.append(r"\midrule")
            body.append(_latex_row(table, columns, index, row))
    tail = [r"\par\smallskip\raggedright"] + [rf"\noindent {latex_escape(note)}\par" for note in notes(table)]
    margin = "landscape,margin=12mm" if landscape else "margin=20mm"
    lines = [
        r"\documentclass[10pt]{article}",
        r"\usepackage[T1]{fontenc}",
        rf"\usepackage[a4paper,{margin}]{{geometry}}",
        r"\usepackage{array,booktabs,longtable}",
        r"\pagestyle{empty}",
        r"\begin{document}",
    ]
    caption = rf"\caption{{{latex_escape(table.title)}. {latex_escape(table.caption)}}}"
    setup = [size, r"\setlength{\tabcolsep}{3pt}"]
    if long:
        lines += [
            r"\begingroup",
            *setup,
            r"\setlength{\LTcapwidth}{\linewidth}",
            rf"\begin{{longtable}}{{{spec}}}",
        ]
        lines += [caption + rf"\label{{tab:{table.name}}}\\", *head, r"\endfirsthead", *head, r"\endhead"]
        lines += [*body, r"\bottomrule", r"\end{longtable}", *tail, r"\endgroup"]
    else:
        lines += [r"\begin{table}[ht]", r"\centering", caption, rf"\label{{tab:{table.name}}}", *setup]
        lines += [
            rf"\begin{{tabular}}{{@{{}}{spec}@{{}}}}",
            *head,
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            *tail,
        ]
        lines += [r"\end{table}"]
    return "\n".join([*lines, r"\end{document}"]) + "\n"


def _latex_layout(table: Table) -> tuple[bool, str]:
    """(landscape, font size) that the widest row needs, from its letters: about 4.6 pt each at 8 pt."""
    columns = table.shown
    widths = []
    for column in columns:
        texts = [cell(column, row.get(column.key)) for row in table.rows] + [column.title]
        widths.append(100 * column.width if column.width else max(map(len, texts)))
    points = 4.6 * sum(widths) + 6 * len(columns)
    portrait, sideways = 483, 774
    if points <= portrait:
        return False, r"\footnotesize"
    return True, r"\footnotesize" if points <= sideways else r"\scriptsize"


def _latex_head(columns: list[Column]) -> list[str]:
    lines = [r"\toprule"]
    if any(column.group for column in columns):
        spans, rules, at = [], [], 1
        for group, members in groupby(columns, key=lambda column: column.group):
            width = len(list(members))
            spans.append(rf"\multicolumn{{{width}}}{{c}}{{{latex_escape(group)}}}")
            if group:
                rules.append(rf"\cmidrule(lr){{{at}-{at + width - 1}}}")
            at += width
        lines += [" & ".join(spans) + r" \\", "".join(rules)]
    titles = []
    for column in columns:
        text = latex_escape(column.title)
        titles.append(rf"\multicolumn{{1}}{{r}}{{{text}}}" if column.numeric else text)
    return [*lines, " & ".join(titles) + r" \\", r"\midrule"]


def _latex_row(table: Table, columns: list[Column], index: int, row: dict[str, object]) -> str:
    texts = []
    for column in columns:
        text = cell(column, row.get(column.key))
        stripped = text.rstrip(FIGURE_SPACE + PUNCTUATION_SPACE)
        padding = latex_escape(text[len(stripped) :])
        shown = latex_escape(stripped)
        if column.width:
            shown = shown.replace("/", r"/\allowbreak{}").replace(r"\_", r"\_\allowbreak{}")
        if stripped and ((index, column.key) in table.best or index in table.summary):
            shown = rf"\textbf{{{shown}}}"
        mark = table.marks.get((index, column.key), "")
        texts.append(
            shown + (rf"\rlap{{\textsuperscript{{{latex_escape(mark)}}}}}" if mark else "") + padding
        )
    return " & ".join(texts) + r" \\"
