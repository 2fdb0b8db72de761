"""How MkDocs makes the site: its files, the names of headings, and scripts that it brings along.

MkDocs calls these functions (`hooks` in ``mkdocs.yml``). Pages keep their paths in the repository,
which links between them follow; `site_pages` says where each is in the site.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import site_markdown
import site_pages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify
from pymdownx.superfences import fence_code_format

SCRIPTS: Final = {
    "mermaid/dist/mermaid.min.js": "mermaid.js",
    "mermaid/LICENSE": "mermaid-licence.txt",
    "iframe-worker/shim/index.js": "iframe-worker.js",
    "iframe-worker/LICENSE": "iframe-worker-licence.txt",
}
"""Files of npm's packages, which the theme would fetch from another host, and their names here."""


class Folder(File):
    """What a link to a folder leads to: the page of it, which another file writes."""

    def is_documentation_page(self) -> bool:
        return False

    def copy_file(self, dirty: bool = False) -> None:
        pass


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Headings have the names that Git hosts give them; diagrams are for the script that draws."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    config.mdx_configs["pymdownx.superfences"] = {
        "custom_fences": [{"name": "mermaid", "class": "mermaid", "format": fence_code_format}]
    }
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The theme's files, those of the repository in place of those of ``docs/``, and scripts."""
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    root = Path(config.docs_dir).parent
    paths = site_pages.files(root)
    for path in paths:
        files.append(_file(config, root, path))
    for folder, page in site_pages.folders(paths).items():
        files.append(_moved(Folder(folder, None, config.site_dir, False), site_pages.place(page)))
    for source, name in SCRIPTS.items():
        script = root / "build/docs/node/node_modules" / source
        files.append(File.generated(config, f"assets/{name}", abs_src_path=str(script)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """A page in the dialect of MkDocs. The search finds what is true before what was decided."""
    if page.file.src_uri.startswith(site_pages.HISTORY):
        page.meta["search"] = {"boost": 0.3}
    return site_markdown.for_mkdocs(markdown)


def _file(config: MkDocsConfig, root: Path, path: str) -> File:
    """A file of the repository, at its place in the site."""
    if path.endswith(".svg"):
        picture = site_pages.without_fonts((root / path).read_text(encoding="utf-8"))
        file = File.generated(config, path, content=picture)
    else:
        file = File.generated(config, path, abs_src_path=str(root / path))
    return _moved(file, site_pages.place(path))


def _moved(file: File, place: str) -> File:
    file.dest_uri = place
    return file
