"""KV caches for transformers that grow in place: a token more costs no `torch.cat`.

    cache = arena_cache.ArenaCache(model.config)
    cache.reserve(prompt.shape)                     # optional: at admission, when what it needs is known
    model(input_ids=prompt, past_key_values=cache, use_cache=True)

One arena serves one batch of sequences. Its row is a token with all layers in it, keys and values beside each other:

    row t:  | layer 0: K [batch, heads, width] | layer 0: V | layer 1: K | layer 1: V | ...

So a token more is one row more for all layers at once, and mostly no call of the library at all: growing takes a step ahead. Two
tensors over all rows that there may ever be, [layers, batch, heads, rows, width], are made once; a step narrows and unbinds them once for all
layers. What a layer gets is [batch, heads, length, width] with a stride of a row between tokens, which the attention kernels take.

Arenas of requests that ended are kept on a `Shelf`, their addresses and views of bytes with them; their memory goes back to the pool, where the
next request and PyTorch itself take it from, as soon as the work queued on it is done. Nobody waits for that.
"""

import weakref

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import granule_torch

MIB = 1 << 20


class Shelf:
    """The arenas of one device that no request uses just now."""

    def __init__(self, device=0, capacity=32 << 30, granule=32 * MIB):
        """`capacity` is the most one request can take: addresses only. `granule`: steps and pieces of memory are no larger, so
        that little is mapped in vain and what one request gives back suits the next one and the heap."""
        self.device, self.capacity, self.granule = device, capacity, granule
        self.ready, self.ending = [], []

    def take(self):
        """An arena without rows."""
        if self.ready:
            return self.ready.pop()
        return granule_torch.Arena(self.capacity, self.device, granule=self.granule)

    def put(self, arena):
        """Takes the arena of a request that ended."""
        self.ending.append(arena)
        self.sweep()

    def sweep(self):
        """Lets memory go that no queued work uses any more."""
        # Apart from the list, to which a cache that the garbage collector finds meanwhile may add.
        ending, self.ending = self.ending, []
        for arena in ending:
            # A first small piece stays, for PyTorch to see.
            (self.ready if arena.give_back() <= 2 * MIB else self.ending).append(arena)

    def close(self):
        """Gives all addresses back. Waits for the work of the streams that used them."""
        for arena in self.ready + self.ending:
            arena.bytes = None
            arena.close()
        self.ready, self.ending = [], []


_shelves = {}


def shelf(device=0):
    """The shelf of a device that caches use by default."""
    if device not in _shelves:
        _shelves[device] = Shelf(device)
    return _shelves[device]


class Store:
    """The memory of one request: rows of one layout in an arena."""

    def __init__(self, shelf, layers, key_shape, value_shape, dtype):
        """`key_shape` and `value_shape` are those of a token in a layer: (batch, heads, width)."""
        self.key_shape, self.value_shape, self.dtype, self.layers = key_shape, value_shape, dtype, layers
        self.key_len, self.value_len = (b * h * w for b, h, w in (key_shape, value_shape))
        self.row = layers * (self.key_len + self.value_len)
        self.row_bytes = self.row * dtype.itemsize
        if not self.row_bytes:
            raise ValueError(f"keys of {key_shape} and values of {value_shape} have no bytes")
        self.max_rows = shelf.capacity // self.row_bytes
        self.open = 0
        self.shelf = shelf
        self.arena = shelf.take()
        self.close = weakref.finalize(self, shelf.put, self.arena)
        # At exit the process takes everything back by itself.
        self.close.atexit = False
        self.stream = self.arena.stream()
        usable = shelf.capacity // dtype.itemsize * dtype.itemsize
        flat = self.arena.bytes[:usable].view(dtype)
        pair = self.key_len + self.value_len
        over = lambda batch, heads, width, offset: flat.as_strided(
            (layers, batch, heads, self.max_rows, width), (pair, heads * width, width, self.row, 1), offset)
        self.keys, self.values = over(*key_shape, 0), over(*value_shape, self.key_len)
        # The step that the views below are for: positions `at` to `at + more`.
        self.at = self.more = None
        self.to_keys = self.to_values = self.all_keys = self.all_values = ()

    def check(self, keys, values):
        """Refuses what is not of this layout."""
        for what, got, shape in (("keys", keys, self.key_shape), ("values", values, self.value_shape)):
            batch, heads, length, width = got.shape
            if (batch, heads, width) != shape or length != keys.shape[2] or got.dtype != self.dtype:
                raise ValueError(f"{what} of {tuple(got.shape)}, {got.dtype}, in a cache of {shape}, {self.dtype}")

    def reserve(self, rows):
        """Memory for at least `rows` rows."""
        if rows > self.open:
            need = (rows - self.open) * self.row_bytes
            if need > self.shelf.granule:
                granule_torch.make_room(need, self.shelf.device)
            self.open = self.arena.grow_step(rows * self.row_bytes) // self.row_bytes
            self.stream = self.arena.stream()

    def begin_step(self, at, more):
        """Memory and views of all layers for the positions `at` to `at + more`: what is new, and all up to there."""
        if self.shelf.ending:
            self.shelf.sweep()
        stream = self.arena.stream()
        if stream != self.stream:
            # Giving memory back has to wait for that one, too.
            self.arena.use_on(stream)
            self.stream = stream
        end = at + more
        self.reserve(end)
        self.to_keys, self.to_values = self.keys.narrow(3, at, more).unbind(), self.values.narrow(3, at, more).unbind()
        self.all_keys, self.all_values = self.keys.narrow(3, 0, end).unbind(), self.values.narrow(3, 0, end).unbind()
        self.at, self.more = at, more


