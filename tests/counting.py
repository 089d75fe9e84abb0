"""Count what a program contains: primitives in a jaxpr, messages in a compiled text."""

import math
import re
from collections.abc import Iterator

import jax


def equations(jaxpr, scope: str = "") -> Iterator[tuple[str, object]]:
    """(scope, equation) of all equations of a jaxpr and of the jaxprs inside it; the body of a scan once."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        inside = f"{scope}/{equation.source_info.name_stack}"
        yield inside, equation
        is_jaxpr = lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        for inner in filter(is_jaxpr, jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr)):
            yield from equations(inner, inside)


def num_messages(jaxpr) -> int:
    return sum(equation.primitive.name == "ppermute" for _, equation in equations(jaxpr))


def num_forward_launches(jaxpr) -> int:
    """Forward block kernels: the xla one is a `while` over keys inside a loop over rows."""
    return sum("forward_step" in scope and e.primitive.name == "while" for scope, e in equations(jaxpr))


def permuted_bytes(compiled_text: str) -> int:
    """Bytes that all collective-permutes of a compiled program carry, over all pairs of workers."""
    total = 0
    for line in compiled_text.splitlines():
        if found := re.search(r" collective-permute(-start)?\(.*source_target_pairs=\{(.*?)\}\}", line):
            bits, shape = re.search(r"[a-z]+(\d+)\[([\d,]*)\]", line.split("=", 1)[1]).groups()
            total += math.prod(map(int, shape.split(","))) * int(bits) // 8 * found[2].count("{")
    return total
