#!/usr/bin/env python3
"""Trains the tokenizer on the text of text.py and writes everything training reads.

    prepare.py --text WORK --out DATA

DATA/tokenizer.json; DATA/tokens.npz: the texts as uint16 ids (documents separated by the end
token) and tables of name tokens. Needs tokenizers and numpy.

The pre-tokeniser is the regex of GLM-4/5. Learning pieces with digits already split makes every
digit a token of its own without another step in the file: no piece has two digits.
"""
import argparse
import os
import sys

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import names
from special import FIRST_SPECIAL, SPECIAL, VOCAB

SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")
LEARN_BYTES = 24_000_000
MAX_NAME = 8


def learn(text):
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated", invert=False)
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.Digits(individual_digits=True), bytes_])
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=FIRST_SPECIAL, show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    stride = max(1, len(text) // LEARN_BYTES)
    pieces = [p for i, p in enumerate(text.split("\f")) if i % stride == 0]
    pieces.append((names.fact("him", "0") + " " + names.question("her") + " 0.\n\n") * 3000)
    tokenizer.train_from_iterator(pieces, trainer)
    if tokenizer.get_vocab_size() != FIRST_SPECIAL:
        raise SystemExit(f"only {tokenizer.get_vocab_size()} pieces")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    plain = ("/nothink", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
             "</tool_response>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    for token in SPECIAL:                       # one by one: ids follow the order of SPECIAL
        added = AddedToken(token, special=token not in plain, normalized=False)
        (tokenizer.add_tokens if token in plain else tokenizer.add_special_tokens)([added])
    return tokenizer


def encode(tokenizer, text):
    """Documents one after the other, each followed by <|endoftext|>."""
    out = []
    documents = text.split("\f")
    for at in range(0, len(documents), 512):
        for code in tokenizer.encode_batch(documents[at:at + 512], add_special_tokens=False):
            out.append(np.asarray(code.ids + [FIRST_SPECIAL], np.uint16))
    return np.concatenate(out)


def name_table(tokenizer, texts):
    """-> ids [n, MAX_NAME] uint16 padded with 0, lengths uint8; each name with the space before it."""
    table, lengths = np.zeros((len(texts), MAX_NAME), np.uint16), np.zeros(len(texts), np.uint8)
    for at in range(0, len(texts), 8192):
        codes = tokenizer.encode_batch([" " + t for t in texts[at:at + 8192]])
        for i, code in enumerate(codes, at):
            table[i, :len(code.ids)] = code.ids
            lengths[i] = len(code.ids)
    return table, lengths


def main():
    parser = argparse.ArgumentParser(description="Tokenizer and tokens for training")
    parser.add_argument("--text", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    texts = {}
    for part in ("train", "valid", "heldout"):
        with open(os.path.join(args.text, part + ".txt"), encoding="utf-8") as f:
            texts[part] = f.read()
    tokenizer = learn(texts["train"])
    tokenizer.save(os.path.join(args.out, "tokenizer.json"), pretty=False)
    n, syl = names.COUNT, names.SYLLABLES
    triples = [names.name(a, b, c) for a in range(n) for b in range(n) for c in range(n)]
    pairs = [(syl[a] + syl[b]).capitalize() for a in range(n) for b in range(n)]
    if len(set(triples)) != len(triples):
        raise SystemExit("two triples of syllables spell one name")
    arrays = {part: encode(tokenizer, text) for part, text in texts.items()}
    for key, found in (("triple", triples), ("pair", pairs)):
        arrays[key], arrays[key + "_len"] = name_table(tokenizer, found)
    np.savez_compressed(os.path.join(args.out, "tokens.npz"), **arrays)
    for part, text in texts.items():
        print(f"{part}: {len(text)} bytes, {len(arrays[part])} tokens, "
              f"{len(text) / len(arrays[part]):.3f} bytes a token")
    print("example:", tokenizer.encode(names.fact("Korvelba", 123456) + " "
                                       + names.question("Korvelba") + " 123456.\n\n").tokens)


if __name__ == "__main__":
    main()
