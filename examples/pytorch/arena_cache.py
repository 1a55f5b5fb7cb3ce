"""A KV cache for transformers whose keys and values lie in growable tensors: a token more costs no `torch.cat`."""

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import granule_torch


class ArenaLayer(DynamicLayer):
    """Keys and values of one layer, as [length, batch, heads, width]: the length is outermost, so that it grows in place."""

    def __init__(self, max_length, step):
        super().__init__()
        self.max_length, self.step = max_length, step
        self.store = None

    def update(self, key_states, value_states, *_, **__):
        """Adds the new positions and answers all of them, as [batch, heads, length, width]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.store is None:
            batch, heads, _, width = key_states.shape
            make = lambda: granule_torch.GrowableTensor(
                self.max_length, (batch, heads, width), key_states.dtype, key_states.device.index or 0)
            self.store = make(), make()
        at = self.store[0].rows
        end = at + key_states.shape[-2]
        if end > self.store[0]._open:
            # Some ahead: a call of the library for every `step` tokens.
            rows = max(min(-(-end // self.step) * self.step, self.max_length), end)
            granule_torch.GrowableTensor.reserve_all(self.store, rows)
        keys, values = (tensor.grow(end) for tensor in self.store)
        keys[at:].copy_(key_states.permute(2, 0, 1, 3))
        values[at:].copy_(value_states.permute(2, 0, 1, 3))
        self.keys, self.values = keys.permute(1, 2, 0, 3), values.permute(1, 2, 0, 3)
        return self.keys, self.values

    def close(self):
        """Gives the memory back."""
        self.keys = self.values = None
        for tensor in self.store or ():
            tensor.close()


class ArenaCache(DynamicCache):
    """As `DynamicCache`, in place. `max_length` positions are addresses only; memory is taken for what is there."""

    def __init__(self, max_length=16384, step=32):
        super().__init__()
        self.max_length, self.step = max_length, step

    def update(self, key_states, value_states, layer_idx, *rest, **more):
        """What a model calls in each layer."""
        while len(self.layers) <= layer_idx:
            self.layers.append(ArenaLayer(self.max_length, self.step))
        return self.layers[layer_idx].update(key_states, value_states, *rest, **more)

    def close(self):
        """Gives the memory back."""
        for layer in self.layers:
            layer.close()
