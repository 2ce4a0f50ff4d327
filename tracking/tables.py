"""Results as text for the terminal."""

import re
from collections.abc import Iterable, Mapping, Sequence

from tracking import text

NUMBER = re.compile(r"[+-]?\d|n < ")  # "n < 3" stands for the p value of a test


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:z.1f}"  # z: never -0.0


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """First column left-aligned, the others right-aligned, a rule under the header."""
    header, *rows = [[text.printable(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(
            [cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]
        )

    return "\n".join([line(header), "  ".join("-" * w for w in widths), *(line(row) for row in rows)])


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the same cells as Markdown; the bars that set groups apart in the terminal are left out."""
    escaped = [[text.markdown(cell.removeprefix("| ")) for cell in row] for row in (header, *rows)]
    columns = list(zip(*escaped[1:], strict=True)) or [()] * len(header)
    rules = ["---", *("---" if _are_words(cells) else "--:" for cells in columns[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in (escaped[0], rules, *escaped[1:]))


def _are_words(cells: Sequence[str]) -> bool:
    """Is it a column that reads from the left: no number in it, but something else than dashes?"""
    return any(map(str.isalpha, "".join(cells))) and not any(NUMBER.match(cell) for cell in cells)


def step_table(results: Sequence[dict], groups: dict[str, str]) -> str:
    """mIoU after each step in both conventions, the background's IoU, forgetting, transfer, further metrics:
    `results` as in results.json.
    """
    further = metrics_in(results)
    header = [
        "step",
        groups["old"],
        groups["new"],
        "all",
        "| bg",
        "| with bg: old",
        "new",
        "all",
        "| forgetting",
        "transfer",
        "average",
        *metric_columns(further),
    ]
    rows = []
    for result in results:
        plain, background = result["miou"], result["miou_with_background"]
        rows.append(
            [str(result["step"])]
            + [percent(plain[k]) for k in ("old", "new", "all")]
            + [percent(background_iou(result))]
            + [percent(background[k]) for k in ("old", "new", "all")]
            + [
                percent(result["mean_forgetting"]),
                percent(result["backward_transfer"]),
                percent(result["average"]["miou"]),
            ]
            + [percent(result.get("metrics", {}).get(name)) for name in further]
        )
    return format_table(header, rows)


def background_iou(result: Mapping) -> float | None:
    """Return the background's own IoU after a step; it is the first class."""
    return result["iou"].get(result["classes"][0])


def metrics_in(results: Iterable[Mapping]) -> list[str]:
    """Return the names of the registered metrics that some of the steps have: older ones have none."""
    return list(dict.fromkeys(name for result in results for name in result.get("metrics", {})))


def metric_columns(names: Sequence[str]) -> list[str]:
    """Their headers, set apart from the columns before."""
    return [f"| {name}" if name == names[0] else name for name in names]


def class_table(results: Sequence[dict]) -> str:
    """IoU per class (rows) after each step (columns), and what was forgotten of each by the last."""
    last = results[-1]
    header = ["IoU", *(f"step {r['step']}" for r in results), "forgotten"]
    rows = [
        [name, *(percent(r["iou"].get(name)) for r in results), percent(last["forgetting"].get(name))]
        for name in last["classes"]
    ]
    return format_table(header, rows)
