"""Layer: a holder of parameters and of other layers."""

from __future__ import annotations

from collections.abc import Iterator

from serried.weights.spec import Parameter


class Layer:
    """Base of all layers. A layer states its parameters as attributes and is called with a backend first."""

    def parameters(self) -> Iterator[Parameter]:
        """All parameters of this layer and of those inside it, each once, in the order of their statement."""
        seen: set[int] = set()
        for parameter in _walk(self):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def _walk(value: object) -> Iterator[Parameter]:
    if isinstance(value, Parameter):
        yield value
    elif isinstance(value, Layer):
        for attribute in vars(value).values():
            yield from _walk(attribute)
    elif isinstance(value, list):
        for item in value:
            yield from _walk(item)
