"""What is written out: HTML, CSV, terminal."""

from __future__ import annotations

import csv
import html
import io
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report_samples import ARMS, COMMAND, failed_launch, kept, launch, manifest, tuning
from rich.console import Console

from surespec.core import EXIT_CODES, Acceptance, Launch
from surespec.errors import BundleError
from surespec.report import build_view, print_terminal, render_csv, render_html, terminal, write_report
from surespec.store import Bundle

VOID = {"meta", "link", "br", "hr", "img", "input", "path", "use", "rect"}


class Page(HTMLParser):
    """Checks that tags nest, and keeps what the tests ask for."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == [], f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in {"src", "href", "srcset", "action", "data", "poster"}:
                self.links.append(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" not in self.open and "style" not in self.open:
            self.text += data


def full_page() -> str:
    return render_html(build_view(kept(), tuning(), manifest=manifest(), arms=ARMS))


def test_the_page_is_whole_and_offline() -> None:
    text = full_page()
    page = Page(text)
    assert "https://" not in text and "http://" not in text
    assert all(link.startswith("#") for link in page.links)
    assert "@import" not in text and not re.search(r"url\((?!#)", text)
    assert len(page.ids) == len(set(page.ids)), "ids must be unique in a page"
    assert COMMAND in page.text
    assert "Keep eagle3-k3" in page.text
    assert text.count("<svg") == 5
    assert "sk-very-secret" not in text
    assert "the answer of the model" not in text, "outputs of the model stay in the bundle"


def test_reading_order() -> None:
    text = Page(full_page()).text
    parts = ("Keep eagle3-k3", COMMAND, "95 % interval", "Speed-up by kind", "draft is accepted", "against concurrency",
             "Launches in time", "Everything that was tried", "output unchanged", "Assumptions", "words mean",
             "Machine and versions", "reproduce this")  # fmt: skip
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


def test_the_same_view_gives_the_same_bytes() -> None:
    assert full_page() == full_page()


def test_plots_follow_the_page_colours() -> None:
    text = full_page()
    assert "#0a0b0" not in text, "a place-holder colour was left in"
    assert "var(--accent)" in text and "prefers-color-scheme: dark" in text


ANY_DATA = ("none", "failed", "baseline only", "no traces", "one concurrency")


@pytest.mark.parametrize(
    ("verdict", "launches"),
    [(verdict, "all") for verdict in EXIT_CODES] + [("inconclusive", data) for data in ANY_DATA],
)
def test_every_verdict_with_any_data(verdict: str, launches: str) -> None:
    chosen = {
        "all": tuning(),
        "none": (),
        "failed": (failed_launch(0, "baseline", 0, "no memory."), failed_launch(1, "eagle3-k3", 9, "")),
        "baseline only": (launch(0, "baseline", 0, {1: 50.0, 8: 200.0}),),
        "no traces": tuning(with_traces=False),
        "one concurrency": (launch(0, "baseline", 0, {1: 50.0}), launch(1, "ngram-k5", 30, {1: 40.0})),
    }[launches]
    update = {"verdict": verdict} | ({} if launches == "all" else {"ratios": {}, "arm": None, "command": ""})
    judgement = kept().model_copy(update=update)
    view = build_view(judgement, chosen)
    page = Page(render_html(view))
    assert view.badge in page.text and view.headline in page.text and judgement.why in page.text
    out = io.StringIO()
    print_terminal(view, Console(file=out, width=80))
    assert view.badge in out.getvalue()


def test_an_unfinished_bundle_gives_a_page() -> None:
    page = Page(render_html(build_view(None, tuning(), manifest=manifest(), arms=ARMS)))
    assert "No verdict yet" in page.text and "There is no command" in page.text


def test_an_arm_whose_drafts_were_never_accepted() -> None:
    nothing = Acceptance(drafts=9, drafted=27, accepted=0, accepted_per_position=(0, 0, 0))
    launches = [
        item.model_copy(update={"runs": tuple(r.model_copy(update={"acceptance": nothing}) for r in item.runs)})
        for item in tuning()
        if item.arm == "eagle3-k3"
    ]
    assert "0.00" in Page(render_html(build_view(kept(), launches, arms=ARMS))).text


@pytest.mark.filterwarnings("error")
def test_categories_in_any_script() -> None:
    launches = [
        item.model_copy(
            update={
                "runs": tuple(
                    r.model_copy(update={"traces": tuple(t.model_copy(update={"category": "摘要"}) for t in r.traces)})
                    for r in item.runs
                )
            }
        )
        for item in tuning()
    ]
    assert "摘要" in Page(render_html(build_view(kept(), launches, arms=ARMS))).text


NASTY = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=40) | st.sampled_from(
    ["<script>alert(1)</script>", '"><img src=x onerror=y>', "{{ 7*7 }}", "$\\frac{a}{b}$", "a & b", "]]>", "&lt;"]
)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(name=NASTY, words=NASTY)
def test_texts_are_shown_as_they_are_and_never_run(name: str, words: str) -> None:
    judgement = kept().model_copy(update={"arm": name, "why": words, "command": words, "warnings": (words,)})
    launches = [
        item.model_copy(update={"arm": name if item.arm == "eagle3-k3" else item.arm, "failure": words})
        for item in tuning(with_traces=False)
    ]
    text = render_html(build_view(judgement, launches))
    page = Page(text)
    assert page.links == [link for link in page.links if link.startswith("#")]
    assert text.count("<script") == 1 and "<img" not in text
    assert words in page.text or html.unescape(words) != words


@pytest.mark.parametrize("text", ["=HYPERLINK(1)", "+1", "-1", "@x", "\t=1"])
def test_no_cell_of_the_csv_is_a_formula(text: str) -> None:
    launch = Launch(index=0, arm="baseline", status="failed", started_at="x", failure=text)
    line = next(csv.DictReader(io.StringIO(render_csv((launch,)))))
    assert line["failure"] == f"'{text}"


def test_csv_has_one_line_a_run_and_shows_failures() -> None:
    lines = list(csv.DictReader(io.StringIO(render_csv(tuning()))))
    assert len(lines) == 5 * 2 + 1
    first = lines[0]
    assert (first["launch"], first["arm"], first["concurrency"], first["throughput_tok_s"]) == (
        "0",
        "baseline",
        "1",
        "50.0",
    )
    assert first["acceptance_length"] == ""
    (lost,) = [line for line in lines if line["status"] == "failed"]
    assert lost["arm"] == "draft-k2" and lost["throughput_tok_s"] == "" and "vocabulary" in lost["failure"]
    eagle = next(line for line in lines if line["arm"] == "eagle3-k3")
    assert eagle["acceptance_per_position"] == "0.6000 0.3300 0.1800"


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_command_is_one_unbroken_line_at_the_left_margin(width: int) -> None:
    out = io.StringIO()
    print_terminal(kept(), Console(file=out, width=width))
    lines = out.getvalue().splitlines()
    assert COMMAND in lines
    others = [line for line in lines if line != COMMAND]
    assert max(map(len, others)) <= width


def test_a_console_that_crops_loses_nothing_of_the_command() -> None:
    out = io.StringIO()
    Console(file=out, width=40).print(terminal(kept()))
    assert COMMAND.replace(" ", "") in re.sub(r"\s", "", out.getvalue())


def test_the_terminal_does_not_read_names_as_markup() -> None:
    out = io.StringIO()
    judgement = kept().model_copy(update={"why": "[bold]x[/bold] [/nonsense]", "warnings": ("[red]y",)})
    Console(file=out, width=100).print(terminal(judgement))
    assert "[bold]x[/bold] [/nonsense]" in out.getvalue() and "[red]y" in out.getvalue()


def test_matplotlib_is_imported_only_for_plots() -> None:
    code = "import sys, surespec.report; print([m for m in ('matplotlib', 'jinja2', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def written_bundle(folder: Path) -> Bundle:
    bundle = Bundle.create(folder, manifest())
    bundle.write_arms(ARMS, {"suffix-k8": "predicted 1.02×"})
    for item in tuning():
        bundle.write_launch(item)
    return bundle


def test_write_report_from_a_bundle(tmp_path: Path) -> None:
    bundle = written_bundle(tmp_path / "run")
    bundle.write_judgement(kept())
    page = write_report(bundle.path)
    assert page == bundle.path / "report.html"
    text = Page(page.read_text(encoding="utf-8")).text
    assert "Keep eagle3-k3" in text and COMMAND in text and "predicted 1.02×" in text and "2.90×" in text
    assert len((bundle.path / "report.csv").read_text().splitlines()) == 1 + 5 * 2 + 1
    first = page.read_bytes()
    assert write_report(bundle.path).read_bytes() == first


def test_a_bundle_cut_off_half_way_gives_a_report_that_says_so(tmp_path: Path) -> None:
    bundle = written_bundle(tmp_path / "run")
    (bundle.launch_dir(5, "baseline") / "launch.json").unlink()
    text = Page(write_report(bundle.path).read_text(encoding="utf-8")).text
    assert "No verdict yet" in text and "Launch 005-baseline was cut off" in text


def test_no_bundle_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="holds no run"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []
