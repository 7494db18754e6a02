#!/usr/bin/env python3
"""Tiny checkpoints of every supported model family, written from a formula.

    make_tiny.py OUT [--variant NAME]... [--dtype f32|bf16|fp8]... [--shards N]

writes OUT/NAME-DTYPE/ (config.json, model.safetensors or N shards with an index). Needs numpy only.

Every weight is a function of (seed of the variant, tensor name, element index) in integer arithmetic,
so tests/oracle/mkmodel.c writes the same bytes without any data in the repository. This file and
mkmodel.c are two writings of one specification:

  key   = mix(fnv1a64(name) ^ seed * G)            G = 0x9E3779B97F4A7C15, mix = splitmix64's finaliser
  x_i   = mix(key + i * G)                         i: flat element index
  s_i   = sum of the eight bytes of x_i            0 .. 2040, near normal, mean 1020, std 209
  k_i   = (s_i + 4) / 8 - 128                      -128 .. 127: exact in bf16; std 26
  linear    k_i * 2^(e - shift(block))             shift in {0, 1, 2} by 128 x 128 block:
                                                   mix(key ^ (row / 128 * 4096 + col / 128 + 1)) % 3
  table     k_i * 2^-5                             embeddings
  norm      (128 + (x_i & 127) - 64) / 128         0.5 .. 1.4921875
  bias      k_i * 2^-7                             indexer.k_norm.bias
  router    (s_i - 1020) * 2^-10 + offset          e_score_correction_bias, always F32

e of a linear [out, in]: -4 - h + gain, h the smallest integer with 4^h >= in. Gains: q_a_proj and the
latent rows of kv_a_proj_with_mqa -5, so that the eps of the latent norms can be seen; q_b_proj,
q_proj and mlp.gate +1; all others 0. Dimensions come from the config template in tests/oracle/tiny.
FP8: per 128 x 128 block s = amax / 448 in f32 (1 for a block of zeros; the next power of two up where
the variant's scale_fmt is ue8m0), q = e4m3(w / s), round to nearest even."""
import argparse
import json
import os

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
TEMPLATES = os.path.join(HERE, "..", "..", "tests", "oracle", "tiny")

# seed, MTP layer carries copies of embedding and head, indexer.k_norm stored as F32, offset of the
# router's bias (a large negative one makes most choices negative), scales of FP8 are powers of two
VARIANTS = {
    "glm52": (5202, False, False, 0.0, False),
    "glm5": (503, False, False, 0.0, False),
    "v32": (3201, True, True, -0.75, True),
    "v3": (301, True, False, -0.75, False),
    "v2": (202, False, False, 0.0, False),
    "k2": (2201, False, False, 0.0, False),
    "moonlight": (1602, False, False, 0.0, False),
    "glm47": (4702, False, False, 0.0, False),
}
DTYPE_NAME = {"f32": "float32", "bf16": "bfloat16", "fp8": "bfloat16"}

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix_int(x):
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def mix(x):
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def fnv1a(data):
    h = 0xCBF29CE484222325
    for b in data:
        h = ((h ^ b) * 0x100000001B3) & MASK
    return h


def key_of(seed, name):
    return mix_int(fnv1a(name.encode()) ^ ((seed * GOLDEN) & MASK))


def draws(key, n):
    i = np.arange(n, dtype=np.uint64)
    return mix(np.uint64(key) + i * np.uint64(GOLDEN))


def byte_sum(x):
    m = np.uint64(0x00FF00FF00FF00FF)
    pairs = (x & m) + ((x >> np.uint64(8)) & m)
    return ((pairs * np.uint64(0x0001000100010001)) >> np.uint64(48)).astype(np.int64)


def tokens_of(variant, n, vocab):
    x = draws(key_of(VARIANTS[variant][0], "tokens"), n)
    return (x % np.uint64(vocab)).astype(np.int32)


def hidden_of(variant, n, width):
    """Hidden states made up for the draft layer alone: f32, exact in bf16."""
    x = draws(key_of(VARIANTS[variant][0], "hidden"), n * width)
    k = (byte_sum(x) + 4) // 8 - 128
    return (k.astype(np.float32) * np.float32(2.0 ** -5)).reshape(n, width)


