#!/usr/bin/env python3
"""Tokenizers for the tests, and what the `tokenizers` library makes of mixed text with them.

Trains a small vocabulary with the regular expressions of each model family on text that the script
makes itself, and writes to --out:

  NAME.json      tokenizer.json: merges as strings or as arrays, with added tokens of every kind
  NAME.gold      ids of every string three ways, the template, and decoded id sequences
  strings.bin    the strings: words, code, digits, white space, every script and symbol of Unicode 14,
                 combining marks, right-to-left text, emoji sequences, added tokens whole and in part

Usage: tokenizer_golden.py --out tests/data/text [--strings 1000] [--seed 2026] [--each] [--golden-only]
--golden-only keeps the NAME.json files that are there. --each adds every character of Unicode 14, beside a
letter, a digit, a space and itself. The full comparison goes into another folder, for the test to read:

  python3 tools/oracle/tokenizer_golden.py --out /tmp/tok --strings 10000 --each
  build/release/tests/unit/text/test_tok_golden /tmp/tok

Needs tokenizers, and Python 3.11, whose unicodedata is that of Unicode 14 (PCRE2 10.42 is too; other
characters may be of another class in either).

Layout of the binary files, little-endian: strings.bin is u32 count, then u32 length and bytes of each.
NAME.gold is "KVTG", u32 count of strings; u8 count and u16 ids of the template in front of a text and
behind it; per string three lists of ids (u16 count, u16 ids): all added tokens found, special ones as
text, all of it as text; a count of 0xFFFF means: as the list before it. Then u32 count of decodings,
each u16 count, u16 ids, u32 length and bytes with special tokens, the same without.
"""
import argparse
import json
import os
import random
import struct
import unicodedata

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

assert unicodedata.unidata_version == "14.0.0", "needs the character database of Unicode 14"

WORDS = """the of and to in is was for that it with as his on be at by had from are this have not but
which they one you were all her she there would their we him been has when who will no more if out so
what up said about other into than its time only could new them man some these then two first may any
like now my such make over our even most state after also did many off before must well back through
years where much your way down should because long each just those people how too little good world
very still see men work being against life never day same another know while last might great old year
come since go came right used take three himself few house use during without again place around small
however home found thought went say part once general high upon school every don't I'm we've you'll
they're he'd it's SHOUT'S CAN'T attention sparse cache tokens kernel matrix passcode""".split()
CODE = ["if (x != NULL) {", "return 0;", "for (int i = 0; i < n; i++)", "#include <stdio.h>", "def f(x):",
        "\tself.x = [1, 2.5e-3]", "a->b::c", "// TODO?", "x += y * (z - 1) % 7;", "{\"key\": [true, null]}",
        "<a href=\"http://x.y/z?q=1&r=2\">", "SELECT * FROM t WHERE id>=10;", "$HOME/.bashrc", "\\frac{a}{b}",
        "0x7fff_ffff", "!=", "==", "&&", "||", "...", "/**/", "```python", "snake_case camelCase HTTPServer2"]
SPACE = [" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\t\t", " \n", "\n ", "\u00a0", "\u3000", "\u2028",
         "\u0085", "\u200b", "\u180e", "\u2003", "\v", "\f", "\r", "        ", " \t \n\n  ", "\u202f", "\ufeff"]
