#!/usr/bin/env python3
"""Writes a checkpoint of train.py as public files: config.json and model.safetensors.

    export.py --weights CKPT... --out models/needle [--seed N]   (no weights: seeded random ones)

Names are those of public GLM-5.x repositories: one tensor per expert, `weight_scale_inv` per FP8
tensor. The values are exactly those the training's forward pass multiplied with.
"""
import argparse
import json
import os
import sys

import torch
from safetensors.torch import save_file

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import checkpoint
import model as m
from special import EOS, special_id


def config():
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "eos_token_id": [special_id(t) for t in EOS],
        "first_k_dense_replace": m.DENSE,
        "head_dim": m.ROPE,
        "hidden_act": "silu",
        "hidden_size": m.HIDDEN,
        "index_head_dim": m.INDEX_DIM,
        "index_n_heads": m.INDEX_HEADS,
        "index_share_for_mtp_iteration": True,
        "index_skip_topk_offset": 1,
        "index_topk": m.TOPK,
        "index_topk_freq": 3,
        "index_topk_pattern": None,
        "indexer_rope_interleave": True,
        "indexer_types": ["full" if i in m.FULL else "shared" for i in range(m.LAYERS)],
        "initializer_range": 0.02,
        "intermediate_size": m.INTER,
        "kv_lora_rank": m.KV_LORA,
        "max_position_embeddings": m.MAX_POS,
        "mlp_layer_types": ["dense" if i < m.DENSE else "sparse" for i in range(m.LAYERS)],
        "model_type": "glm_moe_dsa",
        "moe_intermediate_size": m.MOE,
        "moe_layer_freq": 1,
        "moe_router_dtype": "float32",
        "n_group": 1,
        "n_routed_experts": m.EXPERTS,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": m.HEADS,
        "num_experts_per_tok": m.ACTIVE,
        "num_hidden_layers": m.LAYERS,
        "num_key_value_heads": m.HEADS,
        "num_nextn_predict_layers": 1,
        "pad_token_id": special_id("<|endoftext|>"),
        "q_lora_rank": m.Q_LORA,
        "qk_head_dim": m.HEAD_DIM,
        "qk_nope_head_dim": m.NOPE,
        "qk_rope_head_dim": m.ROPE,
        "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                                "weight_block_size": [m.BLOCK, m.BLOCK]},
        "rms_norm_eps": m.EPS,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": m.THETA, "rope_type": "default"},
        "routed_scaling_factor": m.ROUTE_SCALE,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_cache": True,
        "v_head_dim": m.V_DIM,
        "vocab_size": m.VOCAB,
    }


def tensors(master):
    """Public name -> tensor."""
    out = {}

    def put(name, value, form):
        value = value.cpu().float()
        if form == "fp8":
            stored, scale = m.quantise_blocks(value)
            out[name + ".weight"] = stored.contiguous()
            out[name + ".weight_scale_inv"] = scale.contiguous()
        else:
            out[name] = (value if form == "f32" else value.bfloat16()).clone().contiguous()

    def each(kind, i, name):
        form = m.KINDS[kind][2]
        put(name, master[kind][i], form)

    each("embed", 0, "model.embed_tokens.weight")
    each("head", 0, "lm_head.weight")
    each("norm", 0, "model.norm.weight")
    for i in range(m.LAYERS + 1):
        at = f"model.layers.{i}."
        each("ln_in", i, at + "input_layernorm.weight")
        each("ln_post", i, at + "post_attention_layernorm.weight")
        for kind, name in (("q_a", "q_a_proj"), ("q_b", "q_b_proj"), ("kv_a", "kv_a_proj_with_mqa"),
                           ("kv_b", "kv_b_proj"), ("o", "o_proj"), ("q_ln", "q_a_layernorm.weight"),
                           ("kv_ln", "kv_a_layernorm.weight")):
            each(kind, i, at + "self_attn." + name)
        if i in m.FULL:
            j = m.FULL.index(i)
            for kind, name in (("wq_b", "wq_b"), ("wk", "wk"), ("kn_w", "k_norm.weight"),
                               ("kn_b", "k_norm.bias"), ("wp", "weights_proj.weight")):
                each(kind, j, at + "self_attn.indexer." + name)
        if i < m.DENSE:
            for kind in ("gate", "up", "down"):
                each(kind, i, f"{at}mlp.{kind}_proj")
            continue
        j = i - m.DENSE
        each("router", j, at + "mlp.gate.weight")
        each("bias", j, at + "mlp.gate.e_score_correction_bias")
        for e in range(m.EXPERTS + 1):
            place = "shared_experts" if e == m.EXPERTS else f"experts.{e}"
            for kind in ("gate", "up", "down"):
                put(f"{at}mlp.{place}.{kind}_proj", master["e_" + kind][j][e], "fp8")
    at = f"model.layers.{m.LAYERS}."
    each("enorm", 0, at + "enorm.weight")
    each("hnorm", 0, at + "hnorm.weight")
    each("eh", 0, at + "eh_proj.weight")
    each("sh_norm", 0, at + "shared_head.norm.weight")
    return out


def write(master, folder):
    os.makedirs(folder, exist_ok=True)
    found = tensors(master)
    path = os.path.join(folder, "model.safetensors")
    save_file(found, path, metadata={"format": "pt"})
    os.chmod(path, 0o644)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
        json.dump(config(), f, indent=2)
        f.write("\n")
    count = sum(t.numel() for n, t in found.items() if not n.endswith("_scale_inv"))
    print(f"{path}: {len(found)} tensors, {count} parameters, {os.path.getsize(path)} bytes")


def randomised(seed):
    """Weights that no layer leaves unused: for reading tests, not for training."""
    weights = m.Weights("cpu", seed)
    gen = torch.Generator().manual_seed(seed + 1)
    for kind, (n, shape, form, _, std) in m.KINDS.items():
        draw = torch.randn(n, *shape, generator=gen)
        if form == "norm":
            weights.master[kind] = 0.2 * draw if kind == "kn_b" else (1 + 0.2 * draw)
        elif kind == "bias":
            weights.master[kind] = 0.3 * draw
        elif kind == "embed":
            weights.master[kind] = draw
        elif std is not None:
            weights.master[kind] = draw * shape[-1] ** -0.5
    return weights.master


def main():
    parser = argparse.ArgumentParser(description="Checkpoint of train.py to public files")
    parser.add_argument("--weights", default="")
    parser.add_argument("--out", required=True)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    write(checkpoint.load(args.weights) if args.weights else randomised(args.seed), args.out)


if __name__ == "__main__":
    main()
