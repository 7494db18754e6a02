# budget.awk: no file over 1000 lines, no function over 120.
#   awk -f tools/budget.awk FILE.c FILE.h FILE.cu...
# A function may have up to 160 lines when the first line of its body is a comment that gives the
# reason. Prints each offender with its length and ends with 1 when there was one. Relies on the
# project's form: the braces of a function's body stand alone in the first column.
function report(what, n, limit) {
    printf "%s: %s: %d lines, the limit is %d\n", file, what, n, limit
    bad++
}

function end_file() {
    if (lines > 1000)
        report("the file", lines, 1000)
}

FNR == 1 {
    if (file != "")
        end_file()
    file = FILENAME
    open = 0
    name = ""
}

{ lines = FNR }

# The last line in the first column that looks like the head of a function names it.
/^[A-Za-z_].*\(/ && !open {
    name = $0
    sub(/\(.*/, "", name)
    sub(/.*[ *]/, "", name)
}

/^\{/ && !open {
    open = FNR
    limit = 120
    next
}

open && FNR == open + 1 && /^[ \t]*(\/\*|\/\/)/ { limit = 160 }

/^\}/ && open {
    if (FNR - open + 1 > limit)
        report(name "()", FNR - open + 1, limit)
    open = 0
}

END {
    if (file != "")
        end_file()
    exit bad > 0
}
