"""The built documentation: no link leads nowhere, nothing is wider than a phone."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import browser
import pytest
from helpers import REPOSITORY

pytestmark = pytest.mark.program

PHONE = 390
# The template's own page for a wrong address: its links begin at a server's root.
NOT_A_PAGE = "404.html"


@dataclass
class Links(HTMLParser):
    """The addresses that a page asks for, and the places in it that have a name."""

    addresses: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.names |= {given[name] for name in ("id", "name") if name in given}
        wanted = [given[name] for name in ("href", "src") if name in given]
        self.addresses += wanted
        is_fetched = tag != "a" and given.get("rel") != "canonical"
        self.fetched += wanted if is_fetched else []


def read(page: Path) -> Links:
    links = Links()
    links.feed(page.read_text())
    return links


def pages_of(site: Path) -> list[Path]:
    return [page for page in sorted(site.rglob("*.html")) if page.name != NOT_A_PAGE]


def broken_links(site: Path) -> Iterator[str]:
    read_pages = {page: read(page) for page in pages_of(site)}
    for page, links in read_pages.items():
        for address in links.addresses:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve()
            target = target if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            name = unquote(parts.fragment)
            if not target.is_file():
                yield f"{page.name}: {address}"
            elif name and target.suffix == ".html":
                if name not in read_pages[target].names:
                    yield f"{page.name}: {address}"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(
        [*command, "--site-dir", str(folder)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_no_link_leads_nowhere(site):
    assert len(pages_of(site)) > 5
    assert list(broken_links(site)) == []


def test_a_reader_fetches_nothing_from_elsewhere(site):
    for page in pages_of(site):
        foreign = [a for a in read(page).fetched if urlsplit(a).netloc]
        assert foreign == [], page


@pytest.mark.parametrize(
    "link", ["gone.html", "gone/", "b.html#gone", "#gone", "a.html", "b.html#here"]
)
def test_a_broken_link_is_seen(tmp_path, link):
    (tmp_path / "a.html").write_text(f'<p><a href="{link}">x</a></p>')
    (tmp_path / "b.html").write_text('<p id="here"></p>')
    assert list(broken_links(tmp_path)) == (
        [f"a.html: {link}"] if "gone" in link else []
    )


needs_browser = pytest.mark.skipif(
    not browser.installed(), reason="chromium and chromedriver are not installed"
)


@needs_browser
def test_no_page_is_wider_than_a_phone(site):
    with browser.browser(width=PHONE, height=844) as phone:
        for page in pages_of(site):
            phone.open(page.as_uri())
            assert phone.evaluate(WIDTH) <= PHONE, page.relative_to(site)


@needs_browser
def test_a_page_that_is_too_wide_is_seen(tmp_path):
    page = tmp_path / "wide.html"
    page.write_text(
        '<meta name="viewport" content="width=device-width">'
        '<div style="width: 600px">wide</div>'
    )
    with browser.browser(width=PHONE, height=844) as phone:
        phone.open(page.as_uri())
        assert phone.evaluate(WIDTH) > PHONE


WIDTH = "return document.documentElement.scrollWidth"
