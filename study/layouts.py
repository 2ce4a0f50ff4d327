"""A report - sections of tables, figures and lists - and its layouts in Markdown and LaTeX;
that in HTML is in study/page.py.

Cells are plain text; each layout escapes what its format would read as markup (`tracking.text`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tracking import text
from tracking.tables import markdown_table

EMPTY = "\N{EN DASH}"
WIDE = 9  # columns; wider LaTeX tables are scaled to the width of a line


class Row(list[str]):
    """The cells of a row, with what the page's filters go by. A plain list is shown whatever they say."""

    def __init__(self, cells: Iterable[str], method: str = "", seed: int | None = None) -> None:
        super().__init__(cells)
        self.method = method
        self.seed = seed  # of a row that is a single run

    def without_last(self, count: int) -> "Row":
        return Row(self[:-count], self.method, self.seed)


def as_row(cells: Sequence[str]) -> Row:
    return cells if isinstance(cells, Row) else Row(cells)


@dataclass(frozen=True)
class Table:
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    groups: Sequence[
        tuple[str, int]
    ] = ()  # names over runs of columns, their widths adding up to the header's
    rules: Sequence[int] = ()  # a line is drawn above these rows, but the first, which the header's is above

    def has_rule(self, number: int) -> bool:
        return number > 0 and number in self.rules


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
    names_tables: bool = field(init=False)  # one that is left of several still says what it shows

    def __post_init__(self) -> None:
        """Tables without a row are left out, and with the last of them the notes, which speak of them."""
        self.names_tables = len(self.tables) > 1
        filled = [table for table in self.tables if table.rows]
        if self.tables and not filled:
            self.notes = ()
        self.tables = filled


@dataclass
class Report:
    facts: list[str]  # what the runs have in common
    warnings: list[str]
    sections: list[Section]
    lists: dict[str, list[str]]  # title -> what is missing or unfinished
    runs: Table  # a row for each run that is in the tables


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
    parts += ["## Runs", markdown_table(report.runs.header, report.runs.rows)]
    return "\n\n".join(parts) + "\n"


def markdown_section(section: Section) -> str:
    parts = []
    for table in section.tables:
        if section.names_tables:
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
        body += [r"\midrule"] if table.has_rule(number) else []
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
