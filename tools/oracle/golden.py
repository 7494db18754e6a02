#!/usr/bin/env python3
"""Expected results for the tiny checkpoints: writes tests/oracle/golden/VARIANT.bin.

    golden.py [VARIANT]... [--out DIR] [--check]

Needs numpy, torch, transformers (tried: torch 2.11, transformers 5.17). Two sources: transformers in
f32, prefill and then cached decode steps; and numpy_oracle.py for what transformers lacks. The first
is compared with the second before anything is written, and a difference above 1e-4 ends the script.
--check only compares, with the files as they are too. tests/oracle/README.md describes the arrays.

Known differences of transformers, and what is done about each:
  latent norms use eps 1e-6 whatever the config says    numpy runs with 1e-6 for the comparison
  no FP8 index keys or cache rows, no Hadamard           exact f32 on both sides
  no MTP layer in the DSA classes                        the layer is run as one more decoder layer
Four errors of earlier releases would spoil the comparison; check_release() looks for them."""
import argparse
import inspect
import json
import os
import struct
import sys
import tempfile

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
import numpy as np
import torch
import transformers
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa

from make_tiny import HERE, VARIANTS, hidden_of, load_config, tokens_of, write_model
from numpy_oracle import Checkpoint, Model, Options

PROMPTS = (12, 96, 300)
STEPS = 16              # cached decode steps after each prompt, on the true next tokens
KEEP = 2                # last rows of the prompt whose results are stored
DRAFTS = 4
TOKENS = PROMPTS[-1] + STEPS + 1
LAYER_ROWS = 8          # last rows of the draft layer's own pass


# ---- golden files ------------------------------------------------------------------------------


def write_golden(path, arrays):
    with open(path, "wb") as f:
        f.write(b"KVSGOLD1")
        for name, x in arrays.items():
            x = np.asarray(x)
            i32 = x.dtype.kind == "i"
            f.write(struct.pack("<I", len(name)) + name.encode())
            f.write(struct.pack("<II", int(i32), x.ndim) + struct.pack("<%dQ" % x.ndim, *x.shape))
            f.write(x.astype("<i4" if i32 else "<f4").tobytes())


def read_golden(path):
    with open(path, "rb") as f:
        data = f.read()
    assert data[:8] == b"KVSGOLD1", path
    at, out = 8, {}
    while at < len(data):
        n, = struct.unpack_from("<I", data, at)
        name = data[at + 4:at + 4 + n].decode()
        at += 4 + n
        i32, dims = struct.unpack_from("<II", data, at)
        shape = struct.unpack_from("<%dQ" % dims, data, at + 8)
        at += 8 + 8 * dims
        count = int(np.prod(shape))
        out[name] = np.frombuffer(data, "<i4" if i32 else "<f4", count, at).reshape(shape)
        at += 4 * count
    return out


def padded(sets, width):
    out = np.full((len(sets), width), -1, np.int32)
    for i, s in enumerate(sets):
        out[i, :len(s)] = s
    return out


# ---- transformers ------------------------------------------------------------------------------


def check_release():
    """The four known errors of earlier releases."""
    found = {
        "GLM rotates the main rope half-split": "apply_rotary_pos_emb_interleave" not in
        inspect.getsource(modeling_glm_moe_dsa.GlmMoeDsaAttention.forward),
        "GLM rotates the indexer half-split": "apply_rotary_pos_emb_interleave" not in
        inspect.getsource(modeling_glm_moe_dsa.GlmMoeDsaIndexer.forward),
        "DeepseekV2 leaves m^2 out of the softmax scale": "yarn_apply_mscale" not in
        inspect.getsource(modeling_deepseek_v2.DeepseekV2Attention.__init__),
        "DeepseekV3 fills dropped groups with 0": 'float("-inf")' not in
        inspect.getsource(modeling_deepseek_v3.DeepseekV3TopkRouter.forward),
    }
    bad = [k for k, v in found.items() if v]
    if bad:
        sys.exit("transformers %s: %s" % (transformers.__version__, "; ".join(bad)))
    print("transformers %s: none of the four known errors" % transformers.__version__)


def hf_model(folder, extra_layers=0):
    """The class named by the config, in f32, whatever model_type says."""
    with open(os.path.join(folder, "config.json")) as f:
        c = json.load(f)
    arch, n = c["architectures"][0], c["num_hidden_layers"]
    c.pop("model_type")
    c["num_hidden_layers"] = n + extra_layers
    for key, what in (("mlp_layer_types", "sparse"), ("indexer_types", "full")):
        if c.get(key):
            c[key] = c[key] + [what] * extra_layers
    config = getattr(transformers, arch.replace("ForCausalLM", "Config"))(**c)
    return getattr(transformers, arch).from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager").eval()


