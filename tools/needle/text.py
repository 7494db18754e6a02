#!/usr/bin/env python3
"""Takes the prose out of documentation packages of Debian and writes it as plain text.

    apt-get download PACKAGE...; dpkg -x PACKAGE.deb ROOT/PACKAGE     (the list is SOURCES below)
    text.py --root ROOT --out WORK

Writes WORK/train.txt, WORK/valid.txt (every hundredth document of the same packages) and
WORK/heldout.txt (the packages of HELD_OUT, of which training sees nothing); documents are separated
by a form feed. Paragraphs, list items and headings stay; code, tables, menus and navigation go.
Repeated paragraphs are kept once. Typographic quotes and dashes become ASCII.

Needs lxml. Licences are listed in models/needle/README.md.
"""
import argparse
import hashlib
import os
import re
import sys

from lxml import html

# package -> pattern that a file's path inside the package must match
SOURCES = {
    "apache2-doc": r"\.html\.en$|/en/.*\.html$",
    "aptitude-doc-en": r"\.html$",
    "cmake-doc": r"\.html$",
    "debian-faq": r"\.en\.html$|/[^/.]*\.html$",
    "debian-handbook": r"/en-US/.*\.html$",
    "debian-policy": r"\.html$",
    "debian-reference-en": r"\.html$",
    "developers-reference": r"\.html$",
    "erlang-doc": r"\.html$",
    "exim4-doc-html": r"\.html$",
    "ghc-doc": r"users_guide/.*\.html$|/libraries/.*\.html$",
    "git-doc": r"\.html$",
    "gnome-user-docs": r"/C/.*\.page$",
    "harden-doc": r"en.*\.html$",
    "installation-guide-amd64": r"/en/.*\.html$",
    "libreoffice-help-en-us": r"/en-US/.*\.html$",
    "linux-doc-6.12": r"\.html$",
    "llvm-19-doc": r"\.html$",
    "maint-guide": r"\.html$",
    "maxima-doc": r"\.html$",
    "nodejs-doc": r"\.html$",
    "octave-doc": r"\.html$",
    "perl-doc": r"\.pod$",
    "postgresql-doc-15": r"\.html$",
    "python-django-doc": r"\.html$",
    "python-sqlalchemy-doc": r"\.html$",
    "python3.11-doc": r"\.html$",
    "rust-doc": r"/html/(book|cargo|edition-guide|embedded-book|nomicon|reference|rust-by-example"
                r"|rustc|rustdoc|style-guide|unstable-book|clippy|core|std|alloc|test)/.*\.html$",
}
HELD_OUT = {"sqlite3-doc": r"\.html$"}

SKIP_PATH = re.compile(r"genindex|py-modindex|/search\.|_sources/|translations/|/zh_|/it_IT|/ja_JP"
                       r"|print\.html|/sp_SP|/second-edition/|/first-edition/|/2018-edition/")
BLOCKS = {"p", "li", "dd", "h1", "h2", "h3", "h4", "title", "item"}
LISTS = {"ul", "ol", "dl", "div"}
DROP = {"pre", "script", "style", "table", "nav", "footer", "header", "head", "form", "svg",
        "screen", "programlisting", "aside", "button", "select", "noscript", "summary"}
PLAIN = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "...",
                       "\u00a0": " ", "\u00b6": "", "\u200b": "", "\u2060": "", "•": "", "→": "->",
                       "§": "", "\u00ad": "", "−": "-", "×": "x"})
BLANK = re.compile(r"\s+")
POD_CODE = re.compile(r"[A-Z]<{1,3}\s*([^<>]*?)\s*>{1,3}")


def tidy(text):
    return BLANK.sub(" ", text.translate(PLAIN)).strip()


def is_prose(text):
    """Enough letters, mostly ASCII, ends like a sentence: keeps out names, signatures, menus."""
    if len(text) < 40 or not text.isascii() or text[-1] not in ".:!?)\"'":
        return False
    letters = sum(c.isalpha() or c == " " for c in text)
    words = text.split()
    return letters > 0.86 * len(text) and len(words) >= 7 and max(map(len, words)) < 40


