"""Makes the site of the documents in `build/site`: assembles pages, calls zensical, checks what it has written.

    python docs/make_site.py --zensical .venv-docs/bin/zensical [--out build] [--no-run]      (`make docs`)

The pages are those of the repository: README, `docs/`, examples and configs, the notebook with its outputs, and the
public API from its docstrings. Nothing is taken from the network, by the command or by the pages that it makes.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

sys.path.insert(0, str(Path(__file__).parent))

import make_api

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ROOT / "docs" / "site.toml"

MOVED = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "forebay/errors.md": "errors.md",
    "demo/README.md": "demo.md",
    "docs/first-look.ipynb": "first-look.md",
}
"""Pages whose place in the site is not their place below `docs/`."""
LISTED = {"examples": "examples.md", "configs": "configs.md"}
"""Folders whose files stand on one page."""

_FENCE = re.compile(r"^(```.*?^```[ \t]*$)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_CODE = re.compile(
    r"(?<!\[)`((?:docs|examples|configs|demo)/[\w./-]+|(?:ARCHITECTURE|SECURITY|CHANGELOG|README|CONTRIBUTING|forebay/errors)\.md)`"
)
_SPAN = re.compile(r"`[^`\n]+`")
_LIST = re.compile(r"^(?=(?:[-*]|\d+\.) )")


def pages() -> dict[str, str]:
    """Returns the place in the site of every document of the repository, by its path in the repository."""
    documents = [p.relative_to(ROOT).as_posix() for p in sorted((ROOT / "docs").rglob("*.md"))]
    return {**{name: name.removeprefix("docs/") for name in documents}, **MOVED}


def assemble(source: Path, *, runs: bool) -> None:
    """Writes all pages as zensical takes them. runs: the notebook is executed first."""
    shutil.rmtree(source, ignore_errors=True)
    for name, place in pages().items():
        target = source / place
        target.parent.mkdir(parents=True, exist_ok=True)
        text = (
            notebook(ROOT / name, source / "images", runs=runs)
            if name.endswith(".ipynb")
            else (ROOT / name).read_text()
        )
        target.write_text(translated(text, name=name, place=place))
    for folder, place in LISTED.items():
        (source / place).write_text(listing(folder))
    (source / "api.md").write_text(make_api.page())
    shutil.copytree(ROOT / "docs/images", source / "images", dirs_exist_ok=True)
    shutil.copy(ROOT / "docs/site.css", source)


def translated(text: str, *, name: str, place: str) -> str:
    """Returns a page whose links lead to pages of the site; what names another document becomes a link to it."""
    parts = _FENCE.split(text)
    return "".join(part if part.startswith("```") else _prose(part, name, place) for part in parts)


def _prose(text: str, name: str, place: str) -> str:
    lines = text.split("\n")
    # A list needs a blank line in front here, as it does not on the pages of a code host.
    spaced = [
        f"\n{line}" if i and _LIST.match(line) and lines[i - 1].strip() and not _is_item(lines, i - 1) else line
        for i, line in enumerate(lines)
    ]
    # Here a bar within code divides no cell, and its backslash would be seen.
    text = _SPAN.sub(lambda found: found[0].replace("\\|", "|"), "\n".join(spaced))
    text = _LINK.sub(lambda found: _link(found, name, place), text)
    return _CODE.sub(lambda found: _named(found, place), text)


def _is_item(lines: list[str], number: int) -> bool:
    """Whether a line is a list's: an item, or what continues one."""
    while number >= 0 and lines[number].startswith("  "):
        number -= 1
    return number >= 0 and bool(_LIST.match(lines[number]))


def _link(found: re.Match[str], name: str, place: str) -> str:
    mark, label, target = found.groups()
    if urlsplit(target).scheme or target.startswith("#"):
        return found[0]
    path, hash_, anchor = target.partition("#")
    where = os.path.normpath(os.path.join(os.path.dirname(name), path))
    there = _place(where)
    if there is None and (ROOT / where).exists():  # a file that is no page: a licence, a photo
        return label
    if there is None:
        raise SystemExit(f"{name}: the link to {target} leads to no page of the site")
    return f"{mark}[{label}]({_relative(there, place)}{hash_}{anchor})"


def _named(found: re.Match[str], place: str) -> str:
    there = _place(found[1].rstrip("/"))
    return found[0] if there is None or there.partition("#")[0] == place else f"[{found[0]}]({_relative(there, place)})"


def _place(path: str) -> str | None:
    """Returns where in the site a file of the repository is; None for what is no part of it."""
    folder, _, file = path.partition("/")
    if path in pages():
        return pages()[path]
    if path == "docs/decisions":
        return "decisions/project.md"
    if folder in LISTED and (ROOT / path).is_file():
        return f"{LISTED[folder]}#{_anchor(file)}"
    if path.startswith("docs/images/first-look-") or (path.startswith("docs/images/") and (ROOT / path).is_file()):
        return path.removeprefix("docs/")
    return None


def _relative(there: str, place: str) -> str:
    path, hash_, anchor = there.partition("#")
    return os.path.relpath(path, os.path.dirname(place) or ".") + hash_ + anchor


def _anchor(title: str) -> str:
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


def listing(folder: str) -> str:
    """Returns the page of a folder's files, each under its name."""
    kinds = {".py": "python", ".toml": "toml"}
    files = [p for p in sorted((ROOT / folder).iterdir()) if p.suffix in kinds]
    parts = [f"## {path.name}\n\n```{kinds[path.suffix]}\n{path.read_text().rstrip()}\n```\n" for path in files]
    return "\n".join([f"# {folder.capitalize()}\n\nThe files of `{folder}/`, as they are.\n", *parts])


