"""Render a Table as CSV (every digit), Markdown, LaTeX (booktabs) and an HTML fragment, all with aligned
decimals."""

from __future__ import annotations

import csv
import html
import io
import re
from itertools import groupby

from figures.numbers import FIGURE_SPACE, PUNCTUATION_SPACE
from figures.tables.latex import to_latex
from figures.tables.model import Column, Table, blocks, cell, is_blank, notes

FORMATS = ("csv", "md", "tex", "html")


def render(table: Table, kind: str) -> str:
    """Text of ``table`` as 'csv', 'md', 'tex' or 'html'."""
    return {"csv": to_csv, "md": to_markdown, "tex": to_latex, "html": to_html}[kind](table)


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


def to_markdown(table: Table) -> str:
    """GitHub-flavoured Markdown."""
    columns = table.shown
    header = [_title(column) for column in columns]
    lines: list[list[str]] = []
    for heading, rows in blocks(table):
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


def to_html(table: Table) -> str:
    """A self-contained fragment: caption, scrolling table, notes. The report's style sheet gives it its
    looks."""
    columns, escape = table.shown, html.escape
    short = max((len(cell(columns[0], row.get(columns[0].key))) for row in table.rows), default=0) <= 16
    head = _html_head(columns)
    body: list[str] = []
    for heading, rows in blocks(table):
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
                name += " short" if place == 0 and short else ""
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
