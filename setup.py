"""The README and the project URLs of a release: links depend on where the code is hosted.

Everything else is in ``pyproject.toml``, with the addresses under ``[tool.lossagg]``.
"""

import re
import sys
from pathlib import Path

from setuptools import setup

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((?![a-z]+:|#)([^)\s]+)\)")


def absolute(readme: str, repository: str, version: str) -> str:
    """Point every relative link of the README at the release's files.

    If there is no repository, a link becomes its text, and a picture is left out.
    """

    def replaced(link: "re.Match[str]") -> str:
        image, text, path = link.groups()
        text = _LINK.sub(replaced, text)
        if not repository:
            return "" if image else text
        kind = "raw" if image else "blob"
        return f"{image}[{text}]({repository}/{kind}/v{version}/{path})"

    parts = [_LINK.sub(replaced, part) for part in _FENCE.split(readme)]
    fences = [*_FENCE.findall(readme), ""]
    return "".join(part + fence for part, fence in zip(parts, fences, strict=True))


def project_urls(repository: str, site: str) -> "dict[str, str]":
    """Name the addresses that follow from the two settings; none without a repository."""
    urls = {"Documentation": site} if site else {}
    if repository:
        urls["Source"] = repository
        urls["Issues"] = f"{repository}/issues"
        urls["Changelog"] = f"{repository}/blob/main/CHANGELOG.md"
    return urls


def main() -> None:
    """Build with what ``pyproject.toml`` leaves to this file."""
    top = Path(__file__).resolve().parent
    addresses = tomllib.loads((top / "pyproject.toml").read_text())["tool"]["lossagg"]
    version = re.search(r'__version__ = "(.*)"', (top / "megatron_lossagg/__init__.py").read_text())
    assert version is not None
    setup(
        long_description=absolute(
            (top / "README.md").read_text(), addresses["repository"].rstrip("/"), version[1]
        ),
        long_description_content_type="text/markdown",
        project_urls=project_urls(**addresses),
    )


if __name__ == "__main__":
    main()