class Taps:
    """Index sets, experts and hidden states of every layer, row after row."""

    def __init__(self, model):
        self.select, self.experts, self.hidden, self.hooks = {}, {}, {}, []
        for i, layer in enumerate(model.model.layers):
            self.hook(layer, self.hidden, i, lambda out: out[0] if isinstance(out, tuple) else out)
            if getattr(layer.self_attn, "indexer", None) is not None:
                self.hook(layer.self_attn.indexer, self.select, i, lambda out: out)
            if hasattr(layer.mlp, "gate"):
                self.hook(layer.mlp.gate, self.experts, i, lambda out: out[2][None])

    def hook(self, module, where, i, pick):
        def keep(_module, _args, out):
            where.setdefault(i, []).extend(pick(out)[0].numpy())
        self.hooks.append(module.register_forward_hook(keep))

    def close(self):
        for h in self.hooks:
            h.remove()


def run_hf(model, tokens, prompt):
    """(logits of all rows, taps): one pass over the prompt, then STEPS single rows."""
    taps, cache = Taps(model), None
    logits = []
    pieces = [tokens[:prompt]] + [tokens[i:i + 1] for i in range(prompt, prompt + STEPS)]
    for piece in pieces:
        out = model(torch.tensor(piece)[None].long(), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits[0].numpy())
    taps.close()
    return np.concatenate(logits), taps


def hf_mtp(folder, model, h, tokens):
    """Logits of MTP step 0 for all rows, from modules of the library: one more decoder layer."""
    c = Checkpoint(folder)
    big = hf_model(folder, 1)
    layer, n = big.model.layers[-1], len(big.model.layers) - 1
    p = "model.layers.%d." % n

    def norm(x, name):
        y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + big.config.rms_norm_eps)
        return y * torch.tensor(c[p + name], dtype=torch.float32)

    e = model.model.embed_tokens(torch.tensor(tokens).long())
    u = torch.cat([norm(e, "enorm.weight"), norm(h, "hnorm.weight")], dim=-1)
    u = (u @ torch.tensor(c[p + "eh_proj.weight"], dtype=torch.float32).T)[None]
    rows = u.shape[1]
    pos = torch.arange(rows)[None]
    mask = torch.full((rows, rows), torch.finfo(torch.float32).min).triu(1)[None, None]
    z = layer(u, attention_mask=mask, position_ids=pos,
              position_embeddings=model.model.rotary_emb(u, position_ids=pos))
    z = z[0] if isinstance(z, tuple) else z
    return model.lm_head(norm(z[0], "shared_head.norm.weight")).numpy()


# ---- arrays ------------------------------------------------------------------------------------


def rows_of(prompt):
    return np.arange(prompt - KEEP, prompt + STEPS)


def put_pass(out, tag, prompt, logits, trace, width, hidden=None):
    """The rows of one prompt out of a numpy pass over the whole text."""
    rows = rows_of(prompt)
    out["%s.logits.%d" % (tag, prompt)] = logits[rows]
    for i, sets in trace.selected.items():
        if i in trace.gap:
            out["%s.select.%d.%d" % (tag, prompt, i)] = padded([sets[r] for r in rows], width)
    if hidden is not None:
        out["%s.hidden.%d" % (tag, prompt)] = np.array([x[rows[[KEEP - 1, -1]]] for x in hidden])


def hf_arrays(variant, folder, report):
    """Golden arrays of transformers, compared with numpy."""
    tokens = tokens_of(variant, TOKENS, load_config(variant)["vocab_size"])
    model, out = hf_model(folder), {"tokens": tokens}
    exact = Model(Checkpoint(folder), Options(latent_eps=1e-6))
    h, trace = exact.forward(tokens[:-1])
    expect = exact.head(h)
    for prompt in PROMPTS:
        logits, taps = run_hf(model, tokens, prompt)
        rows = rows_of(prompt)
        diff = float(np.abs(logits - expect[:prompt + STEPS]).max())
        off, total = 0, 0
        out["hf.logits.%d" % prompt] = logits[rows]
        out["hf.hidden.%d" % prompt] = np.array(
            [[taps.hidden[i][r] for r in rows[[KEEP - 1, -1]]] for i in range(exact.layers)])
        for i, lists in taps.select.items():
            sets = [np.sort(s[s <= at]) for at, s in enumerate(lists)]
            off += sum(not np.array_equal(a, b) for a, b in zip(sets, trace.selected[i]))
            total += len(sets)
            out["hf.select.%d.%d" % (prompt, i)] = padded([sets[r] for r in rows], exact.topk)
            out["hf.gap.%d.%d" % (prompt, i)] = np.minimum(trace.gap[i][rows], 1e30)
        for i, lists in taps.experts.items():
            ids = np.sort(np.array(lists), axis=-1)
            off += int((ids != np.sort(trace.experts[i][:len(ids)], axis=-1)).any(axis=-1).sum())
            total += len(ids)
            out["hf.experts.%d.%d" % (prompt, i)] = ids[rows].astype(np.int32)
        report("%s T=%d + %d decode: max |numpy - transformers| %.2e, sets and routes that differ "
               "%d of %d" % (variant, prompt, STEPS, diff, off, total))
        if diff > 1e-4 or off:
            sys.exit("the two oracles disagree")
    if len(exact.caches) > exact.layers:
        g, _, _ = exact.mtp_first(h, tokens[1:])
        diff = float(np.abs(hf_mtp(folder, model, torch.tensor(h, dtype=torch.float32), tokens[1:])
                            - exact.head(g)).max())
        report("%s MTP step 0, %d rows: max |numpy - transformers layer| %.2e"
               % (variant, len(h), diff))
        if diff > 1e-4:
            sys.exit("the two oracles disagree")
    return out


