"""`lnb report`: figures, a table and a page of the runs in a folder."""

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

from ..folder import make_folder
from ..records import find_runs
from .figures import Look, curves_figure, search_figure
from .page import Section, page
from .setting import setting
from .table import NOTES, escape_markdown, table
from .variants import Variant, variants


def report(folder: Path, out: Path | None = None) -> Path:
    """Reports on all runs in a folder and below it, finished or not.

    Args:
      folder: where the runs are.
      out: where to write `index.html`, `results.md` and its figures; by default, `folder/report`.

    Returns:
      The path of `index.html`, which needs none of the other files.
    """
    records = find_runs(folder)
    out = Path(folder) / "report" if out is None else Path(out)
    make_folder(out)
    look = Look([record.config["optimizer"] for record in records])
    sections = []
    for variant in variants(records):
        files = _figures(variant, look)
        for name, png in files.items():
            (out / name).write_bytes(png)
        sections.append(Section(variant, files))
    (out / "results.md").write_text(_markdown(sections), encoding="utf-8")
    (out / "index.html").write_text(page(sections), encoding="utf-8")
    return out / "index.html"


def _figures(variant: Variant, look: Look) -> Mapping[str, bytes]:
    """PNGs by file name."""
    figures = {}
    if variant.runs:
        figures[f"{variant.slug}.png"] = curves_figure(variant, look)
    if variant.trials:
        figures[f"{variant.slug}-trials.png"] = search_figure(variant, look)
    files = {}
    for name, figure in figures.items():
        buffer = BytesIO()
        figure.savefig(buffer, format="png", dpi=150)
        files[name] = buffer.getvalue()
    return files


def _markdown(sections: list[Section]) -> str:
    parts = ["# Results"]
    for variant, files in sections:
        parts += [f"## {escape_markdown(variant.title)}", escape_markdown(setting(variant))]
        parts.append(table(variant).markdown())
        parts += [f"![{name.removesuffix('.png')}]({name})" for name in files]
    parts += ["## How to read the tables", "\n".join(f"- {note}" for note in NOTES)]
    return "\n\n".join(parts) + "\n"
