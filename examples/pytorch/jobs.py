"""The jobs that the allocators are compared on: real models with random weights, sizes that vary, seeds that do not.

Each job is a function `job(steps, device, size)` that is a generator: it yields the loss (or another figure of the results) after
each step, so that its caller can take the time. All of its memory is gone when it is exhausted or closed.
"""

import os
import random
import warnings

import torch
from torch import nn

SEED = 20


def deterministic():
    """Kernels that give the same bits for the same seeds, and no extra fills of memory."""
    warnings.filterwarnings("ignore", message=".*deterministic.*")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_tf32 = True
    if os.environ.get("GRANULE_JOBS_EXACT"):
        # The fused kernels of attention give other bits from run to run.
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def seeded(job):
    """The sizes of a job: a generator of its own, so that they do not depend on what else draws numbers."""
    torch.manual_seed(SEED)
    return random.Random(f"{job} {SEED}")


def llama(hidden, layers, vocab, inner, heads, device, **more):
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, max_position_embeddings=8192, attn_implementation="sdpa", use_cache=False, **more)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with device:
            return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def tokens(rng, vocab, rows, length, device):
    data = torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(rng.randrange(1 << 30)))
    return data.to(device)


def train(model, batch, optimizer):
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def llama_varlen(steps, device, size):
    """Pre-training: forward, backward, AdamW; a batch of 4 to 8 sequences of 128 to 2,048 tokens."""
    rng = seeded("llama_varlen")
    shape = dict(big=(1536, 12, 16000, 4096, 12), small=(64, 2, 128, 128, 2))[size]
    model = llama(*shape, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(steps):
        length = 8 * rng.randint(16, 256) if size == "big" else rng.randint(4, 32)
        yield train(model, tokens(rng, shape[2], rng.choice((4, 6, 8)) if size == "big" else 2, length, device), optimizer)


class Lora(nn.Module):
    """A frozen linear layer with a low-rank addition that is trained."""

    def __init__(self, base, rank):
        super().__init__()
        self.base = base
        weight = base.weight
        self.down = nn.Parameter(torch.randn(rank, base.in_features, dtype=weight.dtype, device=weight.device) * 0.02)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, dtype=weight.dtype, device=weight.device))

    def forward(self, x):
        return self.base(x) + nn.functional.linear(nn.functional.linear(x, self.down), self.up)


def llama_lora_ckpt(steps, device, size):
    """Fine-tuning: frozen weights, low-rank additions, activations computed again in the backward pass; long sequences."""
    rng = seeded("llama_lora_ckpt")
    shape = dict(big=(2048, 12, 32000, 5504, 16), small=(64, 2, 128, 128, 2))[size]
    model = llama(*shape, device)
    model.requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, Lora(getattr(layer.self_attn, name), 16))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(steps):
        length = 16 * rng.randint(16, 256) if size == "big" else rng.randint(4, 32)
        yield train(model, tokens(rng, shape[2], rng.choice((1, 2, 3)), length, device), optimizer)


class Block(nn.Sequential):
    def __init__(self, inside, outside):
        def conv(a, b):
            return nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()
        super().__init__(*conv(inside, outside), *conv(outside, outside))


class Unet(nn.Module):
    """A segmentation network: down with convolutions, up with transposed ones, with connections across."""

    def __init__(self, width, depth, classes):
        super().__init__()
        widths = [width << i for i in range(depth)]
        self.down = nn.ModuleList(Block(a, b) for a, b in zip([3, *widths], widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in zip(widths, widths[1:]))
        self.merge = nn.ModuleList(Block(2 * a, a) for a in widths[:-1])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        across = []
        for i, block in enumerate(self.down):
            x = block(x if i == 0 else nn.functional.max_pool2d(x, 2))
            across.append(x)
        for i in reversed(range(len(self.up))):
            x = self.merge[i](torch.cat((self.up[i](x), across[i]), 1))
        return self.head(x)


def segmentation_multires(steps, device, size):
    """Segmentation of images whose sides change with every batch, mixed precision."""
    rng = seeded("segmentation_multires")
    width, depth, classes = dict(big=(48, 5, 32), small=(4, 3, 5))[size]
    model = Unet(width, depth, classes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    unit = 1 << depth
    for _ in range(steps):
        high, wide = (unit * rng.randint(*((6, 26) if size == "big" else (1, 4))) for _ in range(2))
        rows = rng.choice((2, 4, 6)) if size == "big" else 2
        seed = torch.Generator().manual_seed(rng.randrange(1 << 30))
        images = torch.rand(rows, 3, high, wide, generator=seed).to(device)
        labels = torch.randint(classes, (rows * high * wide,), generator=seed).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            scores = model(images)
        # As one long list: the two-dimensional loss has no deterministic kernel.
        loss = nn.functional.cross_entropy(scores.float().permute(0, 2, 3, 1).reshape(-1, classes), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield float(loss.detach())


class Request:
    """A batch of sequences that are served together, and its cache."""

    def __init__(self, model, cache, prompt, count):
        self.model, self.cache, self.left = model, cache, count
        self.tokens = 0
        self.next = self.run(prompt)

    @torch.no_grad()
    def run(self, ids):
        out = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True)

    def step(self):
        """One token more for each sequence. False once there are enough."""
        self.next = self.run(self.next)
        self.tokens += self.next.shape[0]
        self.left -= 1
        return self.left > 0


def serving(steps, device, size, make_cache=None):
    """Serving: batches of sequences arrive with prompts of many lengths, several at a time, and each grows by a token a
    step; `make_cache(model, rows, length)` makes their KV caches, by default those that grow with `torch.cat`. Yields
    (tokens, check sum)."""
    if make_cache is None:
        from transformers import DynamicCache
        make_cache = lambda *_: DynamicCache()
    rng = seeded("serving")
    shape = dict(big=(2048, 8, 16000, 5504, 16), small=(64, 2, 128, 128, 2))[size]
    model = llama(*shape, device).eval()
    active = []
    for step in range(steps):
        # Three at a time; a new one whenever one has finished.
        while len(active) < 3:
            rows, length = (rng.choice((4, 8, 16)), 8 * rng.randint(16, 256)) if size == "big" else (2, rng.randint(4, 32))
            count = rng.randint(12, 48) if size == "big" else rng.randint(2, 6)
            prompt = tokens(rng, shape[2], rows, length, device)
            active.append(Request(model, make_cache(model, rows, length), prompt, count))
        done, check = 0, 0
        for request in list(active):
            before = request.tokens
            if not request.step():
                active.remove(request)
            done += request.tokens - before
            check += int(request.next.sum()) if step % 16 == 0 else 0
        yield done, check


JOBS = {job.__name__: job for job in (llama_varlen, llama_lora_ckpt, segmentation_multires, serving)}
STEPS = {"llama_varlen": 22, "llama_lora_ckpt": 18, "segmentation_multires": 22, "serving": 96}
