"""A report as one HTML page that loads nothing: tables that scroll by themselves, figures,
and filters by method and seed.

The filters only hide rows, by the attributes data-method and data-seed that rows have (`study.layouts.Row`).
Without JavaScript they are not shown, and the page is whole.
"""

import base64
import re
from collections.abc import Sequence

from study.layouts import Image, Report, Section, Table, as_row
from tracking import text

LONG = 40  # characters of a cell that is broken into lines
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; max-width: 76rem; margin: 2rem auto; padding: 0 1.2rem;
  overflow-wrap: anywhere; }
[hidden] { display: none !important; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.25rem; margin-top: 2.6rem; border-bottom: 1px solid #d7dce1; }
nav a { margin-right: .9rem; } a { color: #0b5cad; }
.warning { background: #fdecea; border-left: 5px solid #c62828; padding: .6rem 1rem; margin: .8rem 0; white-space: pre-line; }
form { margin-top: 1.2rem; padding: .5rem .8rem; background: #f3f6f9; font-size: .92rem; }
form details { margin-bottom: .3rem; } summary { cursor: pointer; }
.choices { display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; padding: .3rem 0; }
.scroll { overflow-x: auto; overflow-wrap: normal; }
table { border-collapse: separate; border-spacing: 0; margin: 1rem 0 .4rem; border-bottom: 2px solid #1b1f24;
  font-variant-numeric: tabular-nums; font-size: .92rem; --name: min(.88 * var(--longest), var(--widest)); --widest: 26rem; }
caption { text-align: left; font-weight: 600; padding-bottom: .3rem; }
caption span { position: sticky; left: 0; display: inline-block; max-width: min(73.6rem, 100vw - 2.4rem); }
th, td { padding: 3px 9px; line-height: 22px; text-align: right; vertical-align: baseline; white-space: nowrap; }
thead th { vertical-align: bottom; border-bottom: 1px solid #1b1f24; } thead tr:first-child th { border-top: 2px solid #1b1f24; }
th[colspan] { text-align: left; border-bottom-color: #b8c0c8; }
th[colspan] span { position: sticky; left: calc(var(--name) + 27px); }
.long { white-space: normal; min-width: 18rem; text-align: left; }
thead tr:first-child th:first-child, td:first-child { text-align: left; position: sticky; left: 0; z-index: 1;
  background: #fff; white-space: normal; min-width: var(--name); }
.begin { border-left: 1px solid #d7dce1; } tr.rule td { border-top: 1px solid #1b1f24; }
tbody tr:hover td { background: #f3f6f9; }
#runs th, #runs td { text-align: left; }
.note { color: #57606a; font-size: .88rem; margin: .2rem 0; }
figure { margin: 1.4rem 0; } figure img { max-width: 100%; height: auto; } figcaption { color: #57606a; font-size: .88rem; }
@media (max-width: 40rem) { table { --widest: 8.5rem; } }
"""

# The part of the address after # says what is chosen, so that a link can: #method=MiB&method=AlterSGD&seed=1
_SCRIPT = """
const form = document.getElementById("filter");
const rows = [...document.querySelectorAll("tr[data-method]")];
const boxes = new Set(rows.map(row => row.closest(".scroll")));

function chosen() {
  const choice = new URLSearchParams(new FormData(form));
  if (!choice.get("seed")) choice.delete("seed");
  return choice;
}

function show() {
  const methods = chosen().getAll("method"), seed = chosen().get("seed");
  for (const row of rows) {
    const otherMethod = methods.length && !methods.includes(row.dataset.method);
    const otherSeed = seed && row.dataset.seed && row.dataset.seed !== seed;
    row.hidden = otherMethod || otherSeed;
  }
  for (const box of boxes) box.hidden = !box.querySelector("tbody tr:not([hidden])");
  form.elements.methods.value = methods.join(", ") || "all";
}

function read() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  if (wanted.has("method") || wanted.has("seed")) {  // else it is the anchor of a section
    const methods = wanted.getAll("method");
    for (const box of form.querySelectorAll("input")) box.checked = methods.includes(box.value);
    form.elements.seed.value = wanted.get("seed") || "";
  }
  show();
}

function change() {
  history.replaceState(null, "", "#" + chosen());
  show();
}

form.addEventListener("change", change);
form.addEventListener("reset", () => setTimeout(change));  // the event comes before the fields are reset
addEventListener("hashchange", read);
form.hidden = false;
read();
"""


def page(report: Report) -> str:
    body = ["<h1>Results</h1>", *(f"<p>{text.html(fact)}</p>" for fact in report.facts)]
    body += [
        f'<div class="warning" role="alert"><b>Warning.</b> {text.html(warning)}</div>'
        for warning in report.warnings
    ]
    links = [(section.name, section.title) for section in report.sections]
    links += [(_anchor(title), title) for title in (*report.lists, "Runs")]
    body += [
        "<nav>",
        *(f'<a href="#{text.html(name)}">{text.html(title)}</a>' for name, title in links),
        "</nav>",
        _filters(report.runs),
        *map(_section, report.sections),
    ]
    for title, entries in report.lists.items():
        items = "".join(f"<li>{text.html(entry)}</li>" for entry in entries or ["nothing"])
        body.append(f'<section id="{_anchor(title)}"><h2>{text.html(title)}</h2><ul>{items}</ul></section>')
    body += [_section(Section("runs", "Runs", [report.runs])), f"<script>{_SCRIPT}</script>"]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Results</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _filters(runs: Table) -> str:
    """Return the controls, with every method and seed that ran; the script shows them."""
    rows = [as_row(row) for row in runs.rows]
    methods = map(text.html, dict.fromkeys(row.method for row in rows))
    boxes = [f'<label><input type="checkbox" name="method" value="{m}"> {m}</label>' for m in methods]
    seeds = [
        f"<option>{seed}</option>" for seed in sorted({row.seed for row in rows if row.seed is not None})
    ]
    return (
        '<form id="filter" hidden><details><summary>Methods: <output name="methods">all</output></summary>'
        f'<div class="choices">{"".join(boxes)}</div></details>'
        f'<label>Seed: <select name="seed"><option value="">all</option>{"".join(seeds)}</select></label> '
        '<button type="reset">Show all</button>'
        '<p class="note">Methods choose rows of tables, a seed rows of single runs: tables of means are over '
        "all seeds. Figures show everything.</p></form>"
    )


def _section(section: Section) -> str:
    parts = [
        f'<section id="{text.html(section.name)}"><h2>{text.html(section.title)}</h2>',
        *map(_table, section.tables),
        *(f'<p class="note">{text.html(note)}</p>' for note in section.notes),
        *map(_image, section.images),
        "</section>",
    ]
    return "\n".join(parts)


def _table(table: Table) -> str:
    classes = _classes(table)
    rows = []
    for number, row in enumerate(map(as_row, table.rows)):
        attributes = ' class="rule"' if table.has_rule(number) else ""
        attributes += f' data-method="{text.html(row.method)}"' if row.method else ""
        attributes += f' data-seed="{row.seed}"' if row.seed is not None else ""
        cells = (f"<td{of}>{text.html(cell)}</td>" for of, cell in zip(classes, row, strict=True))
        rows.append(f"<tr{attributes}>{''.join(cells)}</tr>")
    longest = max(len(row[0]) for row in (table.header, *table.rows))
    return (
        f'<div class="scroll"><table style="--longest: {longest}ch"><caption><span>{text.html(table.title)}'
        f"</span></caption><thead>{_head(table, classes)}</thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _head(table: Table, classes: Sequence[str]) -> str:
    """Return the names of groups above those of their columns; a column without a group has both lines."""
    titles = list(map(text.html, table.header))
    if not any(group for group, _ in table.groups):
        return (
            f"<tr>{''.join(f'<th{of}>{title}</th>' for of, title in zip(classes, titles, strict=True))}</tr>"
        )
    upper, lower, column = [], [], 0
    for group, width in table.groups:
        columns = range(column, column + width)
        if group:
            name = f"<span>{text.html(group)}</span>"
            upper.append(f'<th{classes[column]} colspan="{width}">{name}</th>')
            lower += [f"<th{classes[c]}>{titles[c]}</th>" for c in columns]
        else:
            upper += [f'<th{classes[c]} rowspan="2">{titles[c]}</th>' for c in columns]
        column += width
    return f"<tr>{''.join(upper)}</tr><tr>{''.join(lower)}</tr>"


def _classes(table: Table) -> list[str]:
    """Return an attribute for the cells of each column: does a group begin with it, is it of sentences?"""
    widths = [width for _, width in table.groups]
    begins = {sum(widths[:number]) for number in range(1, len(widths))}
    found = []
    for column in range(len(table.header)):
        sentences = column > 0 and max(len(row[column]) for row in table.rows) > LONG
        names = [*(["begin"] if column in begins else []), *(["long"] if sentences else [])]
        found.append(f' class="{" ".join(names)}"' if names else "")
    return found


def _image(image: Image) -> str:
    # As an image and not inline: nothing in it can run, and the names inside it do not meet those of another.
    data = base64.b64encode(image.content).decode()
    caption = text.html(image.caption)
    source = f"data:image/{image.kind};base64,{data}"
    return f'<figure><img src="{source}" alt="{caption}"><figcaption>{caption}</figcaption></figure>'


def _anchor(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower())