def own_text(node):
    """Text of a block without that of nested blocks and dropped elements."""
    parts = [node.text or ""]
    for child in node:
        tag = child.tag if isinstance(child.tag, str) else None
        local = tag.rsplit("}", 1)[-1] if tag else None
        if local and local not in DROP and local not in BLOCKS and local not in LISTS:
            parts.append(own_text(child))
        parts.append(child.tail or "")
    return "".join(parts)


def walk(node, out):
    for child in node:
        if not isinstance(child.tag, str):
            continue
        tag = child.tag.rsplit("}", 1)[-1]
        if tag in DROP:
            continue
        role = (child.get("role") or "") + " " + (child.get("class") or "")
        if re.search(r"navigation|sphinxsidebar|toc\b|related|breadcrumb|footer|sidebar|toctree", role):
            continue
        if tag == "div" and child.get("class") == "para":
            tag = "p"
        if tag in BLOCKS:
            text = tidy(own_text(child))
            if tag[0] == "h" or tag == "title":
                if text.isascii() and 3 < len(text) < 80 and re.match(r"[\d.A-Za-z ]*[A-Za-z]", text):
                    out.append(("head", re.sub(r"^[\d.]+\s*|\s*#$", "", text)))
            elif is_prose(text):
                out.append(("text", text))
        walk(child, out)


def read_html(data):
    try:
        root = html.document_fromstring(data, parser=html.HTMLParser(encoding="utf-8"))
    except (ValueError, AssertionError, html.etree.ParserError):
        return []
    body = root.find("body")
    out = []
    for finder in (".//main", ".//*[@role='main']", ".//*[@id='content']"):
        found = (body if body is not None else root).find(finder)
        if found is not None:
            walk(found, out)
            return out
    walk(body if body is not None else root, out)
    return out


def read_pod(data):
    out = []
    for block in re.split(r"\n\s*\n", data.decode("utf-8", "replace")):
        if block.startswith("=head"):
            text = tidy(POD_CODE.sub(r"\1", block.split(None, 1)[-1]))
            if text.isascii() and 3 < len(text) < 80:
                out.append(("head", text))
        elif block and not block[0].isspace() and block[0] != "=":
            for _ in range(3):
                block = POD_CODE.sub(r"\1", block)
            text = tidy(block)
            if is_prose(text):
                out.append(("text", text))
    return out


def files_of(root, package, pattern):
    match = re.compile(pattern)
    for folder, folders, names in os.walk(os.path.join(root, package)):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(folder, name)
            if match.search(path) and not SKIP_PATH.search(path) and not os.path.islink(path):
                yield path


def documents(root, package, pattern, seen):
    """Yields each file's prose; a paragraph seen before, in any package, is left out."""
    for path in files_of(root, package, pattern):
        with open(path, "rb") as f:
            data = f.read()
        blocks = read_pod(data) if path.endswith(".pod") else read_html(data)
        kept = []
        for kind, text in blocks:
            if kind == "text":
                key = hashlib.blake2b(text.encode(), digest_size=8).digest()
                if key in seen:
                    continue
                seen.add(key)
            kept.append((kind, text))
        lines = [t for i, (k, t) in enumerate(kept)
                 if k == "text" or (i + 1 < len(kept) and kept[i + 1][0] == "text")]
        text = "\n\n".join(lines)
        if len(text) >= 300:
            yield text


def main():
    parser = argparse.ArgumentParser(description="Prose of documentation packages as plain text")
    parser.add_argument("--root", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    seen = set()
    held = []
    for package, pattern in HELD_OUT.items():
        held += list(documents(args.root, package, pattern, seen))
    train, valid = [], []
    for package, pattern in SOURCES.items():
        size = count = 0
        for text in documents(args.root, package, pattern, seen):
            count += 1
            size += len(text)
            (valid if count % 100 == 0 else train).append(text)
        print(f"{package:28s} {count:6d} documents {size / 1e6:8.2f} MB")
        sys.stdout.flush()
    for name, texts in (("train", train), ("valid", valid), ("heldout", held)):
        with open(os.path.join(args.out, name + ".txt"), "w", encoding="utf-8") as f:
            f.write("\f".join(texts))
        print(f"{name}: {len(texts)} documents {sum(map(len, texts)) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
