# SPDX-License-Identifier: Apache-2.0
"""Settings of Sphinx for tools/dev/site: the Markdown of this repository as it stands, as pages to browse."""
project = "Perseus"
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = ["*.md", "doc/**.md", "fused/**.md", "tools/**.md", "test/**.md"]
exclude_patterns = ["build*", "doc/figures/*.md"]  # templates: the documents hold their text
myst_heading_anchors = 4
html_theme = "alabaster"
html_theme_options = {"page_width": "1200px", "sidebar_width": "240px"}
html_sidebars = {"**": ["about.html", "searchfield.html", "navigation.html"]}
html_copy_source = False
suppress_warnings = ["toc.not_included"]  # decisions and pages about parts: other pages link to them

# Caption: pages. The list on the left of each page.
CONTENTS = {
    "Use": ["doc/cluster", "fused/python/README", "doc/training", "doc/fused", "doc/device", "doc/softnic",
            "doc/libfabric", "doc/simulator", "doc/examples/README"],
    "Look up": ["doc/limits", "doc/variables", "doc/troubleshooting", "doc/security", "doc/performance", "doc/nccl",
                "CHANGELOG"],
    "Change it": ["ARCHITECTURE", "CONTRIBUTING", "doc/open", "fused/README", "tools/README", "test/README",
                  "doc/fused-notes"],
    "Decisions": ["doc/decisions/*"],
}


def add_contents(app, page, source):
    if page == root_doc:
        source[0] += "".join(f"\n```{{toctree}}\n:hidden:\n:glob:\n:maxdepth: 1\n:caption: {caption}\n\n"
                             + "\n".join(pages) + "\n```\n" for caption, pages in CONTENTS.items())


def setup(app):
    app.connect("source-read", add_contents)
