"""The memory that a worker holds during an attention call, by what lives at each moment of its program. Pure Python.

XLA keeps an array from the operation that makes it to the last one that reads it, and lets one array lie in each place
where a result of the call will be written later, if it fits in there. What it allocates: docs/strategies.md.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from distflash_jax.cost import FETCHED, RETURNED, Arrays, Cost
from distflash_jax.schedule import TABLES, ring
from distflash_jax.spread import Spread
from distflash_jax.table import MERGED_AT_ONCE, WHOLE, Direction, Part, Side, Step

Held = list[tuple[str, int]]  # names in executor.py, and bytes
Moments = Iterator[tuple[Held, bool]]  # what is held; and whether results are written later, or now one by one
RESULTS: dict[Direction, tuple[str, ...]] = {"forward": ("q",), "backward": ("q", "k", "v")}  # by operands alike


def held(spread: Spread, direction: Direction) -> int:
    """Most bytes that a worker holds at a time beside its own operands and results."""
    own = Cost(ring(1), replace(spread.shape, T=spread.rows))
    places = [own.size(name) for name in RESULTS[direction]]
    return max(
        _outside(arrays, places if is_before else places[1:]) for arrays, is_before in _moments(spread, own, direction)
    )


def _outside(arrays: Held, places: Iterable[int]) -> int:
    """Bytes of the arrays but for those that fit into these places: the largest into each."""
    sizes = sorted(size for _, size in arrays)
    for place in sorted(places):
        fitting = [size for size in sizes if size <= place]
        if fitting:
            sizes.remove(fitting[-1])
    return sum(sizes)


def _moments(spread: Spread, own: Cost, direction: Direction) -> Moments:
    """own: of the rows of a worker, alone."""
    if spread.strategy == "rsa":
        return _of_scores(own, direction, spread.num_workers)
    if spread.num_workers == 1:
        # Up to head dim 128 the kernel casts all but dq, to which it adds in float32.
        return iter([(_arrays(own, ("dq",)) if direction == "backward" else [], False)])
    if spread.strategy in ("ulysses", "hybrid"):
        return _of_heads(spread.table, direction)
    if spread.strategy == "zigzag":
        return _of_zigzag(own, direction, spread.num_workers)
    if spread.strategy == "all_gather":
        return _of_gathered(own, direction, spread.num_workers, is_causal=spread.is_causal)
    assert spread.strategy in TABLES
    return _of_table(spread.table, direction, spread if spread.is_double else None)


def _of_table(cost: Cost, direction: Direction, nodes: Spread | None = None) -> Moments:
    """Of executor.py: each kernel, and the merges, which XLA runs behind the kernel of the step that needs them done.

    nodes: whose tables within a node take the place of kernels.
    """
    steps, results = cost.steps(direction), RETURNED[direction]
    arrays = lambda names, part: [_of_step(cost, names[direction], step, part) for step in steps] + [[]]
    peer = lambda side: side.peer if side.fetch else None
    fetched, copied = arrays(FETCHED, peer), arrays(FETCHED, lambda side: None if side.peer == WHOLE else peer(side))
    made, returned = arrays(RETURNED, lambda side: side.own), arrays(RETURNED, peer)
    total = [x for key, names in results.items() for part in getattr(cost.schedule, f"{key}_parts")
             for x in _arrays(cost, names, part)]  # fmt: skip
    waiting: Held = []  # results that are to be merged, and what was
    for number, step in enumerate(steps):
        back, is_last = returned[number - 1], number + 1 == len(steps)
        moving = fetched[number + 1] + back
        if nodes is None:
            moving += copied[number + 1]
            yield waiting + moving + fetched[number] + made[number], True
        else:
            # What waits now is read when the results are written.
            kept = [("", sum(size for _, size in waiting))] if is_last else waiting
            for inside, is_before in _of_node(nodes, step, direction, moving, made[number]):
                yield kept + inside, is_before or not is_last
        if number and number % MERGED_AT_ONCE == 0 and not is_last:
            sent = [x for x in made[number - 1] if x[0] in dict(back)]  # and kept until they are there
            for name in reversed(_names(results)):
                of_name = lambda arrays, name=name: [x for x in arrays if x[0] == name]
                yield waiting + of_name(total) + moving + made[number], True
                waiting = [x for x in waiting if x[0] != name] + of_name(total + sent)
            waiting = total
        waiting = waiting + back + made[number]
    yield waiting + returned[len(steps) - 1], False


def _of_node(nodes: Spread, step: Step, direction: Direction, moving: Held, made: Held) -> Moments:
    """Of the table within a node, which makes `made`. moving: between nodes meanwhile, a piece in each of its steps."""
    inner = nodes.within(step)
    count = len(inner.steps(direction))
    piece = [(name, -(-size // count)) for name, size in moving]
    # A part is copied for the table to read, and so is what is own or a peer's.
    is_copied = lambda side: side.fetch or side.own != WHOLE
    read = _of_step(nodes.table, FETCHED[direction], step, lambda side: side.own if is_copied(side) else None)
    for arrays, is_before in _of_table(inner, direction):
        yield arrays + count * piece + (piece + read if is_before else made), is_before


def _of_heads(table: Cost, direction: Direction) -> Moments:
    """Of Ulysses; table: that of the heads that a worker has. They are copied to be sent, and what arrives is kept."""
    dealt, q = _arrays(table, _names(FETCHED[direction])), _arrays(table, ("q",))
    zeros = _arrays(table, ("dq",) if direction == "backward" else ())  # to which the kernel adds; made early
    yield 2 * dealt + zeros, True
    if len(table.steps(direction)) > 1:
        for arrays, is_before in _of_table(table, direction):
            yield arrays + dealt * is_before, is_before
    elif direction == "backward":  # dq is cast
        yield dealt + zeros + _arrays(table, ("q", "k", "v")), True
    else:
        yield 2 * q, False


def _of_zigzag(own: Cost, direction: Direction, num_workers: int) -> Moments:
    """Of zigzag_plan.py: each step's second kernel, and behind it the merge of the step before.

    Halves of keys are cut out to be sent, those of queries in a batch alone: else kernels read them where they lie.
    """
    half = lambda names: [(name, size // 2) for name, size in _arrays(own, names)]
    keys, out, sums = 2 * half(FETCHED[direction]["kv"]), RETURNED[direction]["q"], RETURNED[direction].get("kv", ())
    queries = 2 * half(FETCHED[direction]["q"]) if own.shape.B > 1 else []
    for step in range(1, num_workers):
        # Of keys: sums, what this step makes, what the one before sends, and what came back in the last two.
        added = (4, 8, 10)[min(step, 3) - 1] * half(sums)
        # Of queries: totals, what the step before has made, and this one; in the last step until results are written.
        is_last = step + 1 == num_workers
        made = min(step + 1, 3) * (_arrays(own, out) if is_last else 2 * half(out))
        yield made + added + (1 if is_last else 3) * keys + queries, not is_last
        if step > 1:  # one half after the other
            yield made + half(out) + added + (0 if is_last else 2) * keys, not is_last
    yield 2 * _arrays(own, out) + 6 * half(sums), False


def _of_gathered(own: Cost, direction: Direction, num_workers: int, *, is_causal: bool) -> Moments:
    """Of AllGather, whose two kernels have half of the queries each under a causal mask."""
    whole = lambda names: [(name, num_workers * size) for name, size in _arrays(own, names)]
    halves = lambda names: [(name, size // 2) for name, size in _arrays(own, names)] if is_causal else []
    gathered, dealt = whole(FETCHED[direction]["kv"]), halves(FETCHED[direction]["q"])
    yield gathered + 4 * dealt, True  # both copied to be sent, and received
    if direction == "backward":
        made = whole(RETURNED[direction]["kv"])
        # The dq of the first kernel is cast by then.
        yield gathered + (dealt + 2 * made + halves(("q", "dq")) if is_causal else made + _arrays(own, ("dq",))), True


def _of_scores(own: Cost, direction: Direction, num_workers: int) -> Moments:
    """Of rsa.py: all scores in float32 and rounded, backward with their gradients."""
    shape = own.shape
    scores = num_workers * shape.B * shape.T**2 * shape.N * (4 + shape.itemsize)
    yield [("scores", scores if direction == "forward" else 2 * scores), *2 * _arrays(own, ("k",))], False


def _arrays(cost: Cost, names: Iterable[str], part: Part = WHOLE) -> Held:
    return [(name, cost.size(name, part)) for name in names]


def _names(arrays: Arrays) -> list[str]:
    return [name for names in arrays.values() for name in names]


def _of_step(cost: Cost, arrays: Arrays, step: Step, part: Callable[[Side], Part | None]) -> Held:
    """part: that of each side; None if there is nothing."""
    parts = [(names, part(getattr(step, key))) for key, names in arrays.items()]
    return [x for names, chosen in parts if chosen is not None for x in _arrays(cost, names, chosen)]
