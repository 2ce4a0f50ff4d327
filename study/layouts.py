"""A report - sections of tables, figures and lists - as Markdown, LaTeX and one self-contained HTML page.

Cells are plain text; each layout escapes what its format would read as markup (`tracking.text`).
"""

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from tracking import text
from tracking.tables import markdown_table

EMPTY = "\N{EN DASH}"
WIDE = 9  # columns; wider LaTeX tables are scaled to the width of a line


@dataclass(frozen=True)
class Table:
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    groups: Sequence[
        tuple[str, int]
    ] = ()  # names over runs of columns, their widths adding up to the header's
    rules: Sequence[int] = ()  # a line is drawn above these rows


@dataclass(frozen=True)
class Image:
    name: str
    caption: str
    content: bytes
    kind: str = "svg+xml"


@dataclass
class Section:
    name: str
    title: str
    tables: list[Table]
    notes: Sequence[str] = ()
    missing: Sequence[str] = ()
    images: list[Image] = field(default_factory=list)


@dataclass
class Report:
    facts: list[str]  # what the runs have in common
    warnings: list[str]
    sections: list[Section]
    lists: dict[str, list[str]]  # title -> what is missing, unfinished, in no table


# --------------------------------------------------------------------------------------------------- Markdown


def markdown(report: Report) -> str:
    parts = ["# Results", *(text.markdown(fact) for fact in report.facts)]
    parts += [f"> **Warning.** {text.markdown(warning)}" for warning in report.warnings]
    for section in report.sections:
        if not section.tables and not section.notes:  # images, which the page alone shows
            continue
        parts += [f"## {text.markdown(section.title)}", markdown_section(section)]
        parts += [f"![{text.markdown(i.caption)}](figures/{i.name}.svg)" for i in section.images]
    for title, entries in report.lists.items():
        parts += [f"## {title}", "\n".join(f"- {text.markdown(entry)}" for entry in entries or ["nothing"])]
    return "\n\n".join(parts) + "\n"


def markdown_section(section: Section) -> str:
    parts = []
    for table in section.tables:
        if len(section.tables) > 1:
            parts.append(f"**{text.markdown(table.title)}**")
        parts.append(markdown_table(_flat_header(table), table.rows))
    return "\n\n".join([*parts, *map(text.markdown, section.notes)])


def _flat_header(table: Table) -> list[str]:
    """Markdown knows no cell over several columns: the name of the group is put
    before each of its columns.
    """
    spans = table.groups or [("", len(table.header))]
    names = [group for group, width in spans for _ in range(width)]
    return [
        f"{group}: {column}" if group else column for group, column in zip(names, table.header, strict=True)
    ]


# ------------------------------------------------------------------------------------------------------ LaTeX


def latex(report: Report) -> str:
    lines = [r"% \input this file; the document needs \usepackage{booktabs,graphicx}"]
    lines += [f"% {text.one_line(fact)}" for fact in report.facts]
    warnings = [f"WARNING: {warning}" for warning in report.warnings]
    for section in report.sections:
        lines += [latex_table(table, [*warnings, *section.notes]) for table in section.tables]
    return "\n".join(lines) + "\n"


def latex_table(table: Table, notes: Sequence[str] = ()) -> str:
    body = [r"\toprule"]
    if any(group for group, _ in table.groups):
        body += _latex_groups(table.groups)
    body += [_latex_row(table.header), r"\midrule"]
    for number, row in enumerate(table.rows):
        body += [r"\midrule"] if number in table.rules else []
        body.append(_latex_row(row))
    body.append(r"\bottomrule")
    opening, closing = (r"\resizebox{\linewidth}{!}{%", "}") if len(table.header) > WIDE else ("", "")
    lines = [
        *(r"\begin{table}[htbp]", r"\centering", rf"\caption{{{text.latex(table.title)}}}", opening),
        *(rf"\begin{{tabular}}{{l{'r' * (len(table.header) - 1)}}}", *body, r"\end{tabular}", closing),
        *(rf"\par\smallskip{{\footnotesize {text.latex(note)}}}" for note in notes),
        r"\end{table}",
    ]
    return "\n".join(line for line in lines if line)


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(map(text.latex, cells)) + r" \\"


