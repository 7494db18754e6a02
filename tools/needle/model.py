"""The needle model in torch: geometry, weights as they will be stored, layers for training.

Weights live twice: a float32 master that the optimiser moves, and what the forward pass uses, which
is what a reader of the exported file sees: FP8 e4m3 in 128 x 128 blocks with power-of-two scales for
the product weights, bf16 for the rest. Gradients are taken at the rounded weights and applied to the
masters. Latents and index vectors are rounded to e4m3 in the forward pass too, as a cache keeps them.
"""
import math

import torch
import torch.nn.functional as F

HIDDEN, INTER, MOE = 256, 1024, 128
LAYERS, DENSE, HEADS = 6, 2, 8
Q_LORA, KV_LORA, NOPE, ROPE, V_DIM = 128, 512, 64, 64, 64
INDEX_HEADS, INDEX_DIM, TOPK = 4, 128, 128
EXPERTS, ACTIVE, ROUTE_SCALE = 8, 2, 2.5
VOCAB = 4096
THETA, EPS, INDEX_EPS = 8e6, 1e-5, 1e-6
MAX_POS = 1 << 20
FULL = (0, 3, LAYERS)                      # layers with an indexer; LAYERS is the MTP layer
HEAD_DIM = NOPE + ROPE
BLOCK = 128

# kind -> (how many, shape, stored as, optimiser, initial deviation; None: ones, 0: zeros)
KINDS = {
    "embed": (1, (VOCAB, HIDDEN), "bf16", "adam", 0.5),
    "head": (1, (VOCAB, HIDDEN), "bf16", "adam", 0.01),
    "norm": (1, (HIDDEN,), "norm", "adam", None),
    "ln_in": (LAYERS + 1, (HIDDEN,), "norm", "adam", None),
    "ln_post": (LAYERS + 1, (HIDDEN,), "norm", "adam", None),
    "q_a": (LAYERS + 1, (Q_LORA, HIDDEN), "fp8", "muon", HIDDEN**-0.5),
    "q_ln": (LAYERS + 1, (Q_LORA,), "norm", "adam", None),
    "q_b": (LAYERS + 1, (HEADS * HEAD_DIM, Q_LORA), "fp8", "muon", Q_LORA**-0.5),
    "kv_a": (LAYERS + 1, (KV_LORA + ROPE, HIDDEN), "fp8", "muon", HIDDEN**-0.5),
    "kv_ln": (LAYERS + 1, (KV_LORA,), "norm", "adam", None),
    "kv_b": (LAYERS + 1, (HEADS * (NOPE + V_DIM), KV_LORA), "fp8", "muon", KV_LORA**-0.5),
    "o": (LAYERS + 1, (HIDDEN, HEADS * V_DIM), "fp8", "muon", 0),
    "wq_b": (3, (INDEX_HEADS * INDEX_DIM, Q_LORA), "fp8", "muon", Q_LORA**-0.5),
    "wk": (3, (INDEX_DIM, HIDDEN), "fp8", "muon", HIDDEN**-0.5),
    "kn_w": (3, (INDEX_DIM,), "norm", "adam", None),
    "kn_b": (3, (INDEX_DIM,), "norm", "adam", 0),
    "wp": (3, (INDEX_HEADS, HIDDEN), "bf16", "adam", HIDDEN**-0.5),
    "gate": (DENSE, (INTER, HIDDEN), "fp8", "muon", HIDDEN**-0.5),
    "up": (DENSE, (INTER, HIDDEN), "fp8", "muon", HIDDEN**-0.5),
    "down": (DENSE, (HIDDEN, INTER), "fp8", "muon", 0),
    "router": (LAYERS + 1 - DENSE, (EXPERTS, HIDDEN), "bf16", "adam", HIDDEN**-0.5),
    "bias": (LAYERS + 1 - DENSE, (EXPERTS,), "f32", "none", 0),
    # the shared expert is the last of the EXPERTS + 1
    "e_gate": (LAYERS + 1 - DENSE, (EXPERTS + 1, MOE, HIDDEN), "fp8", "muon", HIDDEN**-0.5),
    "e_up": (LAYERS + 1 - DENSE, (EXPERTS + 1, MOE, HIDDEN), "fp8", "muon", HIDDEN**-0.5),
    "e_down": (LAYERS + 1 - DENSE, (EXPERTS + 1, HIDDEN, MOE), "fp8", "muon", 0),
    "enorm": (1, (HIDDEN,), "norm", "adam", None),
    "hnorm": (1, (HIDDEN,), "norm", "adam", None),
    "sh_norm": (1, (HIDDEN,), "norm", "adam", None),
    "eh": (1, (HIDDEN, 2 * HIDDEN), "bf16", "muon", (2 * HIDDEN)**-0.5),
}