class ArenaLayer(DynamicLayer):
    """Keys and values of one layer: a length and a number."""

    def __init__(self, cache, number):
        self.cache, self.number = weakref.ref(cache), number
        self.store = None
        self.length = 0
        super().__init__()

    def lazy_initialization(self, key_states, value_states):
        """Takes part in the cache's memory."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.store = self.cache().store_for(key_states, value_states)
        self.is_initialized = True

    def update(self, key_states, value_states, *_, **__):
        """Adds the new positions and answers all of them, as [batch, heads, length, width]."""
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
        at, store = self.length, self.store
        batch, heads, more, width = key_states.shape
        # A copy would repeat or convert what does not match.
        if (batch, heads, width) != store.key_shape or value_states.shape[2] != more or key_states.dtype != store.dtype:
            store.check(key_states, value_states)
        if store.at != at or store.more != more:
            store.begin_step(at, more)
        number = self.number
        store.to_keys[number].copy_(key_states)
        store.to_values[number].copy_(value_states)
        self.length = at + more
        if at == 0:
            # A prompt attends to itself only, and these lie closer together.
            return key_states, value_states
        return store.all_keys[number], store.all_values[number]

    @property
    def keys(self):
        """The keys there are; a view."""
        return None if self.store is None else self.store.keys[self.number].narrow(2, 0, self.length)

    @keys.setter
    def keys(self, value):
        self._refuse(value)

    @property
    def values(self):
        """The values there are; a view."""
        return None if self.store is None else self.store.values[self.number].narrow(2, 0, self.length)

    @values.setter
    def values(self, value):
        self._refuse(value)

    def _refuse(self, value):
        if value is not None:
            raise NotImplementedError("the keys and values of an arena are changed in place only")

    def get_seq_length(self):
        """Positions there are."""
        return self.length

    def reset(self):
        """Forgets all positions; the memory stays for the next ones."""
        self.length = 0

    def crop(self, tokens_to_remove):
        """Forgets positions at the end: as many as the negative number says, or all but so many as the positive one does."""
        left = tokens_to_remove if tokens_to_remove > 0 else self.length + tokens_to_remove
        self.length = max(min(self.length, left), 0)

    def reorder_cache(self, beam_idx):
        """Sorts the sequences for beam search."""
        if self.length:
            order = beam_idx.to(self.device)
            self.keys.copy_(self.keys.index_select(0, order))
            self.values.copy_(self.values.index_select(0, order))


class ArenaCache(DynamicCache):
    """As `DynamicCache`, in place, for models whose layers all have keys and values of one shape and full attention."""

    def __init__(self, config, on=None):
        """`config` is the model's. `on` is a `Shelf`; by default that of the device of the first keys."""
        super().__init__()
        config = config.get_text_config(decoder=True)
        if getattr(config, "sliding_window", None) and "sliding_attention" in (getattr(config, "layer_types", None) or ()):
            raise NotImplementedError("no sliding windows")
        self.config, self.on, self.store = config, on, None
        self.layers = [ArenaLayer(self, number) for number in range(config.num_hidden_layers)]

    def reserve(self, batch, tokens, dtype=None, device=0):
        """Takes the memory for a prompt before it is computed: what does not fit is refused at once, and PyTorch's free memory makes
        room if there is no work queued on it."""
        config = self.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if self.store is None:
            on = self.on or shelf(device)
            on.sweep()
            shape = (batch, heads, width)
            self.store = Store(on, len(self.layers), shape, shape, dtype or config.dtype or torch.get_default_dtype())
        self.store.reserve(tokens)

    def store_for(self, key_states, value_states):
        """The memory of all layers, made for the first one."""
        if self.store is None:
            on = self.on or shelf(key_states.device.index or 0)
            shapes = [(s.shape[0], s.shape[1], s.shape[3]) for s in (key_states, value_states)]
            self.store = Store(on, len(self.layers), *shapes, key_states.dtype)
        self.store.check(key_states, value_states)
        return self.store

    def update(self, key_states, value_states, layer_idx, *_, **__):
        """What a model calls in each layer."""
        return self.layers[layer_idx].update(key_states, value_states)

    def close(self):
        """Gives the memory back, as the end of the cache does. No view of it may be used afterwards."""
        for layer in self.layers:
            layer.store = None
            layer.length = 0
        if self.store is not None:
            self.store.close()
            self.store = None
