#!/usr/bin/env python3
"""Writes models/random-v32: a tiny checkpoint of DeepSeek-V3.2 geometry with seeded random weights.

It has what the real model has: MLA with q-LoRA, an indexer in every layer (half-split rope), YaRN,
a grouped sigmoid router with bias, shared expert, one MTP layer with the copies of embedding and
head that those checkpoints carry, FP8 weights in blocks of 128 x 128 and a byte-level BPE with the
three regexes of that family. It has learned nothing; it exists to compare forward passes.

Every scale is amax / 448 as plain float32, so dequantised weights are not exact in bf16. A head
owns 192 rows of kv_b_proj, so heads cross the borders of scale blocks.

Needs torch, safetensors and tokenizers. Usage: random_v32.py [--out models/random-v32] [--text F...]
The same arguments give the same bytes with the same version of torch.
"""
import argparse
import json
import os

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB, HIDDEN, INTER, MOE = 1024, 128, 384, 128
LAYERS, DENSE, HEADS = 3, 1, 8
Q_LORA, KV_LORA, NOPE, ROPE, V_DIM = 128, 512, 128, 64, 64
INDEX_HEADS, INDEX_DIM, INDEX_TOPK = 4, 128, 32
EXPERTS, TOP_K, GROUPS, TOP_GROUPS = 16, 4, 4, 2
BLOCK = 128
SEED = 20321

CONFIG = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": DENSE,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "index_head_dim": INDEX_DIM,
    "index_n_heads": INDEX_HEADS,
    "index_topk": INDEX_TOPK,
    "initializer_range": 0.02,
    "intermediate_size": INTER,
    "kv_lora_rank": KV_LORA,
    "max_position_embeddings": 2560,
    "model_type": "deepseek_v32",
    "moe_intermediate_size": MOE,
    "moe_layer_freq": 1,
    "n_group": GROUPS,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": HEADS,
    "num_experts_per_tok": TOP_K,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": HEADS,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": Q_LORA,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 64,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": TOP_GROUPS,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": V_DIM,
    "vocab_size": VOCAB,
}


