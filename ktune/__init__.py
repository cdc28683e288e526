"""Fast online-softmax kernels, proved right and tuned for the GPU at hand.

The public names are loaded on first use: ``import ktune`` starts neither CUDA nor Triton.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ktune.runtime.explain import Explanation, explain
    from ktune.runtime.functions import flash_attention, scaled_dot_product_attention, softmax
    from ktune.runtime.invariance import batch_invariant
    from ktune.runtime.load import Loaded, load

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "Loaded",
    "__version__",
    "batch_invariant",
    "explain",
    "flash_attention",
    "load",
    "scaled_dot_product_attention",
    "softmax",
]

_HOME = {
    "Explanation": "ktune.runtime.explain",
    "Loaded": "ktune.runtime.load",
    "batch_invariant": "ktune.runtime.invariance",
    "explain": "ktune.runtime.explain",
    "flash_attention": "ktune.runtime.functions",
    "load": "ktune.runtime.load",
    "scaled_dot_product_attention": "ktune.runtime.functions",
    "softmax": "ktune.runtime.functions",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ktune' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
