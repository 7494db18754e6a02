# layers.awk: includes point down only.
#   awk -f tools/layers.awk FILE...    (paths from the repository's root)
# Prints each include that points up or sideways, to a public header's folder from the outside in,
# or to no known place, and ends with 1 when there was one. The ranks are those of
# docs/ARCHITECTURE.md; a file may include its own folder and any lower rank.
BEGIN {
    n = split("include/kvspan 0 base 1 num 2 shard 2 text 2 dev 3 kern 4 comm 4 kv 5 dcp 6 " \
              "model 7 engine 8 check 8 api 9 serve 10 cli 11 examples 11", t, " ")
    for (i = 1; i < n; i += 2)
        rank[t[i]] = t[i + 1]
    # These see the public headers only, as any other program would.
    outside["serve"] = outside["cli"] = outside["examples"] = 1
}

# The folder of a path from the root: "kern" for src/kern/x86/simd.h, "" when it has no rank.
function folder(path, part) {
    sub(/^\.\//, "", path)
    if (path ~ /^include\/kvspan\//)
        return "include/kvspan"
    split(path, part, "/")
    return part[1] == "src" ? part[2] : part[1]
}

# The folder an include names, seen from folder `from` (which a bare file name means).
function target(name, from, part) {
    if (name ~ /^kvspan\//)
        return "include/kvspan"
    if (split(name, part, "/") == 1)
        return from
    return part[1]
}

function complain(why) {
    printf "%s:%d: %s: %s\n", FILENAME, FNR, why, $0
    bad++
}

FNR == 1 {
    here = folder(FILENAME)
    if (!(here in rank)) {
        printf "%s: its folder has no rank\n", FILENAME
        bad++
    }
}

/^[ \t]*#[ \t]*include[ \t]*"/ && (here in rank) {
    name = $0
    sub(/^[^"]*"/, "", name)
    sub(/".*$/, "", name)
    if (name ~ /(^|\/)\.\.?\//) {
        complain("relative include")
        next
    }
    there = target(name, here)
    if (!(there in rank))
        complain("include of an unknown folder")
    else if (there == here)
        next
    else if (here in outside && there != "include/kvspan")
        complain("only public headers may be included here")
    else if (rank[there] >= rank[here])
        complain("include that points " (rank[there] > rank[here] ? "up" : "sideways"))
}

END { exit bad > 0 }
