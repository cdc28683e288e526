"""From a variant to source text, to an imported module, to a kernel compiled for a target."""

from __future__ import annotations

from ktune.codegen.module import load_module
from ktune.codegen.render import Source, render, template_digest

__all__ = ["Source", "load_module", "render", "template_digest"]