def notebook(path: Path, images: Path, *, runs: bool) -> str:
    """Returns a notebook as a page; its pictures are written beside. runs: it is executed first, in the clone."""
    import nbformat

    document = nbformat.read(path, as_version=4)
    if runs:
        from nbclient import NotebookClient

        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        NotebookClient(document, timeout=600, resources={"metadata": {"path": str(ROOT)}}).execute()
    parts: list[str] = []
    for number, cell in enumerate(document.cells):
        parts.append(cell.source if cell.cell_type == "markdown" else f"```python\n{cell.source}\n```")
        parts += _outputs(cell.get("outputs", []), images / f"first-look-{number}.png")
    return "\n\n".join(parts) + "\n"


def _outputs(outputs: list[Any], picture: Path) -> Iterator[str]:
    """Yields what a cell has printed, as one block, and the picture that it draws."""
    texts = [_text(output) for output in outputs]
    if printed := "".join(texts).rstrip():
        yield f"```text\n{printed}\n```"
    for output in outputs:
        if "image/png" in output.get("data", {}):
            picture.parent.mkdir(parents=True, exist_ok=True)
            picture.write_bytes(base64.b64decode(output["data"]["image/png"]))
            yield f"![What the cell draws](images/{picture.name})"


def _text(output: Any) -> str:
    if output.get("name") == "stderr" or "image/png" in output.get("data", {}):
        return ""
    return str(output.get("text") or output.get("data", {}).get("text/plain", ""))


class _Page(HTMLParser):
    """The links of a page of the site, what it loads, and by what it may be linked."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Takes note of one tag."""
        values = {name: value or "" for name, value in attrs}
        self.anchors.update(values[name] for name in ("id", "name") if name in values)
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in ("script", "img", "iframe", "source") and "src" in values:
            self.loads.append(values["src"])
        if tag == "link" and "href" in values and values.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(values["href"])


def problems(site: Path) -> Iterator[str]:
    """Yields every link of a built site that leads nowhere, and everything that a page would load from elsewhere."""
    found: dict[Path, _Page] = {}
    for path in sorted(site.rglob("*.html")):
        found[path] = _Page()
        found[path].feed(path.read_text(encoding="utf-8"))
    for path, page in found.items():
        here = path.relative_to(site)
        for target in page.links + page.loads:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                if target in page.loads and parts.scheme != "data":
                    yield f"{here}: loads {target}"
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            there = there / "index.html" if there.is_dir() else there
            if path.name != "404.html" and not there.exists():
                yield f"{here}: {target} is not there"
            elif parts.fragment and there in found and unquote(parts.fragment) not in found[there].anchors:
                yield f"{here}: {target} has no such place"
    for path in [*site.rglob("*.css"), *site.rglob("*.html")]:
        for target in re.findall(r"url\([\"']?(https?:[^)\"']+)|@import\s+[\"'](https?:[^\"']+)", path.read_text()):
            yield f"{path.relative_to(site)}: loads {''.join(target)}"


def settings() -> str:
    """Returns the settings of the site, with all pages in its navigation: figures, decisions, and guides not named."""
    text = SETTINGS.read_text()
    others = [place for place in sorted(pages().values()) if "/" not in place and f'"{place}"' not in text]
    text = text.replace("@OTHERS@", _entries(others))
    for mark, folder in (("@FIGURES@", "benchmarks"), ("@DECISIONS@", "decisions")):
        names = [place for place in sorted(pages().values()) if place.startswith(f"{folder}/")]
        text = text.replace(mark, _entries(names))
    tomllib.loads(text)
    return text


def _entries(places: list[str]) -> str:
    """Returns lines of a navigation, each page by its own title."""
    return "\n".join(f"    {{ {json.dumps(_title(place))} = {json.dumps(place)} }}," for place in places)


def _title(place: str) -> str:
    return (ROOT / "docs" / place).read_text().split("\n", 1)[0].removeprefix("# ")


def unlisted() -> list[str]:
    """Returns the pages that the navigation does not have."""
    named = set(re.findall(r'"([\w./-]+\.md)"', settings()))
    return sorted({*pages().values(), *LISTED.values(), "api.md"} - named)


def main() -> None:
    """Makes the site; ends with 1, and with all problems, where one is found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zensical", default="zensical", help="the program, by its name or path")
    parser.add_argument("--out", type=Path, default=ROOT / "build")
    parser.add_argument("--no-run", action="store_true", help="the notebook stays without outputs")
    options = parser.parse_args()
    out = options.out.resolve()
    source, site = out / "site-source", out / "site"
    assemble(source / "pages", runs=not options.no_run)
    (source / "zensical.toml").write_text(settings())
    shutil.rmtree(site, ignore_errors=True)
    # It is run in another folder, so a path from here must be whole.
    program = shutil.which(options.zensical)
    if program is None:
        raise SystemExit(f"no program {options.zensical}; run: make docs")
    command = [os.path.abspath(program), "build", "--strict", "--clean", "-f", str(source / "zensical.toml")]
    if subprocess.run(command, cwd=source, check=False).returncode:
        raise SystemExit("zensical has found problems, see above")
    (source / "site").rename(site)
    found = [*problems(site), *(f"the navigation of docs/site.toml lacks {page}" for page in unlisted())]
    if found:
        raise SystemExit("\n".join(found))
    count = len(list(site.rglob("*.html")))
    print(f"{count} pages, all links checked: {site}; to read them with search: python -m http.server -d {site}")


if __name__ == "__main__":
    main()
