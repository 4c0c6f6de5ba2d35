"""Render a Table as CSV (every digit), Markdown, LaTeX (booktabs) and an HTML fragment, all with aligned
decimals."""

from __future__ import annotations

import csv
import html
import io
import math
import re
from itertools import groupby

from figures.numbers import FIGURE_SPACE, PUNCTUATION_SPACE, fixed
from figures.tables.model import Column, Table, is_blank

BEST_NOTE = "Bold: best value of the column."
FORMATS = ("csv", "md", "tex", "html")


def render(table: Table, kind: str) -> str:
    """Text of ``table`` as 'csv', 'md', 'tex' or 'html'."""
    return {"csv": to_csv, "md": to_markdown, "tex": to_latex, "html": to_html}[kind](table)


def notes(table: Table) -> list[str]:
    """The notes to print: best values where some are marked, then the table's own."""
    return ([BEST_NOTE] if table.best else []) + table.notes


def cell(column: Column, value: object, *, pad: bool = True) -> str:
    """Display text of one value; '' for a blank."""
    if is_blank(value):
        return ""
    if column.interval:
        low, high = value  # type: ignore[misc]
        parts = [fixed(v, column.decimals or 0, signed=column.signed) for v in (low, high)]
        return f"[{parts[0]}, {parts[1]}]"
    if column.numeric:
        return fixed(value, column.decimals or 0, signed=column.signed, pad=pad)  # type: ignore[arg-type]
    return str(value)


def _raw(value: object) -> str:
    """CSV text: published digits as they are, floats with every digit."""
    if is_blank(value):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(float(value))
    return str(value)


def to_csv(table: Table) -> str:
    """CSV with every digit; blanks are empty fields; an interval is two columns."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    header: list[str] = []
    for column in table.columns:
        header += [f"{column.key}_low", f"{column.key}_high"] if column.interval else [column.key]
    writer.writerow(header)
    for row in table.rows:
        fields: list[str] = []
        for column in table.columns:
            value = row.get(column.key)
            if column.interval:
                low, high = value if isinstance(value, tuple) else (None, None)
                fields += [_raw(low), _raw(high)]
            else:
                fields.append(_raw(value))
        writer.writerow(fields)
    return out.getvalue()


def _title(column: Column) -> str:
    """Header without spanning groups: 'Published loss'."""
    return f"{column.group}: {column.title}" if column.group else column.title


def _blocks(table: Table):
    """(section heading or None, [(row index, row), ...]) in order."""
    numbered = list(enumerate(table.rows))
    if table.section is None:
        yield None, numbered
        return
    for heading, rows in groupby(numbered, key=lambda pair: pair[1].get(table.section)):
        yield (str(heading) if heading else None), list(rows)


def to_markdown(table: Table) -> str:
    """GitHub-flavoured Markdown."""
    columns = table.shown
    header = [_title(column) for column in columns]
    lines: list[list[str]] = []
    for heading, rows in _blocks(table):
        if heading:
            lines.append([f"**{heading}**"] + [""] * (len(columns) - 1))
        for index, row in rows:
            texts = []
            for column in columns:
                text = cell(column, row.get(column.key)).replace("|", "\\|")
                if (index, column.key) in table.best or index in table.summary:
                    text = re.sub(
                        r"^(\S.*?)([ " + FIGURE_SPACE + PUNCTUATION_SPACE + "]*)$", r"**\1**\2", text
                    )
                texts.append(text + table.marks.get((index, column.key), ""))
            lines.append(texts)
    widths = [max(len(r[i]) for r in [header, *lines]) for i in range(len(columns))]
    widths = [max(3, width) for width in widths]
    right = [column.numeric for column in columns]

    def row_text(values: list[str]) -> str:
        padded = [v.rjust(w) if r else v.ljust(w) for v, w, r in zip(values, widths, right)]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (w + 1) + (":" if r else "-") for w, r in zip(widths, right)) + "|"
    body = [row_text(header), rule, *(row_text(line) for line in lines)]
    tail = [f"- {note}" for note in notes(table)]
    parts = [f"# {table.heading}", table.caption, "\n".join(body)] + (["\n".join(tail)] if tail else [])
    return "\n\n".join(parts) + "\n"


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
    import unicodedata

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
    for number, (heading, rows) in enumerate(_blocks(table)):
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
    """(landscape, font size) that the widest row needs, from its letters: about 4.35 pt each at 8 pt."""
    columns = table.shown
    widths = []
    for column in columns:
        texts = [cell(column, row.get(column.key)) for row in table.rows] + [column.title]
        widths.append(100 * column.width if column.width else max(map(len, texts)))
    points = 4.35 * sum(widths) + 6 * len(columns)
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


def to_html(table: Table) -> str:
    """A self-contained fragment: caption, scrolling table, notes. The report's style sheet gives it its
    looks."""
    columns, escape = table.shown, html.escape
    head = _html_head(columns)
    body: list[str] = []
    for heading, rows in _blocks(table):
        if heading:
            body.append(
                f'<tr class="section"><th scope="rowgroup" colspan="{len(columns)}">'
                f"{escape(heading)}</th></tr>"
            )
        for index, row in rows:
            cells = []
            for place, column in enumerate(columns):
                text = escape(cell(column, row.get(column.key)))
                if (index, column.key) in table.best:
                    text = f"<strong>{text}</strong>"
                mark = table.marks.get((index, column.key), "")
                if mark:
                    text += f"<sup>{escape(mark)}</sup>"
                name = "num" if column.numeric else "long" if column.width else "text"
                tag = 'th scope="row"' if place == 0 else "td"
                cells.append(f'<{tag} class="{name}">{text}</{tag.split()[0]}>')
            kind = ' class="summary"' if index in table.summary else ""
            body.append(f"<tr{kind}>{''.join(cells)}</tr>")
    foot = "".join(f"<li>{escape(note)}</li>" for note in notes(table))
    label = escape(table.title, quote=True)
    tall = " tall" if len(table.rows) > 30 else ""
    return "\n".join(
        [
            f'<section class="table" id="{table.name}">',
            f"<h3>{escape(table.heading)}</h3>",
            f"<p>{escape(table.caption)}</p>",
            f'<div class="scroll{tall}" tabindex="0" role="region" aria-label="{label}"><table>',
            f"<thead>{head}</thead>",
            "<tbody>",
            *body,
            "</tbody></table></div>",
            *([f'<ul class="notes">{foot}</ul>'] if foot else []),
            "</section>",
            "",
        ]
    )


def _html_head(columns: list[Column]) -> str:
    escape = html.escape
    grouped = any(column.group for column in columns)
    first, second = [], []
    if grouped:
        for group, members in groupby(columns, key=lambda column: column.group):
            inside = list(members)
            if group:
                first.append(
                    f'<th scope="colgroup" class="group" colspan="{len(inside)}">{escape(group)}</th>'
                )
            else:
                for column in inside:
                    kind = "num" if column.numeric else "text"
                    first.append(f'<th scope="col" rowspan="2" class="{kind}">{escape(column.title)}</th>')
    for column in columns:
        if not grouped or column.group:
            kind = "num" if column.numeric else "text"
            second.append(f'<th scope="col" class="{kind}">{escape(column.title)}</th>')
    rows = ([f"<tr>{''.join(first)}</tr>"] if grouped else []) + [f"<tr>{''.join(second)}</tr>"]
    return "".join(rows)


def finite(value: float | None) -> float | None:
    """None for a missing number, so that a cell stays blank."""
    return None if value is None or (isinstance(value, float) and not math.isfinite(value)) else value
