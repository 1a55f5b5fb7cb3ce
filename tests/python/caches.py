"""KV caches in arenas against caches by `torch.cat`, on the host driver: equal contents bit by bit over random mixes of requests,
and footprint and driver calls of a serving job at its true sizes. Needs PyTorch and transformers, and no GPU.

    GRANULE_LIBRARY=target/release/libgranule.so python3 tests/python/caches.py [MIXES]
"""

import gc
import os
import random
import sys

# Nothing here is worth threads, and they would fight over a small machine.
os.environ["OMP_NUM_THREADS"] = "1"

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "examples", "pytorch"))
sys.dont_write_bytecode = True
os.environ["GRANULE_CONF"] = "driver:host,timing:True"
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import arena_cache
import granule_torch as g

MIB = 1 << 20
LAYERS, HEADS, WIDTH = 4, 2, 16


def idle():
    """Everything of the pool is idle but the first pieces of arenas on shelves."""
    gc.collect()
    stats = g.pool_stats()
    assert stats["created"] == stats["mapped"] + stats["idle"] + stats["in_flight"], stats
    return stats


def mix(seed):
    """Requests that come and go; every answer of both caches is compared."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    config = LlamaConfig(hidden_size=64, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=HEADS)
    shelf = arena_cache.Shelf(0, capacity=64 * MIB, granule=rng.choice((2, 4, 8)) * MIB)
    active, compared = [], 0
    for step in range(40):
        while len(active) < 3:
            batch, length = rng.choice((1, 4, 8)), rng.choice((1, rng.randint(1, 60), rng.randint(60, 500)))
            dtype = rng.choice((torch.float32, torch.bfloat16))
            cache = arena_cache.ArenaCache(config, shelf)
            if rng.random() < 0.5:
                cache.reserve(batch, length, dtype)
            active.append([DynamicCache(), cache, batch, length, rng.randint(1, 25), dtype])
        for request in list(active):
            ours, cat = request[1], request[0]
            if step and rng.random() < 0.05 and ours.get_seq_length() > 8:
                for cache in (ours, cat):
                    cache.crop(-5)
            for layer in range(LAYERS):
                new = [torch.randn(request[2], HEADS, request[3], WIDTH, generator=gen).to(request[5]) for _ in range(2)]
                want, got = cat.update(*new, layer), ours.update(*new, layer)
                assert all(torch.equal(a, b) for a, b in zip(want, got)), (seed, step, layer)
                compared += 2
            assert ours.get_seq_length() == cat.get_seq_length()
            if rng.random() < 0.05:
                order = torch.randperm(request[2], generator=gen)
                for cache in (ours, cat):
                    cache.reorder_cache(order)
                for a, b in zip(ours.layers, cat.layers):
                    assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
            request[3] = rng.choice((1, 1, 1, 7))
            request[4] -= 1
            if request[4] == 0:
                active.remove(request)
        request = ours = cat = cache = new = want = got = a = b = None
    arenas = len(shelf.ready) + len(shelf.ending)
    active.clear()
    # What is left of each is the piece that PyTorch sees.
    before = idle()
    assert len(shelf.ready) == 3 and before["mapped"] == 3 * 2 * MIB, (arenas, before)
    shelf.close()
    assert idle()["mapped"] == 0
    return compared


def refusals():
    """What does not fit is refused and changes nothing."""
    config = LlamaConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=HEADS)
    shelf = arena_cache.Shelf(0, capacity=4 * MIB, granule=2 * MIB)
    cache = arena_cache.ArenaCache(config, shelf)
    new = torch.ones(2, 1, HEADS, 100, WIDTH).unbind()
    cache.update(*new, 0)
    for attempt in (lambda: cache.update(*torch.ones(2, 1, HEADS, 100000, WIDTH).unbind(), 0), lambda: cache.reserve(1, 10 ** 9)):
        try:
            attempt()
            raise AssertionError("no error")
        except g.GranuleError as error:
            assert error.status == 6, error
    assert cache.get_seq_length() == 100
    wrong = torch.ones(2, 2, HEADS, 1, WIDTH), torch.ones(2, 1, HEADS, 1, WIDTH).half(), torch.ones(2, 1, 1, 1, WIDTH)
    for pair in wrong:
        try:
            cache.update(*pair.unbind(), 0)
            raise AssertionError("no error")
        except ValueError:
            pass
    assert all(torch.equal(a, b) for a, b in zip((cache.layers[0].keys, cache.layers[0].values), new))
    cache.close()
    shelf.close()


def generates():
    """A model answers the same tokens over both."""
    torch.manual_seed(3)
    config = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
                         num_key_value_heads=2, attn_implementation="sdpa")
    model = LlamaForCausalLM(config).eval()
    shelf = arena_cache.Shelf(0, capacity=64 * MIB)
    prompt = torch.randint(128, (3, 37))
    answers = []
    for cache in (DynamicCache(), arena_cache.ArenaCache(config, shelf)):
        answers.append(model.generate(prompt, past_key_values=cache, max_new_tokens=30, do_sample=False, pad_token_id=0,
                                      return_dict_in_generate=True, output_logits=True))
    assert torch.equal(answers[0].sequences, answers[1].sequences)
    far = max((a - b).abs().max().item() for a, b in zip(answers[0].logits, answers[1].logits))
    del cache, answers
    gc.collect()
    shelf.close()
    return far


class Block:
    """Memory as PyTorch would have it."""

    def __init__(self, size):
        self.size, self.at = size, g.library().granule_torch_alloc(size, 0, None)
        assert self.at, g.last_error()

    def __del__(self):
        g.library().granule_torch_free(self.at, self.size, 0, None)


class CatCache:
    """What a cache by `torch.cat` allocates."""

    def __init__(self, layers, token):
        self.parts, self.token, self.length = [[None, None] for _ in range(layers)], token, 0

    def update(self, layer, more):
        for i in range(2):
            self.parts[layer][i] = Block((self.length + more) * self.token)

    def step(self, more):
        self.length += more


class Rows:
    """What a cache in an arena takes."""

    def __init__(self, shelf, layers, batch, width):
        self.store = arena_cache.Store(shelf, layers, (batch, 1, width), (batch, 1, width), torch.bfloat16)
        self.length = 0

    def update(self, layer, more):
        if layer == 0:
            self.store.begin_step(self.length, more)

    def step(self, more):
        self.length += more


def forward(cache, batch, more, layers, hidden, inner):
    """The memory of a pass through a model, about as it is asked for."""
    n = batch * more
    x = Block(n * hidden * 2)
    for layer in range(layers):
        wide = [Block(n * hidden * 4) for _ in range(2)]
        norm = Block(n * hidden * 2)
        del wide
        q, k, v = (Block(n * hidden * 2) for _ in range(3))
        turned = [Block(n * hidden * 2) for _ in range(2)]
        cache.update(layer, more)
        del q, k
        out = Block(n * hidden * 2)
        del turned, v, norm
        back = Block(n * hidden * 2)
        del out
        x = Block(n * hidden * 2)
        del back
        wide = [Block(n * hidden * 4) for _ in range(2)]
        norm = Block(n * hidden * 2)
        del wide
        gate = Block(n * inner * 2)
        gate = Block(n * inner * 2)
        up = Block(n * inner * 2)
        both = Block(n * inner * 2)
        del gate, up
        back = Block(n * hidden * 2)
        del both, norm
        x = Block(n * hidden * 2)
        del back
    cache.step(more)


def serve(kind, steps=96, layers=8, hidden=2048, inner=5504, seed=20):
    """The job `serving` of `jobs.py`, without the arithmetic."""
    rng = random.Random(f"serving {seed}")
    weights = [Block(n * 2) for n in (*[hidden * hidden] * (4 * layers), *[hidden * inner] * (3 * layers), *[16000 * hidden] * 2)]
    shelf = arena_cache.Shelf(0)
    g.reset_peaks()
    active, before, misses = [], g.costs(), g.stats()["heap"]["misses"]
    for _ in range(steps):
        while len(active) < 3:
            batch, length = rng.choice((4, 8, 16)), 8 * rng.randint(16, 256)
            count = rng.randint(12, 48)
            rng.randrange(1 << 30)
            token = batch * hidden * 2
            if kind == "cat":
                cache = CatCache(layers, token)
            else:
                # As `ArenaCache.reserve` does.
                shelf.sweep()
                cache = Rows(shelf, layers, batch, hidden)
                cache.store.reserve(length)
            forward(cache, batch, length, layers, hidden, inner)
            active.append([cache, batch, count])
        for request in list(active):
            forward(request[0], request[1], 1, layers, hidden, inner)
            request[2] -= 1
            if request[2] == 0:
                active.remove(request)
        request = cache = None
    stats, after = g.stats(), g.costs()
    calls = {name: count["calls"] - before["driver"].get(name, {"calls": 0})["calls"] for name, count in after["driver"].items()}
    figures = {"reserved": stats["reserved_peak"] / MIB, "blocks": stats["requested_peak"] / MIB,
               "calls": {name: calls.get(name, 0) for name in ("reserve", "create", "release", "map", "set_access", "unmap")},
               "modelled_ms": modelled(calls), "misses": stats["heap"]["misses"] - misses}
    active.clear()
    del weights
    gc.collect()
    shelf.close()
    g.library().granule_torch_empty_cache()
    assert g.pool_stats()["created"] == 0, g.pool_stats()
    return figures


def modelled(calls):
    """Milliseconds that the calls take on an H200, of pieces of 32 MiB."""
    cost = {"reserve": 3, "create": 8, "release": 16, "map": 0.5, "set_access": 22, "unmap": 15}
    return sum(cost.get(name, 0) * count for name, count in calls.items()) / 1000


def main():
    g.configure()
    mixes = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    compared = sum(mix(seed) for seed in range(mixes))
    refusals()
    print(f"{compared} tensors equal; logits of a model differ by {generates():g} at most")
    g.library().granule_torch_empty_cache()
    for seed in range(20, 20 + max(mixes // 4, 1)):
        cat, ours = (serve(kind, seed=seed) for kind in ("cat", "arena"))
        print(f"cat   {cat}\narena {ours}")
        assert ours["reserved"] <= cat["reserved"] * 1.01, "arenas reserve more than cat"
    print("passed")


main()