def _latex_groups(groups: Sequence[tuple[str, int]]) -> list[str]:
    names, rules, column = [], [], 1
    for group, width in groups:
        names.append(rf"\multicolumn{{{width}}}{{c}}{{{text.latex(group)}}}")
        rules += [rf"\cmidrule(lr){{{column}-{column + width - 1}}}"] if group else []
        column += width
    return [" & ".join(names) + r" \\", "".join(rules)]


# ------------------------------------------------------------------------------------------------------- HTML

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; max-width: 76rem; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.25rem; margin-top: 2.6rem; border-bottom: 1px solid #d7dce1; }
nav a { margin-right: .9rem; } a { color: #0b5cad; }
.warning { background: #fdecea; border-left: 5px solid #c62828; padding: .6rem 1rem; margin: .8rem 0; white-space: pre-line; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0 .4rem; font-variant-numeric: tabular-nums; font-size: .92rem; }
caption { text-align: left; font-weight: 600; padding-bottom: .3rem; }
th, td { padding: .18rem .6rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
thead { border-top: 2px solid #1b1f24; border-bottom: 1px solid #1b1f24; } tbody { border-bottom: 2px solid #1b1f24; }
thead th.group { text-align: center; font-weight: 600; border-bottom: 1px solid #b8c0c8; }
.begin { border-left: 1px solid #d7dce1; } tr.rule td { border-top: 1px solid #1b1f24; }
tbody tr:hover { background: #f3f6f9; }
.note { color: #57606a; font-size: .88rem; margin: .2rem 0; }
figure { margin: 1.4rem 0; } figure img { max-width: 100%; height: auto; } figcaption { color: #57606a; font-size: .88rem; }
"""


def page(report: Report) -> str:
    body = ["<h1>Results</h1>", *(f"<p>{text.html(fact)}</p>" for fact in report.facts)]
    body += [
        f'<div class="warning" role="alert"><b>Warning.</b> {text.html(warning)}</div>'
        for warning in report.warnings
    ]
    links = [(section.name, section.title) for section in report.sections]
    links += [(_anchor(title), title) for title in report.lists]
    body += [
        "<nav>",
        *(f'<a href="#{text.html(name)}">{text.html(title)}</a>' for name, title in links),
        "</nav>",
    ]
    for section in report.sections:
        body.append(f'<section id="{text.html(section.name)}"><h2>{text.html(section.title)}</h2>')
        body += [
            *map(_html_table, section.tables),
            *(f'<p class="note">{text.html(n)}</p>' for n in section.notes),
        ]
        body += [*map(_html_image, section.images), "</section>"]
    for title, entries in report.lists.items():
        items = "".join(f"<li>{text.html(entry)}</li>" for entry in entries or ["nothing"])
        body.append(f'<section id="{_anchor(title)}"><h2>{text.html(title)}</h2><ul>{items}</ul></section>')
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Results</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _html_table(table: Table) -> str:
    begins, column = set(), 0  # columns where a group begins
    for _, width in table.groups:
        begins.add(column)
        column += width
    begins.discard(0)

    def cells(tag: str, row: Sequence[str]) -> str:
        opening = [f'<{tag} class="begin">' if number in begins else f"<{tag}>" for number in range(len(row))]
        return "".join(f"{start}{text.html(cell)}</{tag}>" for start, cell in zip(opening, row, strict=True))

    head = ""
    if any(group for group, _ in table.groups):
        spans = [
            f'<th class="group" colspan="{width}">{text.html(group)}</th>' for group, width in table.groups
        ]
        head = f"<tr>{''.join(spans)}</tr>"
    rows = [
        ('<tr class="rule">' if number in table.rules else "<tr>") + cells("td", row) + "</tr>"
        for number, row in enumerate(table.rows)
    ]
    return (
        f'<div class="scroll"><table><caption>{text.html(table.title)}</caption><thead>{head}'
        f"<tr>{cells('th', table.header)}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _html_image(image: Image) -> str:
    # As an image and not inline: nothing in it can run, and the names inside it do not meet those of another.
    data = base64.b64encode(image.content).decode()
    caption = text.html(image.caption)
    source = f"data:image/{image.kind};base64,{data}"
    return f'<figure><img src="{source}" alt="{caption}"><figcaption>{caption}</figcaption></figure>'


def _anchor(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower())
