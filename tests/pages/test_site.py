"""The documentation site: built strictly, and read without a request to anywhere else."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest

from tests.architecture.source import ROOT
from tests.pages.test_in_browser import CHROMIUM, FLAGS, sync_api

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("mkdocs", "material", "mkdocstrings"))),
    reason="the documentation site is built with mkdocs-material and mkdocstrings",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    return folder


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{cast(int, server.server_address[1])}/"
        server.shutdown()
        thread.join()


@pytest.mark.long
def test_the_reference_has_what_import_spillway_offers(site: Path) -> None:
    text = (site / "reference" / "api" / "index.html").read_text("utf-8")
    for name in ("manage", "Session.step", "StepReport.peak_bytes", "BlockOptions.page", "simulate"):
        assert f'id="spillway.{name}"' in text


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")
def test_pages_ask_nobody_else_and_fit_a_phone(address: str, site: Path) -> None:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        for scheme, width in (("light", 1200), ("dark", 360)):
            context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})
            page = context.new_page()
            asked: list[str] = []
            said: list[Any] = []
            page.on("request", lambda request, asked=asked: asked.append(request.url))
            page.on("console", lambda message, said=said: said.append(message.text))
            page.on("pageerror", lambda error, said=said: said.append(str(error)))
            for name in ("", "tutorials/reading-the-report/", "explanation/delta/", "reference/api/", "errors/"):
                page.goto(address + name, wait_until="load")
                assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            assert said == []
            assert [url for url in asked if not url.startswith(address)] == []
            context.close()
        browser.close()
