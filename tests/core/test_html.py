"""Pages from jinja2 templates, and the packages that only some commands need."""

import re
import sys

import pytest

from megatron_lossagg.writing import html
from megatron_lossagg.writing.extras import MissingPackageError, needed
from megatron_lossagg.writing.html import page

TEMPLATE = """{% extends "base.html" %}
{% from "parts.html" import definitions, table %}
{% block title %}{{ name }}{% endblock %}
{% block header %}<h1>{{ name }}</h1>{% endblock %}
{% block content %}{{ table(["a", "b"], [[name, 2]]) }}{{ definitions([[name, 3]]) }}{% endblock %}
"""


@pytest.fixture(autouse=True)
def own_template(tmp_path, monkeypatch):
    (tmp_path / "own.html").write_text(TEMPLATE)
    monkeypatch.setattr(html, "_FOLDERS", [*html._FOLDERS, tmp_path])


def test_a_page_escapes_what_it_is_given_and_loads_nothing():
    text = page("own.html", name="<script>&", verdict="fail")
    assert text.count("&lt;script&gt;&amp;") == 4
    assert '<header class="fail">' in text
    assert not re.findall(r"<(?:script|link|img|iframe)|url\(|@import|(?:src|href)=", text)
    assert "default-src 'none'" in text
    assert "prefers-color-scheme:dark" in text


def test_a_name_that_a_template_lacks_is_an_error():
    jinja2 = pytest.importorskip("jinja2", reason="jinja2 is not installed")
    with pytest.raises(jinja2.UndefinedError, match="name"):
        page("own.html")


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingPackageError, match=r"needs jinja2.*megatron-lossagg\[report\]"):
        page("base.html")
    with pytest.raises(MissingPackageError, match=r"--x needs absent_package.*lossagg\[plot\]"):
        needed("absent_package.inner", by="--x", extra="plot")
