"""Models of the attention kernels under trial: their barriers, turns and tiles, under random
schedules of a few blocks of threads. No GPU is needed: python3 attention_trial_models.py [CASES]

The forward is attention_flow.cu: that no schedule blocks, that every copy is the one that a step
expects, that each 64 queries meet each key that they see, once. The backward is
attention_backward.cu with ORDERED: that no schedule blocks, that the first tile stores before
others add, that the last goes on from all others' sums, and that what COPIES_SUMS brings into
`staged` meets no other use of it. Positions stand for memory; nothing is computed.
"""
import random
import sys

TILE = 128  # keys


class Barrier:
    def __init__(self, arrivals):
        self.arrivals, self.arrived, self.phases = arrivals, 0, 0

    def arrive(self):
        self.arrived += 1
        if self.arrived == self.arrivals:
            self.arrived, self.phases = 0, self.phases + 1

    def passed(self, parity):
        return self.phases & 1 != parity


class Ring:
    def __init__(self, at=0, parity=0):
        self.at, self.parity = at, parity

    def next(self):
        self.at ^= 1
        if self.at == 0:
            self.parity ^= 1


def pair(arrivals):
    return [Barrier(arrivals), Barrier(arrivals)]


def schedule(processes, flights, draw):
    """Runs generators, each of which yields what it waits for, and lets copies land, at random."""
    live = [[process, None] for process in processes]
    while live or flights:
        ready = [entry for entry in live if entry[1] is None or entry[1]()]
        assert ready or flights, "blocked for ever"
        if flights and (not ready or draw.random() < 0.3):
            flights.pop(draw.randrange(len(flights)))()
            continue
        entry = draw.choice(ready)
        try:
            entry[1] = next(entry[0])
        except StopIteration:
            live.remove(entry)


