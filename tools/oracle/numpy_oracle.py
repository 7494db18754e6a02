#!/usr/bin/env python3
"""A forward pass of the MLA / sparse attention family in numpy and double precision.

Written from the mathematics (docs/models.md), not from any implementation, for two purposes: to be
compared with transformers where both define a result, and to give expected results where
transformers has none: config eps in the latent norms, FP8 index keys, quantised cache rows, bf16
products, MTP. Reads any checkpoint folder (f32, bf16, FP8 blocks; one file or shards). numpy only.

    numpy_oracle.py FOLDER TOKEN... [--kv FORMAT] [--index f32|fp8] [--act stored|f32]
                    [--latent-eps E] [--hadamard]
prints the five best next tokens with their logits.

With every option at its default nothing is rounded anywhere but the rope angle, which is an f32
product of position and frequency as everywhere in the field. The options round exactly these:
  kv        rows of the cache as attention reads them: bf16, fp8 (k_scale 1), fp8_ds_mla; all but f32
            also round the query (absorbed part and rope part) to bf16
  index     fp8: index keys and index queries, each with the pow2 scale of its 128 values
  act       stored: the input of every product whose weight is stored in bf16 or FP8, and FP8 weights
            once they are multiplied by their scale (the absorption matrices are such weights); with
            an f32 checkpoint that is nothing. f32: never
  hadamard  index vectors are rotated, without a rounding, ahead of their quantisation"""
import argparse
import json
import math
import mmap
import os
import sys
from dataclasses import dataclass, field

import numpy as np

from make_tiny import E4M3, e4m3_codes

# ---- numbers -----------------------------------------------------------------------------------


def bf16(x):
    u = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    u = (u + 0x7FFF + ((u >> np.uint64(16)) & np.uint64(1))) & np.uint64(0xFFFF0000)
    return u.astype(np.uint32).view(np.float32).astype(np.float64)


def f32(x):
    return np.asarray(x).astype(np.float32).astype(np.float64)


def e4m3(x):
    return E4M3[e4m3_codes(x)]


def pow2_up(x):
    """The smallest power of two that is not below x > 0."""
    m, e = np.frexp(x)
    return np.ldexp(1.0, e - (m == 0.5))


def quantise_index(x):
    """(values before the scale, scale) over the last axis of 128."""
    amax = np.abs(x).max(axis=-1, keepdims=True)
    s = pow2_up(f32(f32(np.maximum(amax, 1e-4)) / 448))
    return e4m3(f32(f32(x) / s)), s


def store_row(c, pe, kv):
    """Latent and rope part of a row as attention will read them."""
    if kv == "f32":
        return c, pe
    if kv == "bf16":
        return bf16(c), bf16(pe)
    if kv == "fp8":
        return e4m3(f32(c)), e4m3(f32(pe))
    assert kv == "fp8_ds_mla", kv
    t = f32(c).reshape(c.shape[0], -1, 128)
    s = pow2_up(np.maximum(f32(np.abs(t).max(axis=-1, keepdims=True) / 448), 1e-4))
    return (e4m3(t / s) * s).reshape(c.shape), bf16(pe)