EMOJI = ["😀", "👍🏽", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪", "❤️", "🫠", "1️⃣", "🧑🏿‍🚀", "☺", "🀄"]
OTHER = ["ſ", "'ſ", "K", "'K", "’s", "ß", "ŉ", "İ", "ǅ", "ﬀ", "e\u0301", "a\u0308\u0323", "\u0301", "क्षि",
         "한국어", "각", "שָׁלוֹם", "مرحبا", "١٢٣", "५६", "Ⅻ", "½", "²", "①", "㈱", "،", "。", "，",
         "！？", "～", "—", "“”", "€", "£", "∑", "𝔘", "𝟙", "𐐀", "\u0000", "\u0007", "\u007f", "\ufffd", "\uffff",
         "ー", "々", "〆", "ｱ", "Ａ", "_", "‿", "〜", "・"]


def pools():
    """Characters of Unicode 14 by kind: for every block of 128 those that are assigned."""
    blocks = {}
    for c in range(0x110000):
        if 0xD800 <= c < 0xE000 or unicodedata.category(chr(c)) in ("Cn", "Co"):
            continue
        blocks.setdefault(c >> 7, []).append(chr(c))
    return list(blocks.values())


POOLS = pools()
HAN = [chr(c) for c in range(0x4E00, 0x9FA6)]


def span_of(rng, specials):
    """A short run of one kind."""
    k = rng.randrange(16)
    if k < 4:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 5)))
    if k == 4:
        return rng.choice(CODE)
    if k == 5:
        return rng.choice(SPACE) * rng.choice((1, 1, 1, 2, 3))
    if k == 6:
        return str(rng.randrange(10 ** rng.randint(1, 12)))
    if k == 7:
        return "".join(rng.choice(rng.choice(POOLS)) for _ in range(rng.randint(1, 6)))
    if k in (8, 9):
        pool = rng.choice(POOLS)
        return "".join(rng.choice(pool) for _ in range(rng.randint(1, 10)))
    if k == 10:
        return "".join(rng.choice(HAN) for _ in range(rng.randint(1, 8)))
    if k == 11:
        return rng.choice(EMOJI)
    if k == 12:
        return rng.choice(OTHER)
    if k == 13:
        s = rng.choice(specials)
        cut = rng.choice((len(s), len(s), len(s), rng.randint(1, len(s))))
        return rng.choice(("", " ", "  ", "\n")) + s[:cut] + rng.choice(("", "", " ", "\u3000 ", "x"))
    if k == 14:
        return "".join(chr(rng.randint(33, 126)) for _ in range(rng.randint(1, 8)))
    w = rng.choice(WORDS)
    return rng.choice((w.upper(), w.capitalize(), w + "'S", w + "'ll", w + "ing", w[:2] + "_" + w))


def string_of(rng, specials):
    n = rng.choice((0, 1, 1, 2, 3, 4, 5, 6, 8, 12))
    parts = []
    if rng.random() < 0.01:  # one long pre-token, most of it in pieces of several letters
        parts.append("".join(rng.choice(WORDS) for _ in range(rng.randint(15, 100))).replace("'", ""))
    for _ in range(n):
        parts.append(span_of(rng, specials))
        if rng.random() < 0.4:
            parts.append(" ")
    return "".join(parts)


def each_character():
    """Strings that hold every character of Unicode 14 once beside each kind of neighbour."""
    chars = [c for pool in POOLS for c in pool]
    for i in range(0, len(chars), 16):
        yield "".join(c + "a" + c + "1" + c + " " + c + c + "\n" for c in chars[i:i + 16])


def letter_class():
    """The cased letters, spelled out in ranges as that family does."""
    have = [c for c in range(0x110000) if unicodedata.category(chr(c)) in ("Lu", "Ll", "Lt")]
    out, i = [], 0
    while i < len(have):
        j = i
        while j + 1 < len(have) and have[j + 1] == have[j] + 1:
            j += 1
        out.append(chr(have[i]) + ("-" + chr(have[j]) if j > i else ""))
        i = j + 1
    return "[" + "".join(out) + "]"


def split(pattern):
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def byte_level(use_regex=False):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


