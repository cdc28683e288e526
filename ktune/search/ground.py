"""What is legal for a problem, and what is known of it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from ktune.bench.measurement import Measurement
from ktune.codegen import render
from ktune.device import Device
from ktune.problem import Problem
from ktune.space import Space
from ktune.variant import Variant


@dataclass(slots=True)
class Outcome:
    """All that is known of a problem after its search.

    Attributes:
        measurements: by variant text; those of earlier runs too.
        measured: how many of them are new, and this process's.
        legal: size of the legal space.
        rejected: points of the raw space ruled out, by reason.
    """

    measurements: dict[str, Measurement] = field(default_factory=dict)
    measured: int = 0
    legal: int = 0
    rejected: dict[str, int] = field(default_factory=dict)

    def best(self) -> list[tuple[str, Measurement]]:
        """Return the variants that are right, fastest first."""
        right = [(text, m) for text, m in self.measurements.items() if m.ok]
        return sorted(right, key=lambda pair: (pair[1].latency_ms or math.inf, pair[0]))


@dataclass(slots=True)
class Ground:
    """What is legal for one problem on one device; may serve many searches.

    Attributes:
        legal: variants by text, in file order.
        rejected: points of the raw space ruled out, by reason.
        render_s: seconds spent on rendering so far.
    """

    space: Space
    problem: Problem
    device: Device
    legal: Mapping[str, Variant]
    rejected: Mapping[str, int]
    render_s: float = 0.0
    _keys: dict[str, str] = field(default_factory=dict, repr=False)

    def key(self, variant: Variant) -> str:
        """Return what a measurement belongs to: rendered source and launch options.

        Raises:
            TemplateError: the variant does not render.
        """
        if variant.text not in self._keys:
            started = time.perf_counter()
            source = render(variant, self.problem)
            self.render_s += time.perf_counter() - started
            options = json.dumps(variant.options, sort_keys=True)
            self._keys[variant.text] = f"{source.id} {options}"
        return self._keys[variant.text]

    @classmethod
    def of(cls, space: Space, problem: Problem, device: Device) -> Ground:
        """Walk the space once."""
        legal = {variant.text: variant for variant in space.variants(problem, device)}
        return cls(space, problem, device, legal, space.rejections(problem, device))