def load_config(variant):
    with open(os.path.join(TEMPLATES, variant + ".json")) as f:
        return json.load(f)


def quantization(variant):
    q = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
         "weight_block_size": [128, 128]}
    if VARIANTS[variant][4]:
        q["scale_fmt"] = "ue8m0"
    return q


def config_text(variant, dtype):
    with open(os.path.join(TEMPLATES, variant + ".json")) as f:
        text = f.read().replace("@DTYPE@", DTYPE_NAME[dtype])
    if dtype == "fp8":
        assert text.endswith("\n}\n")
        text = text[:-3] + ',\n  "quantization_config": ' + json.dumps(quantization(variant)) + "\n}\n"
    return text


def half_log(n):
    h = 0
    while 4 ** h < n:
        h += 1
    return h


class Spec:
    """One tensor: name, shape, kind, gain and whether an FP8 checkpoint stores it as e4m3."""

    def __init__(self, name, shape, kind, gain=0, fp8=False, like=None):
        self.name, self.shape, self.kind, self.gain, self.fp8 = name, shape, kind, gain, fp8
        self.like = like or name


def attention_specs(c, p, has_indexer):
    hidden, heads, rk = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    dn, dr, dv = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    rq = c["q_lora_rank"]
    out = []
    if rq is None:
        out.append(Spec(p + "q_proj.weight", (heads * (dn + dr), hidden), "linear", 1))
    else:
        out.append(Spec(p + "q_a_proj.weight", (rq, hidden), "linear", -5, True))
        out.append(Spec(p + "q_a_layernorm.weight", (rq,), "norm"))
        out.append(Spec(p + "q_b_proj.weight", (heads * (dn + dr), rq), "linear", 1, True))
    out.append(Spec(p + "kv_a_proj_with_mqa.weight", (rk + dr, hidden), "latent", -5, True))
    out.append(Spec(p + "kv_a_layernorm.weight", (rk,), "norm"))
    out.append(Spec(p + "kv_b_proj.weight", (heads * (dn + dv), rk), "linear", 0, True))
    out.append(Spec(p + "o_proj.weight", (hidden, heads * dv), "linear", 0, True))
    if has_indexer:
        nidx, didx = c["index_n_heads"], c["index_head_dim"]
        out.append(Spec(p + "indexer.wq_b.weight", (nidx * didx, rq), "linear", 0, True))
        out.append(Spec(p + "indexer.wk.weight", (didx, hidden), "linear", 0, True))
        out.append(Spec(p + "indexer.k_norm.weight", (didx,), "norm"))
        out.append(Spec(p + "indexer.k_norm.bias", (didx,), "bias"))
        out.append(Spec(p + "indexer.weights_proj.weight", (nidx, hidden), "linear"))
    return out


def mlp_specs(p, hidden, inter):
    return [Spec(p + "gate_proj.weight", (inter, hidden), "linear", 0, True),
            Spec(p + "up_proj.weight", (inter, hidden), "linear", 0, True),
            Spec(p + "down_proj.weight", (hidden, inter), "linear", 0, True)]


def moe_specs(c, p):
    hidden, moe, n = c["hidden_size"], c["moe_intermediate_size"], c["n_routed_experts"]
    out = [Spec(p + "gate.weight", (n, hidden), "linear", 1)]
    if c["topk_method"] == "noaux_tc":
        out.append(Spec(p + "gate.e_score_correction_bias", (n,), "router"))
    for e in range(n):
        out += mlp_specs("%sexperts.%d." % (p, e), hidden, moe)
    return out + mlp_specs(p + "shared_experts.", hidden, c["n_shared_experts"] * moe)


def has_indexer(c, layer):
    if "index_topk" not in c:
        return False
    types = c.get("indexer_types")
    return types is None or layer >= len(types) or types[layer] == "full"


