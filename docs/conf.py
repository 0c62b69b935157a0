"""Sphinx: the guide, the design, and the reference that is made of docstrings. ``scripts/docs`` builds it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cutlass_w8a8.version import VERSION

project = "cutlass_w8a8"
release = version = VERSION
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# `name` in a docstring is a link where there is something of that name.
default_role = "py:obj"
myst_heading_anchors = 3
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
napoleon_numpy_docstring = False
napoleon_use_rtype = False
html_theme = "alabaster"
html_theme_options = {"description": "8-bit GEMM kernels for LLM inference", "page_width": "1100px"}
html_show_sourcelink = False
html_copy_source = False
