"""Text that somebody else wrote - names of classes, runs and files - made safe for each medium that shows it.

A name is text wherever it stands: nothing in it is markup, a command, a formula or the end of a line. One
function for each medium, and none that trusts its input: checkpoints may hold names that no file of classes
would be allowed today.
"""

import html as _html
import re

LONGEST_DRAWN = 60  # characters of a name in a figure


def printable(text: str) -> str:
    """Return the text for a line in a terminal or a name in a tracker.

    What is not printable (escape codes, line breaks) becomes its escape sequence.
    """
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def drawn(text: str) -> str:
    """Return the text for a figure, by Pillow or by matplotlib with `parse_math` off:
    one line of bounded length.
    """
    text = printable(text)
    return text if len(text) <= LONGEST_DRAWN else text[: LONGEST_DRAWN - 1] + "…"


def html(text: str) -> str:
    """Return the text for an HTML page or the value of an attribute; lines stay lines."""
    return _html.escape("\n".join(map(printable, text.split("\n"))))


def markdown(text: str) -> str:
    """Return the text for a paragraph, a list or a table of Markdown.

    It is escaped where Markdown would see HTML or markup, and stays as legible as before elsewhere.
    """
    text = re.sub(r"&(?=#?\w+;)", "&amp;", one_line(text))
    text = re.sub(r"<(?=[\w/!?])", "&lt;", text)
    text = re.sub(r"([|*`\\\[\]$~])", r"\\\1", text)
    text = re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)  # inside a word it is no emphasis
    return re.sub(r"^([#>+-])(?=\s)", r"\\\1", text)


# fmt: off
_LATEX = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': "''",
    "[": "{[}", "]": "{]}", "*": "{*}",  # else options of the line break before them
    "\N{EN DASH}": "--", "±": r"$\pm$", "≈": r"$\approx$",
    "λ": r"$\lambda$", "λ_a": r"$\lambda_a$", "λ_b": r"$\lambda_b$",
}
# fmt: on
_LATEX_TOKEN = re.compile("|".join(re.escape(token) for token in sorted(_LATEX, key=len, reverse=True)))


def latex(text: str) -> str:
    """Return the text for a LaTeX document."""
    escaped = _LATEX_TOKEN.sub(lambda found: _LATEX[found[0]], one_line(text))
    return re.sub(r"(?<![\w.\-])-(?=\d)", "$-$", escaped)  # a minus, not a hyphen


def one_line(text: str) -> str:
    """Return the text for a comment of a LaTeX file, and wherever a line break would end something."""
    return printable(" ".join(text.split()))
