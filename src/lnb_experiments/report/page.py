"""The report as one HTML file that needs no other."""

import base64
import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from ..records import Record
from .setting import setting
from .table import NOTES, Table, table
from .variants import Variant


class Section(NamedTuple):
    """A variant with its figures: PNGs by title."""

    variant: Variant
    figures: Mapping[str, bytes]


STYLE = """
:root { color-scheme: light dark; --text: #1c1e21; --page: #fff; --soft: #5c6370;
  --line: #d9dce1; --shade: #f5f6f8; --link: #0b57a4 }
@media (prefers-color-scheme: dark) { :root { --text: #e4e6ea; --page: #16181c;
  --soft: #a2a8b3; --line: #363a42; --shade: #1f2228; --link: #8ab8ee } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1rem clamp(1rem, 4vw, 3rem) 4rem; max-width: 86rem;
  font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page) }
h1 { font-size: 1.7rem; margin: 1rem 0 .5rem }
h2 { font-size: 1.3rem; margin: 3rem 0 .3rem; padding-top: .8rem;
  border-top: 1px solid var(--line) }
a { color: var(--link) }
.setting, .notes { color: var(--soft); font-size: .88rem; overflow-wrap: anywhere }
.wide { overflow-x: auto; margin: 1rem 0 }
.figure { background: #fff; border-radius: 6px; border: 1px solid var(--line) }
.figure img { display: block; width: 100%; min-width: 44rem; height: auto }
table { border-collapse: collapse; width: 100%; font-size: .82rem;
  font-variant-numeric: tabular-nums }
th, td { padding: .4rem .5rem; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); background: var(--page) }
small { display: block; min-width: 5rem; color: var(--soft) }
thead th { background: var(--shade); vertical-align: bottom }
tbody th, thead th:first-child { position: sticky; left: 0; white-space: nowrap }
details { margin: .6rem 0; font-size: .9rem }
summary { cursor: pointer }
pre { overflow-x: auto; padding: .8rem; background: var(--shade); border-radius: 6px;
  font-size: .8rem }
"""


def page(sections: Sequence[Section]) -> str:
    """The whole page."""
    links = "".join(
        f'<li><a href="#{escape(section.variant.slug)}">{escape(section.variant.title)}</a></li>\n'
        for section in sections
    )
    contents = f"<nav><ul>\n{links}</ul></nav>\n" if len(sections) > 1 else ""
    notes = "".join(f"<li>{escape(note)}</li>\n" for note in NOTES)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Results</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>Results</h1>\n"
        f"{contents}{''.join(map(_section, sections))}"
        f'<h2>How to read the tables</h2>\n<ul class="notes">\n{notes}</ul>\n</body>\n</html>\n'
    )


def _section(section: Section) -> str:
    variant = section.variant
    images = "".join(_image(*item) for item in section.figures.items())
    return (
        f'<section>\n<h2 id="{escape(variant.slug)}">{escape(variant.title)}</h2>\n'
        f'<p class="setting">{escape(setting(variant))}</p>\n'
        f"{_table(table(variant))}{images}{_details(variant)}</section>\n"
    )


def _image(title: str, png: bytes) -> str:
    data = base64.b64encode(png).decode("ascii")
    image = f'<img alt="{escape(title)}" src="data:image/png;base64,{data}">'
    return f'<div class="wide figure">{image}</div>\n'


def _table(content: Table) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in content.columns)
    rows = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{_cell(cell)}</td>" for cell in row[1:])
        + "</tr>\n"
        for row in content.rows
    )
    return (
        f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}</tbody>\n</table></div>\n"
    )


def _cell(text: str) -> str:
    """What a cell says in brackets goes on a line of its own."""
    number, bracket, rest = text.partition(" (")
    return escape(number) + (f" <small>{escape(bracket.strip() + rest)}</small>" if rest else "")


def _details(variant: Variant) -> str:
    records = variant.runs + variant.trials
    configurations = [
        {"folder": record.folder.name, **record.config, "result": record.result}
        for record in records
    ]
    return _disclose("Environment", _distinct(records)) + _disclose(
        f"Configurations and results of all {len(records)} runs", configurations
    )


def _distinct(records: Sequence[Record]) -> list[Any]:
    """The environments, each once."""
    return list(
        {json.dumps(r.environment, sort_keys=True): r.environment for r in records}.values()
    )


def _disclose(title: str, content: Sequence[Any]) -> str:
    lines = "\n".join(json.dumps(item) for item in content)
    return f"<details><summary>{escape(title)}</summary>\n<pre>{escape(lines)}</pre>\n</details>\n"