DEEPSEEK = [r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
            r""" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""]
GLM = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
       r"|\s+(?!\S)|\s+")
V2LITE = [r"[\r\n]", r"\s?" + letter_class() + "+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$",
          r"[一-龥ࠀ-一가-퟿]+"]
MIXED = r"\p{Han}+|[\p{Lu}\u0041-\u005A]?\p{^Lu}{2,}?|(?<=\d)\D++|^.|\x{1F600}*+"


def special(text, **k):
    return AddedToken(text, special=True, normalized=False, **k)


def plain(text, **k):
    return AddedToken(text, special=False, **k)


FAMILIES = {
    "deepseek": dict(
        pre=[split(p) for p in DEEPSEEK] + [byte_level()], strings_form=True,
        first=[special("<｜begin▁of▁sentence｜>"), special("<｜end▁of▁sentence｜>"), special("<｜▁pad▁｜>")],
        added=[special("<｜User｜>"), special("<｜Assistant｜>"), plain("<think>", normalized=True),
               plain("</think>", normalized=False), plain("<think>ing", normalized=False), special("<｜DSML｜>"),
               plain("ML｜", normalized=False)],
        bos="<｜begin▁of▁sentence｜>"),
    "glm": dict(
        pre=[split(GLM), byte_level()], ignore=True, extra=True, first=[],
        added=[special(s) for s in ("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>",
                                    "<|user|>", "<|assistant|>", "<|observation|>", "/nothink")]
        + [plain(s, normalized=False) for s in ("<think>", "</think>", "<tool_call>", "</tool_call>")],
        prefix=["[gMASK]", "<sop>"]),
    "v2lite": dict(
        pre=[split(p) for p in V2LITE] + [pre_tokenizers.Digits(individual_digits=True), byte_level()],
        first=[], added=[special("<｜begin▁of▁sentence｜>"), special("<｜end▁of▁sentence｜>"), plain("User: ")]),
    "gpt2": dict(pre=[byte_level(True)], first=[], added=[special("<|endoftext|>")], strings_form=True, ignore=True),
    "mixed": dict(
        pre=[pre_tokenizers.Split("the", "isolated"), pre_tokenizers.Digits(individual_digits=False), split(MIXED),
             byte_level(True)], first=[], extra=True, strings_form=True,
        added=[special("<left>", lstrip=True), special("<right>", rstrip=True),
               special("<both>", lstrip=True, rstrip=True), plain("word", single_word=True, normalized=False),
               plain("<n>", normalized=True, lstrip=True), plain("é", normalized=True), plain(" <n", normalized=True),
               special("wordplay", single_word=True)],
        suffix=["<right>"]),
}


def learn(pre, corpus, size, first):
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(pre) if len(pre) > 1 else pre[0]
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=size, special_tokens=first, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    return json.loads(tok.to_str())


def train(family, corpus, across):
    """The file's text: what the family's cuts let a vocabulary learn, then merges across all cuts, so
    that a wrong cut shows in the ids, then pieces that no merge makes."""
    d = learn(family["pre"], corpus, 900, family["first"])
    model = d["model"]
    vocab = model["vocab"]
    more = [tuple(m) for m in across["model"]["merges"]] + [(a, b) for a in "0123456789" for b in "0123456789"]
    have = {tuple(m) for m in model["merges"]}
    for left, right in more:
        if (left, right) not in have:
            model["merges"].append([left, right])
            vocab.setdefault(left + right, len(vocab))
    if family.get("extra"):
        for w in WORDS[::3]:
            for s in ("Ġ" + w + "ing", w + "ing", w.upper()):
                vocab.setdefault(s, len(vocab))
    model["ignore_merges"] = bool(family.get("ignore"))
    tok = Tokenizer.from_str(json.dumps(d))
    tok.add_tokens(family["added"])
    d = json.loads(tok.to_str())
    if family.get("strings_form"):
        d["model"]["merges"] = [" ".join(m) for m in d["model"]["merges"]]
    d["post_processor"] = template_of(tok, family)
    return json.dumps(d, ensure_ascii=False, indent=0)


def template_of(tok, family):
    def parts(names):
        return [{"SpecialToken": {"id": s, "type_id": 0}} for s in names]
    before = family.get("prefix", []) + ([family["bos"]] if "bos" in family else [])
    after = family.get("suffix", [])
    level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    if not before and not after:
        return level
    single = parts(before) + [{"Sequence": {"id": "A", "type_id": 0}}] + parts(after)
    return {"type": "Sequence", "processors": [level, {
        "type": "TemplateProcessing", "single": single, "pair": single + [{"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {s: {"id": s, "ids": [tok.token_to_id(s)], "tokens": [s]} for s in before + after}}]}


def ids_of(values):
    return struct.pack("<H", len(values)) + struct.pack(f"<{len(values)}H", *values)


def golden(path, strings, rng):
    with open(path, encoding="utf-8") as f:
        text = f.read()
    d = json.loads(text)
    tok = Tokenizer.from_str(text)
    for t in d["added_tokens"]:
        assert tok.token_to_id(t["content"]) == t["id"], t
    bare = dict(d, added_tokens=[], post_processor=None)
    bare = Tokenizer.from_str(json.dumps(bare))
    out = [b"KVTG", struct.pack("<I", len(strings))]
    whole, inner = tok.encode("a").ids, tok.encode("a", add_special_tokens=False).ids
    at = next(i for i in range(len(whole)) if whole[i:i + len(inner)] == inner)
    for part in (whole[:at], whole[at + len(inner):]):
        out.append(struct.pack(f"<B{len(part)}H", len(part), *part))
    all_ids = []
    for s in strings:
        tok.encode_special_tokens = False
        lists = [tok.encode(s, add_special_tokens=False).ids]
        tok.encode_special_tokens = True
        lists.append(tok.encode(s, add_special_tokens=False).ids)
        lists.append(bare.encode(s, add_special_tokens=False).ids)
        out.append(ids_of(lists[0]))
        for a, b in zip(lists, lists[1:]):
            out.append(struct.pack("<H", 0xFFFF) if a == b else ids_of(b))
        all_ids.append(lists[0])
    n_id = 1 + max(list(d["model"]["vocab"].values()) + [t["id"] for t in d["added_tokens"]])
    n_decode = max(1, len(strings) // 4)
    out.append(struct.pack("<I", n_decode))
    for i in range(n_decode):
        ids = list(all_ids[i])
        if i % 2:
            ids = [rng.randrange(n_id + 3) for _ in range(rng.randint(0, 12))]
        elif ids:
            del ids[rng.randrange(len(ids))]
        out.append(ids_of(ids))
        for skip in (False, True):
            b = tok.decode(ids, skip_special_tokens=skip).encode()
            out.append(struct.pack("<I", len(b)) + b)
    return b"".join(out)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--out", required=True)
    p.add_argument("--strings", type=int, default=1000)
    p.add_argument("--seed", type=int, default=2026)
    p.add_argument("--each", action="store_true")
    p.add_argument("--golden-only", action="store_true")
    args = p.parse_args()
    os.makedirs(args.out, exist_ok=True)
    specials = [t.content for f in FAMILIES.values() for t in f["first"] + f["added"]]
    rng = random.Random(14)
    corpus = [string_of(rng, specials[:1]) for _ in range(6000)]
    across = learn([split(r"[\s\S]{1,12}"), byte_level()], corpus, 700, [])
    rng = random.Random(args.seed)
    strings = [string_of(rng, specials) for _ in range(args.strings)]
    print(f"seed {args.seed}: {len(strings)} strings, {sum(map(len, strings))} characters, "
          f"{len(set().union(*strings))} different, {sum(len(s.encode()) for s in strings)} bytes")
    if args.each:
        strings += each_character()
    with open(os.path.join(args.out, "strings.bin"), "wb") as f:
        f.write(struct.pack("<I", len(strings)))
        for s in strings:
            f.write(struct.pack("<I", len(s.encode())) + s.encode())
    for name, family in FAMILIES.items():
        path = os.path.join(args.out, name + ".json")
        if not args.golden_only:
            with open(path, "w", encoding="utf-8") as f:
                f.write(train(family, corpus, across) + "\n")
        with open(os.path.join(args.out, name + ".gold"), "wb") as f:
            f.write(golden(path, strings, random.Random(7)))


if __name__ == "__main__":
    main()