def pow2_scale(amax):
    """Smallest power of two s with amax / s <= 448; 1 where amax is 0."""
    scale = torch.exp2(torch.ceil(torch.log2(amax.clamp_min(1e-30) / 448.0)))
    return torch.where(amax > 0, scale, torch.ones_like(scale))


def e4m3(x):
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def quantise_blocks(weight):
    """[..., o, i] float32 -> (e4m3 [..., o, i], scales [..., ceil(o/128), ceil(i/128)])."""
    *lead, rows, cols = weight.shape
    tall, wide = -(-rows // BLOCK), -(-cols // BLOCK)
    padded = F.pad(weight, (0, wide * BLOCK - cols, 0, tall * BLOCK - rows))
    blocks = padded.reshape(*lead, tall, BLOCK, wide, BLOCK)
    scale = pow2_scale(blocks.abs().amax(dim=(-3, -1)))
    stored = e4m3(blocks / scale[..., :, None, :, None])
    stored = stored.reshape(*lead, tall * BLOCK, wide * BLOCK)[..., :rows, :cols]
    return stored, scale


def stored_value(master, form):
    """What a reader of the exported file computes with."""
    if form == "fp8":
        stored, scale = quantise_blocks(master)
        wide = scale.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
        return (stored.float() * wide[..., :stored.shape[-2], :stored.shape[-1]]).bfloat16()
    if form == "bf16":
        return master.bfloat16()
    return master.bfloat16().float() if form == "norm" else master


class Weights:
    """master[kind]: [n, ...] float32; use[kind][i]: what layer i multiplies with, a leaf with .grad."""

    def __init__(self, device, seed=1):
        gen = torch.Generator().manual_seed(seed)
        self.master, self.stack, self.grad, self.use = {}, {}, {}, {}
        for kind, (n, shape, form, how, std) in KINDS.items():
            value = torch.ones(n, *shape) if std is None else torch.randn(n, *shape, generator=gen) * std
            self.master[kind] = value.to(device)
            self.stack[kind] = stored_value(self.master[kind], form).contiguous()
            self.grad[kind] = torch.zeros_like(self.stack[kind])
            self.use[kind] = [t.detach() for t in self.stack[kind].unbind(0)]
            if how != "none":
                for leaf, grad in zip(self.use[kind], self.grad[kind].unbind(0)):
                    leaf.requires_grad_(True)
                    leaf.grad = grad
        self.refresh()

    @torch.no_grad()
    def refresh(self):
        for kind, (_, _, form, _, _) in KINDS.items():
            self.stack[kind].copy_(stored_value(self.master[kind], form))

    def zero_grad(self):
        for grad in self.grad.values():
            grad.zero_()

    def state(self):
        return {k: (v.cpu() if KINDS[k][2] == "f32" else v.bfloat16().cpu()) for k, v in self.master.items()}

    @torch.no_grad()
    def load(self, state):
        for kind, value in state.items():
            self.master[kind].copy_(value.to(self.master[kind].device))
        self.refresh()

    def count(self):
        return sum(v.numel() for v in self.master.values())


# ---- pieces of the forward pass; rows are tokens, [N, width], whatever sequence they are of

def rms(x, weight):
    x = x.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight).bfloat16()


def rope_table(pos):
    """cos, sin [N, 32] of integer positions; the angle is a float32 product, as engines form it."""
    inv = (1.0 / THETA ** (torch.arange(0, ROPE, 2, dtype=torch.float64) / ROPE)).float()
    angle = pos.float()[:, None] * inv.to(pos.device)[None]
    return torch.cos(angle), torch.sin(angle)


def rotate(x, cos, sin):
    """Interleaved pairs of the last dimension; x [N, ..., 64]."""
    pair = x.float().unflatten(-1, (-1, 2))
    while cos.dim() < pair.dim() - 1:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    a, b = pair[..., 0], pair[..., 1]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).bfloat16()


def round_e4m3(x, width):
    """Rounds runs of `width` to e4m3 with one power-of-two scale each; the gradient passes through."""
    run = x.float().unflatten(-1, (-1, width))
    scale = pow2_scale(run.abs().amax(-1, keepdim=True).clamp_min(1e-4)).detach()
    near = (e4m3((run / scale).detach()).float() * scale).flatten(-2)
    flat = run.flatten(-2)
    return (flat + (near - flat).detach()).bfloat16()