def hadamard(x):
    """Walsh-Hadamard transform of the last axis, orthonormal."""
    n = x.shape[-1]
    y, h = x.copy(), 1
    while h < n:
        y = y.reshape(x.shape[:-1] + (n // (2 * h), 2, h))
        y = np.stack([y[..., 0, :] + y[..., 1, :], y[..., 0, :] - y[..., 1, :]], axis=-2)
        h *= 2
    return y.reshape(x.shape) / math.sqrt(n)


def rms(x, w, eps):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * w


def silu(x):
    return x / (1 + np.exp(-x))


# ---- checkpoint --------------------------------------------------------------------------------


class Checkpoint:
    """Tensors of a folder as f64; FP8 blocks multiplied by their scales, in f32 and then bf16 where
    `rounded`."""

    def __init__(self, folder, rounded=True):
        self.rounded = rounded
        with open(os.path.join(folder, "config.json")) as f:
            self.config = json.load(f)
        index = os.path.join(folder, "model.safetensors.index.json")
        names = ["model.safetensors"]
        if os.path.exists(index):
            with open(index) as f:
                names = sorted(set(json.load(f)["weight_map"].values()))
        self.where, self.maps, self.kept = {}, [], {}
        for name in names:
            with open(os.path.join(folder, name), "rb") as f:
                data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
            n = int.from_bytes(data[:8], "little")
            for key, item in json.loads(data[8:8 + n]).items():
                if key != "__metadata__":
                    self.where[key] = (len(self.maps), item, 8 + n)
            self.maps.append(data)

    def __contains__(self, name):
        return name in self.where

    def is_f32(self, name):
        return self.where[name][1]["dtype"] == "F32"

    def raw(self, name):
        at, item, base = self.where[name]
        lo, hi = item["data_offsets"]
        data = self.maps[at][base + lo:base + hi]
        if item["dtype"] == "F32":
            x = np.frombuffer(data, "<f4").astype(np.float64)
        elif item["dtype"] == "BF16":
            x = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        elif item["dtype"] == "F8_E4M3":
            x = E4M3[np.frombuffer(data, np.uint8)]
        else:
            raise ValueError("%s: type %s" % (name, item["dtype"]))
        return x.reshape(item["shape"])

    def __getitem__(self, name):
        if name not in self.kept:
            w = self.raw(name)
            if name + "_scale_inv" in self:
                s = self.raw(name + "_scale_inv")
                s = np.repeat(np.repeat(s, 128, axis=0)[:w.shape[0]], 128, axis=1)[:, :w.shape[1]]
                w = bf16(f32(w * s)) if self.rounded else w * s
            self.kept[name] = w
        return self.kept[name]


# ---- model -------------------------------------------------------------------------------------


@dataclass
class Options:
    kv: str = "f32"
    index: str = "f32"
    act: str = "stored"
    hadamard: bool = False
    latent_eps: float = None      # None: the config's


@dataclass
class Cache:
    """Rows of one layer, as stored."""
    c: np.ndarray = None
    pe: np.ndarray = None
    key: np.ndarray = None        # index keys, the scale multiplied in: exact, it is a power of two

    def append(self, name, rows):
        old = getattr(self, name)
        setattr(self, name, rows if old is None else np.concatenate([old, rows]))

    def cut(self, n):
        return Cache(*(None if x is None else x[:n] for x in (self.c, self.pe, self.key)))


@dataclass
class Trace:
    """What a pass saw, by layer: rows x ... arrays."""
    hidden: list = field(default_factory=list)     # residual stream after each layer
    selected: dict = field(default_factory=dict)   # layer: list of ascending positions per row
    gap: dict = field(default_factory=dict)        # layer: score gap at the boundary per row
    experts: dict = field(default_factory=dict)    # layer: [rows, k], best first
    expert_gap: dict = field(default_factory=dict)


class Model:
    def __init__(self, checkpoint, options=None):
        self.w, self.o, c = checkpoint, options or Options(), checkpoint.config
        self.c = c
        self.hidden, self.heads, self.layers = (
            c["hidden_size"], c["num_attention_heads"], c["num_hidden_layers"])
        self.dn, self.dr, self.dv, self.rk = (
            c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"], c["kv_lora_rank"])
        self.rq = c.get("q_lora_rank")
        self.eps = c["rms_norm_eps"]
        self.latent_eps = self.eps if self.o.latent_eps is None else self.o.latent_eps
        self.topk = c.get("index_topk", 0)
        self.freq, m = self.rope_frequencies()
        self.scale = (self.dn + self.dr) ** -0.5 * m * m
        self.caches = [Cache() for _ in range(self.layers + c.get("num_nextn_predict_layers", 0))]
        self.length = 0

    # -- rope

    def rope_frequencies(self):
        """(f32 frequencies, m of the softmax scale)"""
        c = self.c
        p = c.get("rope_parameters") or dict(c.get("rope_scaling") or {})
        theta = p.get("rope_theta", c.get("rope_theta"))
        i = np.arange(self.dr // 2)
        freq = theta ** (-2.0 * i / self.dr)
        if p.get("rope_type", p.get("type", "default")) != "yarn":
            return freq.astype(np.float32), 1.0
        orig, factor = p["original_max_position_embeddings"], p["factor"]

        def corr(rotations):
            return self.dr * math.log(orig / (2 * math.pi * rotations)) / (2 * math.log(theta))

        low = max(math.floor(corr(p["beta_fast"])), 0)
        high = min(math.ceil(corr(p["beta_slow"])), self.dr - 1)
        ramp = np.clip((i - low) / ((high - low) or 0.001), 0, 1)
        freq = freq * (1 - ramp) + freq / factor * ramp
        all_dim = p.get("mscale_all_dim", 0)
        m = 0.1 * all_dim * math.log(factor) + 1 if factor > 1 and all_dim else 1.0
        return freq.astype(np.float32), m

    def rotate(self, x, pos, interleaved):
        """The last axis (dr) of x [rows, ..., dr], rows at positions pos."""
        angle = (pos.astype(np.float32)[:, None] * self.freq[None, :]).astype(np.float64)
        shape = (len(pos),) + (1,) * (x.ndim - 2) + (-1,)
        cos, sin = np.cos(angle).reshape(shape), np.sin(angle).reshape(shape)
        half = self.dr // 2
        a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
        y = np.empty_like(x)
        if interleaved:
            y[..., 0::2], y[..., 1::2] = a * cos - b * sin, a * sin + b * cos
        else:
            y[..., :half], y[..., half:] = a * cos - b * sin, a * sin + b * cos
        return y

    # -- products

    def act(self, x, name):
        """x as the product with this weight takes it."""
        return x if self.o.act == "f32" or self.w.is_f32(name) else bf16(x)

    def mul(self, x, name):
        return self.act(x, name) @ self.w[name].T

    # -- attention

    def select(self, p, x, q_lat, pos, cache):
        """Index keys into the cache; per row the selected positions and the gap at the boundary."""
        n, d = self.c["index_n_heads"], self.c["index_head_dim"]
        q = self.mul(q_lat, p + "wq_b.weight").reshape(len(pos), n, d)
        k = self.mul(x, p + "wk.weight")
        k = k - k.mean(axis=-1, keepdims=True)
        k = k / np.sqrt((k * k).mean(axis=-1, keepdims=True) + 1e-6)
        k = k * self.w[p + "k_norm.weight"] + self.w[p + "k_norm.bias"]
        style = self.c.get("indexer_rope_interleave", False)
        q = np.concatenate([self.rotate(q[..., :self.dr], pos, style), q[..., self.dr:]], axis=-1)
        k = np.concatenate([self.rotate(k[..., :self.dr], pos, style), k[..., self.dr:]], axis=-1)
        if self.o.hadamard:
            q, k = hadamard(q), hadamard(k)
        if self.o.index == "fp8":
            (q, sq), (k, sk) = quantise_index(q), quantise_index(k)
            q, k = q * sq, k * sk
        cache.append("key", k)
        weights = self.mul(x, p + "weights_proj.weight") * d ** -0.5 * n ** -0.5
        s = np.zeros((len(pos), len(cache.key)))
        for h in range(n):
            s += weights[:, h:h + 1] * np.maximum(q[:, h] @ cache.key.T, 0)
        sets, gaps = [], []
        for row, at in enumerate(pos):
            row_s = s[row, :at + 1]
            order = np.argsort(-row_s, kind="stable")
            sets.append(np.sort(order[:self.topk]).astype(np.int32))
            gaps.append(row_s[order[self.topk - 1]] - row_s[order[self.topk]]
                        if at >= self.topk else np.inf)
        return sets, np.array(gaps)

    def attend(self, q, cache, pos, sets):
        """q [rows, heads, rk + dr]; latent outputs [rows, heads, rk]."""
        k = np.concatenate([cache.c, cache.pe], axis=-1)
        out = np.empty(q.shape[:2] + (self.rk,))
        for row, at in enumerate(pos):
            keys = k[sets[row]] if sets is not None else k[:at + 1]
            s = q[row] @ keys.T * self.scale
            prob = np.exp(s - s.max(axis=-1, keepdims=True))
            out[row] = prob @ keys[:, :self.rk] / prob.sum(axis=-1, keepdims=True)
        return out

    def attention(self, p, x, pos, cache, sets, layer, trace):
        """(output, selected sets of this layer's own indexer or those given)"""
        if self.rq:
            q_lat = rms(self.mul(x, p + "q_a_proj.weight"), self.w[p + "q_a_layernorm.weight"],
                        self.latent_eps)
            q = self.mul(q_lat, p + "q_b_proj.weight")
        else:
            q_lat, q = None, self.mul(x, p + "q_proj.weight")
        q = q.reshape(len(pos), self.heads, self.dn + self.dr)
        raw = self.mul(x, p + "kv_a_proj_with_mqa.weight")
        c = rms(raw[:, :self.rk], self.w[p + "kv_a_layernorm.weight"], self.latent_eps)
        rows = store_row(c, self.rotate(raw[:, self.rk:], pos, True), self.o.kv)
        cache.append("c", rows[0])
        cache.append("pe", rows[1])
        if p + "indexer.wk.weight" in self.w and sets is None:
            sets, gaps = self.select(p + "indexer.", x, q_lat, pos, cache)
            trace.gap[layer] = gaps
        if sets is not None:
            trace.selected[layer] = sets
        name = p + "kv_b_proj.weight"
        kv_b = self.w[name].reshape(self.heads, self.dn + self.dv, self.rk)
        uk, uv = kv_b[:, :self.dn], kv_b[:, self.dn:]
        q = np.concatenate([np.einsum("rhd,hdc->rhc", self.act(q[..., :self.dn], name), uk),
                            self.rotate(q[..., self.dn:], pos, True)], axis=-1)
        if self.o.kv != "f32":
            q = bf16(q)
        o = self.attend(q, cache, pos, sets)
        o = np.einsum("rhc,hdc->rhd", self.act(o, name), uv).reshape(len(pos), -1)
        return self.mul(o, p + "o_proj.weight"), sets

    # -- feed-forward

    def mlp(self, p, x):
        y = silu(self.mul(x, p + "gate_proj.weight")) * self.mul(x, p + "up_proj.weight")
        return self.mul(y, p + "down_proj.weight")

    def route(self, p, x):
        """(experts [rows, k] best first, weights, gap between the last chosen and the next)"""
        c, k = self.c, self.c["num_experts_per_tok"]
        logits = self.mul(x, p + "gate.weight")
        if c.get("scoring_func", "sigmoid") == "softmax":
            s = np.exp(logits - logits.max(axis=-1, keepdims=True))
            s /= s.sum(axis=-1, keepdims=True)
            choice = s
        else:
            s = 1 / (1 + np.exp(-logits))
            choice = s + self.w[p + "gate.e_score_correction_bias"]
        groups, gap = c.get("n_group", 1), np.full(len(x), np.inf)
        if groups > 1 and c["topk_method"] != "greedy":
            g = np.sort(choice.reshape(len(x), groups, -1), axis=-1)
            score = g[..., -2:].sum(axis=-1) if c["topk_method"] == "noaux_tc" else g[..., -1]
            order = np.argsort(-score, axis=-1, kind="stable")
            ranked = np.take_along_axis(score, order, axis=-1)
            gap = ranked[:, c["topk_group"] - 1] - ranked[:, c["topk_group"]]
            keep = np.zeros(score.shape, bool)
            np.put_along_axis(keep, order[:, :c["topk_group"]], True, axis=-1)
            choice = np.where(np.repeat(keep, s.shape[1] // groups, axis=1), choice, -np.inf)
        order = np.argsort(-choice, axis=-1, kind="stable")
        ranked = np.take_along_axis(choice, order, axis=-1)
        gap = np.minimum(gap, ranked[:, k - 1] - ranked[:, k])
        idx = order[:, :k]
        wt = np.take_along_axis(s, idx, axis=-1)
        if c["norm_topk_prob"]:
            wt = wt / (wt.sum(axis=-1, keepdims=True) + 1e-20)
        return idx.astype(np.int32), wt * c["routed_scaling_factor"], gap

    def feed_forward(self, p, x, layer, trace):
        if p + "gate.weight" not in self.w:
            return self.mlp(p, x)
        idx, wt, gap = self.route(p, x)
        trace.experts[layer], trace.expert_gap[layer] = idx, gap
        y = self.mlp(p + "shared_experts.", x)
        for e in np.unique(idx):
            row, col = np.nonzero(idx == e)
            y[row] += wt[row, col][:, None] * self.mlp("%sexperts.%d." % (p, e), x[row])
        return y

    def layer(self, i, x, pos, cache, sets, trace):
        p = "model.layers.%d." % i
        a = rms(x, self.w[p + "input_layernorm.weight"], self.eps)
        y, sets = self.attention(p + "self_attn.", a, pos, cache, sets, i, trace)
        x = x + y
        f = rms(x, self.w[p + "post_attention_layernorm.weight"], self.eps)
        return x + self.feed_forward(p + "mlp.", f, i, trace), sets

    # -- whole passes

    def head(self, h):
        return self.mul(h, "lm_head.weight")

    def forward(self, tokens):
        """Appends the tokens; (hidden after model.norm [rows, H], trace)."""
        tokens = np.asarray(tokens)
        pos = np.arange(self.length, self.length + len(tokens))
        x, sets, trace = self.w["model.embed_tokens.weight"][tokens], None, Trace()
        for i in range(self.layers):
            own = "model.layers.%d.self_attn.indexer.wk.weight" % i in self.w
            x, sets = self.layer(i, x, pos, self.caches[i], None if own else sets, trace)
            trace.hidden.append(x)
        self.length += len(tokens)
        return rms(x, self.w["model.norm.weight"], self.eps), trace

    def mtp_rows(self, h, tokens, pos, cache, sets, trace):
        """Rows of the MTP layer: h [rows, H] at positions pos, tokens[i] the one after h[i].
        (hidden after shared_head.norm, selected sets)"""
        p = "model.layers.%d." % self.layers
        e = self.w["model.embed_tokens.weight"][np.asarray(tokens)]
        u = np.concatenate([rms(e, self.w[p + "enorm.weight"], self.eps),
                            rms(h, self.w[p + "hnorm.weight"], self.eps)], axis=-1)
        z, sets = self.layer(self.layers, self.mul(u, p + "eh_proj.weight"), pos, cache, sets, trace)
        return rms(z, self.w[p + "shared_head.norm.weight"], self.eps), sets

    def mtp_first(self, h, tokens):
        """Step 0 over positions 0 .. rows-1 with the true next tokens; fills the MTP cache."""
        trace = Trace()
        g, sets = self.mtp_rows(h, tokens, np.arange(len(h)), self.caches[self.layers], None, trace)
        return g, sets, trace

    def mtp_chain(self, g, sets, n, steps, tokens=None):
        """Drafts after position n-1, whose step 0 gave g[n-1] and sets[n-1]: logits [steps, V] and
        the token drafted by each. Step j > 0 takes the hidden and the token of the step before (or
        tokens[j-1]) at position n-1+j. Where the selection is shared it attends the list of the last
        verified token, which holds no draft, but everything while no more than index_topk rows are
        there."""
        share = self.c.get("index_share_for_mtp_iteration", False) and sets is not None
        cache, h = self.caches[self.layers].cut(n), g[n - 1:n]
        logits, drafts, used = [], [], []
        for j in range(steps):
            if j > 0:
                at, own = n - 1 + j, None
                if share:
                    own = [np.arange(at + 1) if at + 1 <= self.topk else sets[n - 1]]
                token = drafts[-1] if tokens is None else tokens[j - 1]
                h, own = self.mtp_rows(h, [token], np.array([at]), cache, own, Trace())
                used.append(None if own is None else own[0])
            logits.append(self.head(h)[0])
            drafts.append(int(np.argmax(logits[-1])))
        return np.array(logits), np.array(drafts, np.int32), used


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("folder")
    p.add_argument("token", type=int, nargs="+")
    p.add_argument("--kv", default="f32", choices=["f32", "bf16", "fp8", "fp8_ds_mla"])
    p.add_argument("--index", default="f32", choices=["f32", "fp8"])
    p.add_argument("--act", default="stored", choices=["stored", "f32"])
    p.add_argument("--latent-eps", type=float)
    p.add_argument("--hadamard", action="store_true")
    a = p.parse_args()
    m = Model(Checkpoint(a.folder, a.act == "stored"), Options(a.kv, a.index, a.act, a.hadamard, a.latent_eps))
    h, _ = m.forward(a.token)
    logits = m.head(h[-1:])[0]
    for t in np.argsort(-logits)[:5]:
        print("%6d %9.5f" % (t, logits[t]))


if __name__ == "__main__":
    sys.exit(main())
