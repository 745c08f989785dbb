"""The documentation site: every page is in its navigation, and every error has a place on the page of errors."""

from __future__ import annotations

import inspect
import re

from spillway import errors
from tests.architecture.documents import documents
from tests.architecture.source import ROOT

NAVIGATION = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]


def test_every_page_but_single_decisions_stands_in_the_navigation_once() -> None:
    listed = re.findall(r"[\w/-]+\.md", NAVIGATION)
    pages = [name.removeprefix("docs/") for name in documents() if name.startswith("docs/")]
    assert sorted(listed) == sorted(name for name in pages if "decisions/0" not in name)


def test_every_error_has_a_heading_of_its_name_and_no_other_has() -> None:
    raised = [name for name, one in vars(errors).items() if inspect.isclass(one) and issubclass(one, Exception)]
    assert re.findall(r"^## (\w+)$", documents()["docs/errors.md"], re.MULTILINE) == raised


def test_the_address_of_the_site_is_said_in_one_place() -> None:
    assert re.fullmatch(r"|https://\S+/", errors.SITE)
    assert "site_url" not in (ROOT / "mkdocs.yml").read_text("utf-8")  # `.ci/site_links.py` gives it
    assert "Documentation" not in (ROOT / "pyproject.toml").read_text("utf-8")