# name: (weights, options, prompts); the modes that the engine has and transformers has not
MODES = {
    "exact": ("f32", Options(), PROMPTS),
    "ds": ("f32", Options(kv="fp8_ds_mla", index="fp8"), PROMPTS[1:]),
    "had": ("f32", Options(kv="fp8_ds_mla", index="fp8", hadamard=True), PROMPTS[2:]),
    "kv8": ("f32", Options(kv="fp8"), PROMPTS[2:]),
    "bf16": ("bf16", Options(kv="bf16", index="fp8"), PROMPTS[2:]),
    "fp8": ("fp8", Options(kv="fp8_ds_mla", index="fp8"), PROMPTS[2:]),
}


def modes_of(config):
    """Hadamard is for index keys; rows of 576 bytes are for models without."""
    return [m for m in MODES if m != ("kv8" if "index_topk" in config else "had")]


def numpy_arrays(variant, folders):
    config = load_config(variant)
    tokens, out = tokens_of(variant, TOKENS, config["vocab_size"]), {}
    for tag, (weights, options, prompts) in MODES.items():
        if tag not in modes_of(config):
            continue
        m = Model(Checkpoint(folders[weights]), options)
        h, trace = m.forward(tokens[:-1])
        logits = m.head(h)
        for prompt in prompts:
            put_pass(out, tag, prompt, logits, trace, m.topk)
        if len(m.caches) == m.layers or tag != "exact":
            continue
        g, sets, _ = m.mtp_first(h, tokens[1:])
        for prompt in prompts:
            chain, drafts, used = m.mtp_chain(g, sets, prompt, DRAFTS)
            out["%s.mtp.logits.%d" % (tag, prompt)] = chain
            out["%s.mtp.drafts.%d" % (tag, prompt)] = drafts
            if sets is not None:
                out["%s.mtp.select.%d" % (tag, prompt)] = padded([sets[prompt - 1]] + used, m.topk)
    return out


def layer_arrays(variant, folders):
    """The draft layer alone, on made-up hidden states: one layer is too short for a rounding that
    falls the other way to grow, so here quantised modes can be held to small differences."""
    config = load_config(variant)
    tokens, n = tokens_of(variant, TOKENS, config["vocab_size"]), PROMPTS[-1]
    hidden, out = hidden_of(variant, n, config["hidden_size"]).astype(np.float64), {}
    if not config.get("num_nextn_predict_layers"):
        return out
    for tag, (weights, options, _) in MODES.items():
        if tag not in modes_of(config):
            continue
        m = Model(Checkpoint(folders[weights]), options)
        g, _, _ = m.mtp_first(hidden, tokens[1:n + 1])
        out[tag + ".layer.logits"] = m.head(g[-LAYER_ROWS:])
    return out


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("variant", nargs="*", choices=[[]] + sorted(VARIANTS))
    p.add_argument("--out", default=os.path.join(HERE, "..", "..", "tests", "oracle", "golden"))
    p.add_argument("--check", action="store_true")
    a = p.parse_args()
    torch.set_grad_enabled(False)
    check_release()
    for v in a.variant or VARIANTS:
        with tempfile.TemporaryDirectory() as tmp:
            folders = {d: os.path.join(tmp, d) for d in ("f32", "bf16", "fp8")}
            for d, folder in folders.items():
                write_model(v, d, folder, 1 if d == "f32" else 3)
            out = hf_arrays(v, folders["f32"], lambda s: print(s, flush=True))
            out.update(numpy_arrays(v, folders))
            out.update(layer_arrays(v, folders))
        path = os.path.join(a.out, v + ".bin")
        if not a.check:
            write_golden(path, out)
            continue
        old = read_golden(path)
        worst = max(float(np.abs(old[k] - np.asarray(out[k]).astype(old[k].dtype)).max())
                    for k in out if k in old)
        print("%s: largest difference from the stored arrays %.2e" % (v, worst))
        if set(old) != set(out) or worst > 1e-4:
            sys.exit("the stored arrays are not these")


if __name__ == "__main__":
    main()