def tensor_specs(variant):
    """All tensors in the order in which they are written."""
    c = load_config(variant)
    copies = VARIANTS[variant][1]
    hidden, vocab, layers = c["hidden_size"], c["vocab_size"], c["num_hidden_layers"]
    out = [Spec("model.embed_tokens.weight", (vocab, hidden), "table")]
    for i in range(layers + c.get("num_nextn_predict_layers", 0)):
        p = "model.layers.%d." % i
        if i >= layers:
            out.append(Spec(p + "enorm.weight", (hidden,), "norm"))
            out.append(Spec(p + "hnorm.weight", (hidden,), "norm"))
            out.append(Spec(p + "eh_proj.weight", (hidden, 2 * hidden), "linear"))
        out.append(Spec(p + "input_layernorm.weight", (hidden,), "norm"))
        out += attention_specs(c, p + "self_attn.", has_indexer(c, i))
        out.append(Spec(p + "post_attention_layernorm.weight", (hidden,), "norm"))
        if i < c["first_k_dense_replace"]:
            out += mlp_specs(p + "mlp.", hidden, c["intermediate_size"])
        else:
            out += moe_specs(c, p + "mlp.")
        if i >= layers:
            out.append(Spec(p + "shared_head.norm.weight", (hidden,), "norm"))
            if copies:
                out.append(Spec(p + "embed_tokens.weight", (vocab, hidden), "table",
                                like="model.embed_tokens.weight"))
                out.append(Spec(p + "shared_head.head.weight", (vocab, hidden), "linear",
                                like="lm_head.weight"))
    out.append(Spec("model.norm.weight", (hidden,), "norm"))
    out.append(Spec("lm_head.weight", (vocab, hidden), "linear"))
    return out