class Writer:
    """Draws tensors in a fixed order and keeps them under their public names."""

    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)
        self.tensors = {}

    def normal(self, shape, std):
        return torch.randn(shape, generator=self.gen) * std

    def linear(self, name, rows, cols, gain=1.0):
        """FP8 weight of standard deviation gain / sqrt(cols) with its block scales."""
        weight = self.normal((rows, cols), gain * cols**-0.5)
        tall, wide = -(-rows // BLOCK), -(-cols // BLOCK)
        padded = torch.zeros(tall * BLOCK, wide * BLOCK)
        padded[:rows, :cols] = weight
        blocks = padded.view(tall, BLOCK, wide, BLOCK)
        scale = blocks.abs().amax(dim=(1, 3)) / 448.0
        scale[scale == 0] = 1.0
        stored = (blocks / scale[:, None, :, None]).clamp(-448, 448).reshape(padded.shape)
        self.tensors[name + ".weight"] = stored[:rows, :cols].to(torch.float8_e4m3fn).contiguous()
        self.tensors[name + ".weight_scale_inv"] = scale.contiguous()

    def norm(self, name, width):
        value = torch.rand((width,), generator=self.gen) + 0.5
        self.tensors[name + ".weight"] = value.to(torch.bfloat16)

    def plain(self, name, shape, std):
        self.tensors[name] = self.normal(shape, std).to(torch.bfloat16)

    def swiglu(self, name, inner):
        self.linear(name + ".gate_proj", inner, HIDDEN)
        self.linear(name + ".up_proj", inner, HIDDEN)
        self.linear(name + ".down_proj", HIDDEN, inner)

    def attention(self, name):
        self.linear(name + ".q_a_proj", Q_LORA, HIDDEN)
        self.norm(name + ".q_a_layernorm", Q_LORA)
        self.linear(name + ".q_b_proj", HEADS * (NOPE + ROPE), Q_LORA)
        self.linear(name + ".kv_a_proj_with_mqa", KV_LORA + ROPE, HIDDEN)
        self.norm(name + ".kv_a_layernorm", KV_LORA)
        self.linear(name + ".kv_b_proj", HEADS * (NOPE + V_DIM), KV_LORA)
        self.linear(name + ".o_proj", HIDDEN, HEADS * V_DIM)
        self.linear(name + ".indexer.wq_b", INDEX_HEADS * INDEX_DIM, Q_LORA)
        self.linear(name + ".indexer.wk", INDEX_DIM, HIDDEN)
        self.norm(name + ".indexer.k_norm", INDEX_DIM)
        self.plain(name + ".indexer.k_norm.bias", (INDEX_DIM,), 0.2)
        self.plain(name + ".indexer.weights_proj.weight", (INDEX_HEADS, HIDDEN), HIDDEN**-0.5)

    def layer(self, index, dense):
        name = f"model.layers.{index}"
        self.norm(name + ".input_layernorm", HIDDEN)
        self.attention(name + ".self_attn")
        self.norm(name + ".post_attention_layernorm", HIDDEN)
        if dense:
            self.swiglu(name + ".mlp", INTER)
            return
        self.plain(name + ".mlp.gate.weight", (EXPERTS, HIDDEN), 1.5 * HIDDEN**-0.5)
        self.tensors[name + ".mlp.gate.e_score_correction_bias"] = self.normal((EXPERTS,), 0.3)
        for expert in range(EXPERTS):
            self.swiglu(f"{name}.mlp.experts.{expert}", MOE)
        self.swiglu(name + ".mlp.shared_experts", MOE)


def make_weights():
    out = Writer(SEED)
    out.plain("model.embed_tokens.weight", (VOCAB, HIDDEN), 1.0)
    for index in range(LAYERS):
        out.layer(index, index < DENSE)
    out.norm("model.norm", HIDDEN)
    out.plain("lm_head.weight", (VOCAB, HIDDEN), 2.0 * HIDDEN**-0.5)
    out.layer(LAYERS, False)
    name = f"model.layers.{LAYERS}"
    out.norm(name + ".enorm", HIDDEN)
    out.norm(name + ".hnorm", HIDDEN)
    out.plain(name + ".eh_proj.weight", (HIDDEN, 2 * HIDDEN), (2 * HIDDEN) ** -0.5)
    out.norm(name + ".shared_head.norm", HIDDEN)
    out.tensors[name + ".embed_tokens.weight"] = out.tensors["model.embed_tokens.weight"].clone()
    out.tensors[name + ".shared_head.head.weight"] = out.tensors["lm_head.weight"].clone()
    return out.tensors


SPLITS = [
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
]
FIRST = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"]
LAST = ["<think>", "</think>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
        "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>",
        "<｜tool▁output▁end｜>"]


def make_tokenizer(paths):
    """Byte-level BPE: first special tokens, 256 bytes, learned pieces, last special tokens."""
    tokenizer = Tokenizer(models.BPE())
    steps = [pre_tokenizers.Split(Regex(s), behavior="isolated", invert=False) for s in SPLITS]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=VOCAB - len(LAST), special_tokens=FIRST,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
                                  show_progress=False)
    tokenizer.train(paths, trainer)
    added = [AddedToken(t, special=t not in ("<think>", "</think>"), normalized=False) for t in LAST]
    tokenizer.add_tokens([a for a in added if not a.special])
    tokenizer.add_special_tokens([a for a in added if a.special])
    if tokenizer.get_vocab_size() != VOCAB:
        raise SystemExit(f"the text gives {tokenizer.get_vocab_size()} pieces, not {VOCAB}")
    return tokenizer


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="models/random-v32")
    parser.add_argument("--text", nargs="+", default=["README.md", "docs/ARCHITECTURE.md",
                                                      "docs/numbers.md", "docs/testing.md"],
                        help="files the tokenizer learns its pieces from")
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    tensors = make_weights()
    save_file(tensors, os.path.join(args.out, "model.safetensors"), metadata={"format": "pt"})
    with open(os.path.join(args.out, "config.json"), "w", encoding="utf-8") as f:
        json.dump(CONFIG, f, indent=2)
        f.write("\n")
    make_tokenizer(args.text).save(os.path.join(args.out, "tokenizer.json"), pretty=False)
    with open(os.path.join(args.out, "tokenizer_config.json"), "w", encoding="utf-8") as f:
        json.dump({"add_bos_token": False, "add_eos_token": False, "bos_token": FIRST[0],
                   "clean_up_tokenization_spaces": False, "eos_token": FIRST[1],
                   "model_max_length": 2560, "pad_token": FIRST[1],
                   "tokenizer_class": "LlamaTokenizerFast"}, f, indent=2, ensure_ascii=False)
        f.write("\n")
    count = sum(t.numel() for n, t in tensors.items() if not n.endswith("_scale_inv"))
    size = os.path.getsize(os.path.join(args.out, "model.safetensors"))
    print(f"random-v32: {len(tensors)} tensors, {count} parameters, {size} bytes, seed {SEED}")


if __name__ == "__main__":
    main()
