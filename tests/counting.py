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


def num_collectives(jaxpr) -> int:
    """Messages, and collectives of any other kind that attention uses."""
    kinds = ("ppermute", "all_to_all", "all_gather", "reduce_scatter")
    return sum(equation.primitive.name in kinds for _, equation in equations(jaxpr))


def permuted_bytes(compiled_text: str) -> int:
    """Bytes that all collective-permutes of a compiled program carry, over all pairs of workers."""
    total = 0
    for line in compiled_text.splitlines():
        if found := re.search(r" collective-permute(-start)?\(.*source_target_pairs=\{(.*?)\}\}", line):
            bits, shape = re.search(r"[a-z]+(\d+)\[([\d,]*)\]", line.split("=", 1)[1]).groups()
            total += math.prod(map(int, shape.split(","))) * int(bits) // 8 * found[2].count("{")
    return total


def collective_bytes(compiled_text: str) -> float:
    """Bytes that a worker receives on average from others in all collectives of a compiled program."""
    num_workers, total = int(re.search(r"num_partitions=(\d+)", compiled_text)[1]), 0.0
    for line in compiled_text.splitlines():
        if not (found := re.search(r"= (.*?) (collective-permute|all-to-all|all-gather|reduce-scatter)\(", line)):
            assert not re.search(r" (collective-permute|all-to-all|all-gather|reduce-scatter)-start\(", line)
            continue
        shapes = re.findall(r"[a-z]+(\d+)\[([\d,]*)\]", found[1])
        size = sum(math.prod(map(int, shape.split(","))) * int(bits) // 8 for bits, shape in shapes)
        if found[2] == "collective-permute":
            pairs = re.search(r"source_target_pairs=\{\{(.*?)\}\}", line)[1].split("},{")
            total += size * sum(len(set(pair.split(","))) == 2 for pair in pairs) / num_workers
        else:
            count = _group_size(line)
            total += size * (count - 1) / (1 if found[2] == "reduce-scatter" else count)
    return total


def _group_size(line: str) -> int:
    """Workers that take part in a collective together: in the notation of a mesh, or listed."""
    if found := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        return math.prod(int(sizes[name]) for name in re.findall(r"'(\w+)'", found[2]))
    return re.search(r"replica_groups=\{\{([\d,]+)\}", line)[1].count(",") + 1