def query(x, ln, q_a, q_ln, q_b, cos, sin):
    """-> (normed input [N, 256], query latent [N, 128], q [N, 8, 128] = nope | rotated rope)."""
    h = rms(x, ln)
    lat = rms(h @ q_a.t(), q_ln)
    q = (lat @ q_b.t()).unflatten(-1, (HEADS, HEAD_DIM))
    return h, lat, torch.cat((q[..., :NOPE], rotate(q[..., NOPE:], cos, sin)), -1)


def latent(h, kv_a, kv_ln, cos, sin):
    """-> (latent as cached [N, 512], rotated key part [N, 64])."""
    raw = h @ kv_a.t()
    return round_e4m3(rms(raw[..., :KV_LORA], kv_ln), 128), rotate(raw[..., KV_LORA:], cos, sin)


def keys_values(c, k_pe, kv_b):
    kv = (c @ kv_b.t()).unflatten(-1, (HEADS, NOPE + V_DIM))
    k = torch.cat((kv[..., :NOPE], k_pe.unsqueeze(1).expand(-1, HEADS, -1)), -1)
    return k, kv[..., NOPE:].contiguous()


def pre(x, ln, q_a, q_ln, q_b, kv_a, kv_ln, kv_b, cos, sin):
    h, lat, q = query(x, ln, q_a, q_ln, q_b, cos, sin)
    c, k_pe = latent(h, kv_a, kv_ln, cos, sin)
    k, v = keys_values(c, k_pe, kv_b)
    return h, lat, q, k, v


def index_vectors(h, lat, wq_b, wk, kn_w, kn_b, wp, cos, sin):
    """-> (query [N, 4, 128], key [N, 128], weights [N, 4] float32), vectors rounded to e4m3."""
    q = (lat @ wq_b.t()).unflatten(-1, (INDEX_HEADS, INDEX_DIM))
    k = F.layer_norm((h @ wk.t()).float(), (INDEX_DIM,), kn_w, kn_b, INDEX_EPS).bfloat16()
    q = torch.cat((rotate(q[..., :ROPE], cos, sin), q[..., ROPE:]), -1)
    k = torch.cat((rotate(k[..., :ROPE], cos, sin), k[..., ROPE:]), -1)
    w = (h.float() @ wp.float().t()) * (INDEX_HEADS**-0.5 * INDEX_DIM**-0.5)
    return round_e4m3(q, INDEX_DIM), round_e4m3(k, INDEX_DIM), w


def swiglu(h, gate, up):
    return F.silu((h @ gate.t()).float()) * (h @ up.t()).float()


def post_dense(x, att, o, ln, gate, up, down):
    x = x + (att @ o.t()).float()
    h = rms(x, ln)
    return x + (swiglu(h, gate, up).bfloat16() @ down.t()).float()


def post_moe(x, att, o, ln, router, bias, gate, up, down):
    """Every expert runs on every row, scaled by the router's weight or 0. -> (x, rows per expert)."""
    x = x + (att @ o.t()).float()
    h = rms(x, ln)
    score = torch.sigmoid(h.float() @ router.float().t())
    choice, picked = score.detach() + bias, torch.zeros_like(score)
    expert = torch.arange(EXPERTS, device=x.device)
    for _ in range(ACTIVE):                              # fuses, which topk over so few does not
        best = expert == choice.masked_fill(picked > 0, -math.inf).argmax(-1, keepdim=True)
        picked = picked + best
    weight = score * picked
    weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * ROUTE_SCALE
    weight = torch.cat((weight, torch.ones_like(weight[:, :1])), -1)
    inner = swiglu(h, gate.flatten(0, 1), up.flatten(0, 1)).unflatten(-1, (EXPERTS + 1, MOE))
    inner = (inner * weight.unsqueeze(-1)).flatten(1).bfloat16()
    return x + (inner @ down.permute(0, 2, 1).flatten(0, 1)).float(), picked.sum(0)


def mtp_input(emb, hidden, enorm, hnorm, eh):
    return (torch.cat((rms(emb, enorm), rms(hidden, hnorm)), -1) @ eh.t()).float()


def token_loss(h, head, target, weight):
    """Sum over rows of weight * nats, and (rows right) as a float mask."""
    logits = (h @ head.t()).float()
    lse = torch.logsumexp(logits, -1)
    nats = lse - logits.gather(1, target[:, None]).squeeze(1)
    return (nats * weight).sum(), nats.detach(), (logits.argmax(-1) == target)


SCALE = HEAD_DIM**-0.5


def attend_plain(q, k, v, mask):
    """[B, T, 8, d] tensors, mask [B or 1, T, T] bool: the slow way, for checks and for the CPU."""
    s = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * SCALE
    p = torch.softmax(s.masked_fill(~mask[:, None], -math.inf), -1)
    return torch.einsum("bhqk,bkhd->bqhd", p, v.float()).bfloat16()