def forward(case, draw):
    seq, heads, batch, masked, first_key = case["seq"], case["heads"], case["batch"], \
        case["masked"], case["first_key"]
    groups, halves, blocks_of_threads = case["groups"], case["halves"], case["grid"]
    rows = groups * 64
    blocks = -(-seq // rows)
    total, counter, seen, flights = blocks * batch * heads, [blocks_of_threads], {}, []

    def place(t):
        block, at = divmod(t, heads * batch)
        return blocks - 1 - block, at % heads, at // heads

    def high_of(block):
        return -(-min((block + 1) * rows, seq) // TILE)

    def block_of_threads(number):
        full, empty = ({of: pair(n) for of in "qkvt"} for n in (1, groups))
        slots = {of: [None, None] for of in "qkvt"}
        turns = [[0, 0] for _ in range(groups)]  # syncs and arrivals of each warpgroup's barrier

        def load(ring, of, what):
            yield lambda: empty[of][ring.at].passed(ring.parity ^ 1)
            at = ring.at
            slots[of][at] = "in flight"

            def land():
                slots[of][at] = what
                full[of][at].arrive()
            flights.insert(0, land)
            ring.next()

        def produce():
            q, k, v, t = Ring(), Ring(), Ring(), number
            while True:
                yield lambda: empty["t"][q.at].passed(q.parity ^ 1)
                if t >= total:
                    slots["t"][q.at] = None
                    full["t"][q.at].arrive()
                    return
                block, h, b = place(t)
                firsts = [first_key(b, min(block * rows + g * 64, seq - 1)) for g in range(groups)]
                slots["t"][q.at] = block, h, b, firsts
                full["t"][q.at].arrive()
                low, high = firsts[0] // TILE, high_of(block)
                yield from load(q, "q", (b, h, block))
                yield from load(k, "k", (b, h, high - 1))
                for n in range(high - 2, low, -1):
                    yield from load(k, "k", (b, h, n))
                    yield from load(v, "v", (b, h, n + 1))
                t, counter[0] = counter[0], counter[0] + 1
                if high - 1 > low:
                    yield from load(k, "k", (b, h, low))
                    yield from load(v, "v", (b, h, low + 1))
                yield from load(v, "v", (b, h, low))

        def consume(group):
            q, k, v, tasks = Ring(1, 1), Ring(), Ring(), Ring()
            if not masked and group == groups - 1:
                turns[0][1] += 1
            fresh, n, low, below = True, 0, 0, 0
            block = start = keys_met = before = None

            def free(ring, of):
                empty[of][ring.at].arrive()
                ring.next()

            def pass_over():
                for ring, of in (k, "k"), (v, "v"):
                    yield lambda: full[of][ring.at].passed(ring.parity)
                    free(ring, of)

            def weigh():
                yield lambda: full["v"][v.at].passed(v.parity)
                assert slots["v"][v.at] == (*block, before[0] // TILE)
                for key in range(*before):
                    assert key not in keys_met
                    keys_met.add(key)

            while True:
                begins, following = fresh or n == low, None
                if begins:
                    drains = masked and not fresh and (below > 0 or rows != TILE)
                    if not drains:
                        yield lambda: full["t"][tasks.at].passed(tasks.parity)
                        drains = not fresh and slots["t"][tasks.at] is None
                    if drains:
                        yield from weigh()
                        yield None
                        free(v, "v")
                        seen[block, start] = keys_met
                        for _ in range(below):
                            yield from pass_over()
                        fresh, below = True, 0
                        continue
                    task = slots["t"][tasks.at]
                    free(tasks, "t")
                    if task is None:
                        return
                    at, h, b, firsts = task
                    following = (b, h), at * rows + group * 64, set()
                    n = min(following[1] + 63, seq - 1) // TILE if masked else high_of(at) - 1
                    first = firsts[group]
                    low, below = first // TILE, first // TILE - firsts[0] // TILE
                    q.next()
                    yield lambda: full["q"][q.at].passed(q.parity)
                    assert slots["q"][q.at] == (b, h, at)
                    if masked and rows != TILE:
                        for _ in range(high_of(at) - 1 - n):
                            yield from pass_over()
                else:
                    n -= 1
                of, first_row = following[:2] if following else (block, start)
                lower = halves and first_row < n * TILE + 64
                upper = halves and first >= n * TILE + 64
                yield lambda: full["k"][k.at].passed(k.parity)
                assert slots["k"][k.at] == (*of, n)
                takes_turns = not masked and not fresh
                if takes_turns:
                    turns[group][0] += 1
                    turn = turns[group][0]
                    yield lambda: turns[group][1] >= turn
                if not fresh:
                    yield from weigh()
                if takes_turns:
                    turns[(group + 1) % groups][1] += 1
                yield None
                free(k, "k")
                if n == low:
                    empty["q"][q.at].arrive()
                yield None
                if not fresh:
                    free(v, "v")
                if following:
                    if not fresh:
                        assert (block, start) not in seen
                        seen[block, start] = keys_met
                    block, start, keys_met = following
                key = n * TILE + (64 if upper and not lower else 0)
                before, fresh = (key, key + (64 if lower or upper else TILE)), False

        return [produce(), *(consume(group) for group in range(groups))]

    schedule([p for b in range(blocks_of_threads) for p in block_of_threads(b)], flights, draw)
    for b in range(batch):
        for h in range(heads):
            for row in range(seq):
                met = seen[(b, h), row // 64 * 64]
                assert all(key in met for key in range(first_key(b, row), row + 1)), (b, h, row)


def backward(case, draw):
    seq, heads, batch, masked, first_key = case["seq"], case["heads"], case["batch"], \
        case["masked"], case["first_key"]
    share, rows, group = case["share"], case["rows"], case["group"]
    deterministic = case["deterministic"]
    copies = case["copies"] and rows == 64
    blocks = -(-seq // TILE)
    total, counter = blocks * batch * heads, [case["grid"]]
    turns, sums, done, flights = {}, {}, {}, []

    def past(b, key):
        if not masked:
            return seq
        return max(row for row in range(key, seq) if first_key(b, row) <= key) + 1

    def place(t):
        of, r = divmod(t, group * blocks)
        here = min(group, batch * heads - of * group)
        at = of * group + r % here
        return r // here, at % heads, at // heads

    def walk(block, b):
        low = block * TILE // rows
        high = -(-past(b, min((block + 1) * TILE, seq) - 1) // rows)
        return low, [(m, h) for m in range(high - 1, low - 1, -1) for h in range(share)]

    def block_of_threads(number):
        tiles, staged, syncs = [number], [None], [0, 0]
        turn, added, handed = pair(1), pair(2), pair(1)
        positions, sums_empty, sums_full = [None, None], Barrier(2), Barrier(1)

        def steps():
            i = 0
            while True:
                if i == len(tiles):
                    tiles.append(counter[0])
                    counter[0] += 1
                if tiles[i] >= total:
                    return
                block, head, b = place(tiles[i])
                low, all_steps = walk(block, b)
                for step, (m, h) in enumerate(all_steps):
                    last = m < low + TILE // rows
                    yield block, (b, head * share + h, m), last, step, len(all_steps)
                i += 1

        def await_turns():
            ring, parity = Ring(), 0
            for block, key, last, _, _ in steps():
                position = block - first_key(key[0], key[2] * rows) // TILE
                yield lambda: turns.get(key, 0) == position or (
                    not deterministic and not last and turns.get(key, 0) > 0)
                if copies and last:
                    yield lambda: sums_empty.passed(parity)
                    parity ^= 1
                    if position > 0:
                        assert staged[0] is None
                        staged[0] = "in flight"

                        def land(key=key):
                            staged[0] = key, set(sums[key])
                            sums_full.arrive()
                        flights.append(land)
                yield lambda: handed[ring.at].passed(ring.parity ^ 1)
                positions[ring.at] = position, key
                turn[ring.at].arrive()
                ring.next()
            yield lambda: handed[ring.at].passed(ring.parity ^ 1)
            positions[ring.at] = -1, None
            turn[ring.at].arrive()

        def hand_on():
            ring = Ring()
            while True:
                yield lambda: turn[ring.at].passed(ring.parity)
                position, key = positions[ring.at]
                if position < 0:
                    return
                yield lambda: added[ring.at].passed(ring.parity)
                turns[key] = position + 1 if deterministic else turns.get(key, 0) + 1
                handed[ring.at].arrive()
                ring.next()

        def consume(warpgroup):
            ring, parity = Ring(), 0
            for block, key, last, step, count in steps():
                base = set()
                if copies and step == 0:
                    sums_empty.arrive()
                yield None
                if last:
                    yield lambda: turn[ring.at].passed(ring.parity)
                    assert positions[ring.at][1] == key
                    if positions[ring.at][0] > 0 and copies:
                        yield lambda: sums_full.passed(parity)
                        parity ^= 1
                        assert staged[0][0] == key
                        base = staged[0][1]
                    elif positions[ring.at][0] > 0:
                        base = sums[key]
                syncs[warpgroup] += 1
                sync = syncs[warpgroup]
                yield lambda: syncs[1 - warpgroup] >= sync
                if copies and last:
                    staged[0] = None
                    if step + 1 < count:
                        sums_empty.arrive()
                yield None
                if last:
                    assert (key, warpgroup) not in done
                    done[key, warpgroup] = {by for by, of in base if of == warpgroup} | {block}
                else:
                    yield lambda: turn[ring.at].passed(ring.parity)
                    before = [by for by, of in sums.get(key, ()) if of == warpgroup]
                    assert (positions[ring.at][0] == 0) == (not before)
                    assert not deterministic or len(before) == positions[ring.at][0]
                    sums.setdefault(key, set()).add((block, warpgroup))
                added[ring.at].arrive()
                ring.next()
                # Behind the last step dv and dk are staged there.
                assert step + 1 < count or staged[0] is None

        return [await_turns(), hand_on(), consume(0), consume(1)]

    schedule([p for b in range(case["grid"]) for p in block_of_threads(b)], flights, draw)
    for b in range(batch):
        for h in range(heads * share):
            for m in range(-(-seq // rows)):
                tiles = range(first_key(b, m * rows) // TILE, m * rows // TILE + 1)
                assert all(done[(b, h, m), g] == set(tiles) for g in (0, 1)), (b, h, m)


def draw_case(draw):
    seq = draw.choice([1, 64, 65, 129, 200, 333, 640, draw.randint(1, 1200)])
    heads, batch = draw.choice([1, 2, 3]), draw.choice([1, 2])
    mean = draw.choice([2, 40, 100, 300, 900])
    window = draw.choice([1, 100, 128, 512, 1 << 30, 1 << 30])
    masked, starts = draw.random() < 0.65, {}
    for b in range(batch):
        for row in range(seq):
            begins = row == 0 or draw.random() < 1 / mean
            starts[b, row] = row if begins else starts[b, row - 1]

    def first_key(b, row):
        return min(max(starts[b, row], row + 1 - window), row) if masked else 0
    return dict(
        seq=seq, heads=heads, batch=batch, masked=masked, first_key=first_key, mean=mean,
        window=window, grid=draw.choice([1, 2, 5]), groups=draw.choice([2, 2, 3]),
        halves=draw.random() < 0.6, share=draw.choice([1, 1, 2, 3]),
        rows=draw.choice([64, 64, 128]),
        group=draw.choice([1, 2, heads * batch]), deterministic=draw.random() < 0.3,
        copies=draw.random() < 0.7)


def main():
    cases = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    for seed in range(cases):
        draw = random.Random(seed)
        case = draw_case(draw)
        for kernel in forward, backward:
            try:
                kernel(case, draw)
            except AssertionError:
                print(f"{kernel.__name__}, seed {seed}: {case}")
                raise
    print(f"{cases} cases of each kernel: passed")


if __name__ == "__main__":
    main()