def values(variant, spec, rk=512):
    """The tensor as f32 (exact in bf16 but for the router's bias)."""
    seed, _, _, offset, _ = VARIANTS[variant]
    key = key_of(seed, spec.like)
    x = draws(key, int(np.prod(spec.shape)))
    if spec.kind == "norm":
        w = ((x & np.uint64(127)).astype(np.float32) + np.float32(64)) / np.float32(128)
        return w.reshape(spec.shape)
    s = byte_sum(x)
    if spec.kind == "router":
        return (s - 1020).astype(np.float32) * np.float32(2.0 ** -10) + np.float32(offset)
    k = ((s + 4) // 8 - 128).astype(np.float32).reshape(spec.shape)
    if spec.kind == "table":
        return k * np.float32(2.0 ** -5)
    if spec.kind == "bias":
        return k * np.float32(2.0 ** -7)
    rows, cols = spec.shape
    br, bc = np.arange((rows + 127) // 128), np.arange((cols + 127) // 128)
    shift = np.array([[mix_int(key ^ (int(r) * 4096 + int(c) + 1)) % 3 for c in bc] for r in br])
    shift = np.repeat(np.repeat(shift, 128, axis=0)[:rows], 128, axis=1)[:, :cols]
    gain = np.full((rows, 1), spec.gain)
    if spec.kind == "latent":
        gain[rk:] = 0
    return np.ldexp(k, -4 - half_log(cols) + gain - shift).astype(np.float32)


def bf16_bits(x):
    """f32 to the bits of bf16, to nearest even (finite values)."""
    u = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def e4m3_table():
    """Value of every code; NaN for 0x7F and 0xFF."""
    codes = np.arange(256)
    e, m = (codes >> 3) & 15, codes & 7
    v = np.where(e == 0, m / 8.0 * 2.0 ** -6, (1 + m / 8.0) * 2.0 ** (e - 7.0))
    v = np.where((codes & 127) == 127, np.nan, v)
    return np.where(codes >= 128, -v, v)


E4M3 = e4m3_table()
_E4M3_POS = E4M3[:127]
_E4M3_MID = (_E4M3_POS[1:] + _E4M3_POS[:-1]) / 2


def e4m3_codes(x):
    """f32 or f64 to e4m3 codes: nearest, ties to the even code, saturating."""
    a = np.abs(np.asarray(x, dtype=np.float64))
    lo = np.searchsorted(_E4M3_MID, a, side="left")      # a <= mid[lo]
    tie = (lo < 126) & (a == _E4M3_MID[np.minimum(lo, 125)]) & (lo % 2 == 1)
    return ((lo + tie) | np.where(np.signbit(x), 128, 0)).astype(np.uint8)


def block_quantise(w, pow2):
    """(codes u8 [rows, cols], scales f32 [row blocks, col blocks])"""
    rows, cols = w.shape
    q = np.zeros(w.shape, np.uint8)
    scales = np.ones(((rows + 127) // 128, (cols + 127) // 128), np.float32)
    for r in range(scales.shape[0]):
        for c in range(scales.shape[1]):
            block = w[r * 128:(r + 1) * 128, c * 128:(c + 1) * 128]
            amax = np.float32(np.abs(block).max())
            if amax > 0:
                s = amax / np.float32(448)
                if pow2:
                    m, e = np.frexp(s)
                    s = np.ldexp(np.float32(1), e - 1 if m == 0.5 else e)
                scales[r, c] = s
            q[r * 128:(r + 1) * 128, c * 128:(c + 1) * 128] = e4m3_codes(block / scales[r, c])
    return q, scales


def stored(variant, dtype):
    """Yields (name, safetensors dtype, shape, bytes) in file order."""
    knorm_f32, pow2 = VARIANTS[variant][2], VARIANTS[variant][4]
    for s in tensor_specs(variant):
        w = values(variant, s)
        f32 = dtype == "f32" or s.kind == "router" or (knorm_f32 and ".k_norm." in s.name)
        if f32:
            yield s.name, "F32", s.shape, w.astype("<f4").tobytes()
        elif dtype == "fp8" and s.fp8:
            q, scales = block_quantise(w, pow2)
            yield s.name, "F8_E4M3", s.shape, q.tobytes()
            yield s.name + "_scale_inv", "F32", scales.shape, scales.astype("<f4").tobytes()
        else:
            yield s.name, "BF16", s.shape, bf16_bits(w).astype("<u2").tobytes()


def shard_of(i, n, name, shards):
    """Consecutive runs; a scale lies one shard further than its place."""
    at = i * shards // n
    return (at + 1) % shards if name.endswith("_scale_inv") else at


def write_safetensors(path, items):
    head, at = '{"__metadata__":{"format":"pt"}', 0
    for name, dtype, shape, data in items:
        dims = ",".join(str(d) for d in shape)
        head += ',"%s":{"dtype":"%s","shape":[%s],"data_offsets":[%d,%d]}' % (
            name, dtype, dims, at, at + len(data))
        at += len(data)
    head += "}"
    head += " " * (-len(head) % 8)
    with open(path, "wb") as f:
        f.write(len(head).to_bytes(8, "little"))
        f.write(head.encode())
        for item in items:
            f.write(item[3])


def write_model(variant, dtype, folder, shards=1):
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w") as f:
        f.write(config_text(variant, dtype))
    items = list(stored(variant, dtype))
    if shards == 1:
        write_safetensors(os.path.join(folder, "model.safetensors"), items)
        return
    files = [[] for _ in range(shards)]
    index = '{\n  "metadata": {"total_size": %d},\n  "weight_map": {' % sum(len(i[3]) for i in items)
    for i, item in enumerate(items):
        at = shard_of(i, len(items), item[0], shards)
        files[at].append(item)
        index += '%s\n    "%s": "model-%05d-of-%05d.safetensors"' % (
            "," if i else "", item[0], at + 1, shards)
    for at, group in enumerate(files):
        name = "model-%05d-of-%05d.safetensors" % (at + 1, shards)
        write_safetensors(os.path.join(folder, name), group)
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as f:
        f.write(index + "\n  }\n}\n")


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("out")
    p.add_argument("--variant", action="append", choices=sorted(VARIANTS))
    p.add_argument("--dtype", action="append", choices=sorted(DTYPE_NAME))
    p.add_argument("--shards", type=int, default=1)
    a = p.parse_args()
    for v in a.variant or VARIANTS:
        for d in a.dtype or DTYPE_NAME:
            write_model(v, d, os.path.join(a.out, "%s-%s" % (v, d)), a.shards)


if __name__ == "__main__":
    main()
