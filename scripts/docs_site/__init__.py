"""The documentation site: pages made from the source, drawings, and checks of links and snippets.

    markdown.py   links, anchors, fenced blocks and commands of a Markdown text
    api.py        the API reference, from the docstrings of the public names
    messages.py   the messages of our errors, from the source
    pages.py      every generated page: path in the site -> Markdown
    drawings.py   the SVG files of docs/img
    hooks.py      the hooks of mkdocs.yml, which put all this into the site

Only hooks.py imports mkdocs.
"""

__all__: list[str] = []
