"""A variant: one full assignment of template, parameters and launch options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ktune.errors import VariantError
from ktune.problem import Scalar, format_fields, parse_fields, short_hash

LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
"""Names that Triton takes at launch and that never reach a template."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compute an operation: a template family, its parameters, its launch options.

    The text form, ``one_tile block_m=4 eviction=none num_warps=4``, is canonical: parameters
    sorted by name, then launch options.
    """

    op: str
    template: str
    params: tuple[tuple[str, Scalar], ...]
    launch: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, op: str, values: Mapping[str, Scalar]) -> Variant:
        """Build a variant from one flat assignment, in which ``template`` names the family."""
        if "template" not in values:
            raise VariantError(f"a variant of {op} must name its template; got {dict(values)}")
        params = {k: v for k, v in values.items() if k != "template" and k not in LAUNCH_OPTIONS}
        launch = {k: v for k, v in values.items() if k in LAUNCH_OPTIONS}
        for name, value in launch.items():
            if not isinstance(value, int):
                raise VariantError(f"launch option {name}={value!r} must be an integer")
        return cls(
            op,
            str(values["template"]),
            tuple(sorted(params.items())),
            tuple((k, int(launch[k])) for k in LAUNCH_OPTIONS if k in launch),
        )

    @classmethod
    def parse(cls, op: str, text: str) -> Variant:
        """Read the text form."""
        template, *words = text.split()
        return cls.of(op, {"template": template, **parse_fields(words)})

    def __str__(self) -> str:
        return self.text

    @property
    def values(self) -> dict[str, Scalar]:
        """The flat assignment, template first."""
        return {"template": self.template, **dict(self.params), **dict(self.launch)}

    @property
    def text(self) -> str:
        """The canonical text form."""
        rest = format_fields({**dict(self.params), **dict(self.launch)})
        return f"{self.template} {rest}".strip()

    @property
    def id(self) -> str:
        """Twelve hexadecimal digits that stand for operation and text."""
        return short_hash(f"{self.op} {self.text}")

    @property
    def options(self) -> dict[str, int]:
        """Launch options as keyword arguments."""
        return dict(self.launch)
