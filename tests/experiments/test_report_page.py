"""The pages of a report: well-formed, self-contained, the same numbers in each."""

import json
import re
import shutil
import subprocess
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from written_runs import make_run, make_trials

from lnb_experiments.records import find_runs
from lnb_experiments.report import report
from lnb_experiments.report.table import escape_markdown, table
from lnb_experiments.report.variants import variants


class Checker(HTMLParser):
    """Balances tags, and collects what the page refers to and says in its tables."""

    def __init__(self):
        super().__init__()
        self.open, self.references, self.cells = [], [], []

    def handle_starttag(self, tag, attrs):
        self.references += [(tag, value) for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            self.cells[-1] += data


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A report of two variants with names that would break an unescaped page."""
    folder = tmp_path_factory.mktemp("runs")
    make_trials(folder / "trials", "lnb", {0.01: 0.05, 0.03: 0.2, 0.1: None})
    for seed in (1, 2):
        make_run(folder / f"l{seed}", optimizer="lnb", seed=seed, role="final", note="<b>5 & 6")
        make_run(folder / f"x{seed}", optimizer="<i>|x", seed=seed, role="final")
    make_run(folder / "inverted", inverted=True)
    return report(folder)


def test_page_is_whole_and_needs_nothing_else(whole):
    text = whole.read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert {tag for tag, _ in checker.references} == {"a", "img"}
    assert all(value.startswith(("#", "data:image/png;base64,")) for _, value in checker.references)
    assert not re.search(r"url\(|@import|https?:", text)
    assert "<b>5" not in text
    assert "<i>|x" in checker.cells
    content = [table(variant) for variant in variants(find_runs(whole.parents[1]))]
    expected = [cell for one in content for row in (one.columns, *one.rows) for cell in row]
    assert checker.cells == expected


def test_markdown_has_the_same_rows_and_links_figures(whole):
    text = (whole.parent / "results.md").read_text(encoding="utf-8")
    for variant in variants(find_runs(whole.parents[1])):
        for row in table(variant).rows:
            assert f"| {' | '.join(map(escape_markdown, row))} |" in text
    links = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert sorted(links) == sorted(file.name for file in whole.parent.glob("*.png"))
    assert links == [
        "mnist-not-inverted.png",
        "mnist-not-inverted-trials.png",
        "mnist-inverted.png",
    ]
    assert "preset laptop; 40 steps of 50 examples; real data (\\<b>5 & 6)" in text


def test_files_are_the_same_again(whole, tmp_path):
    first = {file.name: file.read_bytes() for file in whole.parent.iterdir()}
    report(whole.parents[1], tmp_path / "again")
    assert {file.name: file.read_bytes() for file in (tmp_path / "again").iterdir()} == first


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_page_fits_a_phone(whole, tmp_path):
    """Nothing but tables and figures scrolls sideways, and the figures are there."""
    frame = escape(whole.read_text(encoding="utf-8"))
    script = (
        "const page = document.querySelector('iframe').contentDocument;"
        "const images = [...page.images].map(image => image.naturalWidth);"
        "document.body.textContent = JSON.stringify([page.documentElement.scrollWidth, ...images])"
    )
    (tmp_path / "phone.html").write_text(
        f'<body><iframe width="400" height="800" srcdoc="{frame}"></iframe>'
        f"<script>window.onload = () => {{ {script} }}</script></body>",
        encoding="utf-8",
    )
    options = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --dump-dom"
    quiet = "--disable-background-networking --disable-component-update --disable-sync"
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command = [str(CHROMIUM), *options.split(), *quiet.split(), profile]
    command.append((tmp_path / "phone.html").as_uri())
    dump = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    found = re.search(r"\[[\d,]+\]", dump)
    assert found, dump[:500]
    width, *images = json.loads(found[0])
    assert width <= 400
    assert images == [1500, 1500, 1500]
