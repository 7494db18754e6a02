#!/bin/bash
# gpu.sh: what a CUDA build is to show on a GPU host, from prebuilt binaries.
#   tools/gpu.sh pack BUILD DIR       here: copies what the host needs (the program, a test, the shared
#                                     libraries they load) from a build folder into DIR, a few MB
#   tools/gpu.sh run DIR [STAGE...]   there: runs the stages, all when none is named, and prints a short
#                                     table last. Logs, CSV and JSON go to $OUT, or to DIR/out.
# Stages: info test quick check comm processes sanitize bench
#   info      the card and its driver
#   test      the unit test of devices
#   quick     kvspan check --device cuda --quick
#   check     kvspan check --device cuda
#   comm      kvspan check --comm --device cuda: exchanges between the devices, or over one
#   processes the same over four processes of this host
#   sanitize  compute-sanitizer memcheck, racecheck, initcheck and synccheck over the quick check; then the pairs of
#             instructions that racecheck names, each once, with how often (docs/kernels-hopper.md explains those known)
#   bench     kvspan bench attn, index, select and exchange --device cuda; layer: attn --dcp 2, over two devices or one,
#             sparse and dense, by default and deterministic
# GPU_ARGS   more options for every check, e.g. "--op attn --variant sm90"
# GPU_BENCH  which benches to run (attn index select exchange layer)
set -uo pipefail

usage() {
    sed -n '2,20s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

# The program, the test, and what they load besides glibc.
pack() { # BUILD DIR
    mkdir -p "$2/lib"
    cp "$1/kvspan" "$2/" || exit 1
    cp "$1/tests/unit/dev/test_dev_cuda" "$2/" 2>/dev/null || echo "pack: no test_dev_cuda in $1"
    ldd "$2"/kvspan "$2"/test_dev_cuda 2>/dev/null | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' |
        grep -vE '/(libc|libm|libdl|librt|libpthread|ld-linux[^/]*)\.so' | sort -u |
        xargs -r cp -Lt "$2/lib"
    cp "$0" "$2/gpu.sh"
    du -sh "$2"
}

fails=0
summary=()

# Runs a command with its output in a log; notes the verdict and the line that says most.
step() { # NAME COMMAND...
    local name=$1 log=$out/$1.log status=0 start=$SECONDS
    shift
    echo "== $name: $*"
    "$@" >"$log" 2>&1 || status=$?
    [ "$status" = 0 ] || { fails=$((fails + 1)); grep -E 'FAIL|ERROR|Error|kvspan:' "$log" | head -n 20; }
    summary+=("$(printf '%-22s %-4s %4d s  %s' "$name" "$([ "$status" = 0 ] && echo ok || echo FAIL)" \
        $((SECONDS - start)) "$(tail -n 1 "$log" | cut -c1-100)")")
}

# Without a device most of it is skipped, which here is a failure.
device_test() {
    "$dir/test_dev_cuda" 2>&1 | tee "$out/test_dev_cuda.log"
    [ "${PIPESTATUS[0]}" = 0 ] && grep -q 'OK ] a_device_describes_itself' "$out/test_dev_cuda.log"
}

check_step() { # NAME SECONDS OPTION...
    local name=$1 limit=$2
    shift 2
    # shellcheck disable=SC2086
    step "$name" timeout "$limit" "$dir/kvspan" check --device cuda --csv "$out/$name.csv" "$@" ${GPU_ARGS:-}
}

# A port below those that the kernel hands out, at which nobody answers.
free_port() {
    local port
    while port=$((20000 + RANDOM % 10000)) && (: <>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do :; done
    echo $port
}

# Rank 0 has the rows; the logs of the others say why if it has none. Peer memory that is skipped is a failure here: one
# host has it.
processes() {
    local r pid pids=() status=0 port
    port=$(free_port)
    trap 'kill "${pids[@]}" 2>/dev/null; exit 130' INT TERM HUP
    for r in 0 1 2 3; do
        timeout 100 "$dir/kvspan" check --comm --device cuda --rendezvous "tcp://127.0.0.1:$port" --rank $r --ranks 4 \
            >"$out/processes-$r.log" 2>&1 &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do
        wait "$pid" || status=$?
    done
    trap - INT TERM HUP
    cat "$out"/processes-[321].log "$out/processes-0.log"
    if ! grep -q 'transport=p2p over=tcp.* pass' "$out/processes-0.log"; then
        echo "FAIL no exchange over peer memory between processes: transport=p2p over=tcp has no row that passed"
        status=1
    fi
    return $status
}

sanitizer() {
    command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null
}

# Where a report's first access lies, and each that it is held against; offsets are those of cuobjdump -sass.
race_pairs() {
    awk '/Race reported between/ { sub(/.*between /, ""); first = $0; next }
         /and (Read|Write) access/ && first != "" {
             sub(/.*and /, ""); sub(/ \[[0-9]+ hazards\].*/, ""); n[first " | " $0]++ }
         END { for (pair in n) printf "%6d %s\n", n[pair], pair }' | sort -k2
}

sanitize() {
    local tool bin limit
    bin=$(sanitizer)
    if [ -z "$bin" ]; then
        summary+=("sanitize               skip         compute-sanitizer is not here")
        return
    fi
    for tool in memcheck racecheck initcheck synccheck; do
        limit=$([ $tool = racecheck ] && echo 500 || echo 170)
        # shellcheck disable=SC2086
        step "sanitize-$tool" timeout "$limit" "$bin" --tool $tool --error-exitcode 9 --print-limit 1000 \
            "$dir/kvspan" check --device cuda --quick ${GPU_ARGS:-}
    done
    race_pairs <"$out/sanitize-racecheck.log"
}

bench_rows() { # NAME OPTION...
    local name=$1
    shift
    step "bench-$name" "$dir/kvspan" bench "$@" --device cuda --csv "$out/$name.csv"
    [ -s "$out/$name.csv" ] && rows+=("$out/$name.csv")
}

bench() {
    local op
    for op in ${GPU_BENCH:-attn index select exchange layer}; do
        if [ "$op" = layer ]; then
            bench_rows layer attn --dcp 2 --batch 1,16,64
            bench_rows layer-det attn --dcp 2 --batch 16 --kernels attn=sm90_det
            bench_rows layer-dense attn --dcp 2 --batch 16 --topk 0 --kv bf16,fp8
            bench_rows layer-dense-det attn --dcp 2 --batch 16 --topk 0 --kv bf16 --kernels attn=sm90_det
        else
            bench_rows "$op" "$op"
        fi
    done
}

run() { # DIR STAGE...
    dir=$(cd "$1" && pwd) || exit 1
    shift
    out=${OUT:-$dir/out}
    mkdir -p "$out"
    export LD_LIBRARY_PATH=$dir/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    rows=()
    local stage
    [ $# -gt 0 ] || set -- info test quick check comm processes sanitize bench
    for stage in "$@"; do
        case $stage in
        info) step info nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv ;;
        test) step test device_test ;;
        quick) check_step quick 200 --quick ;;
        check) check_step check 300 ;;
        comm) step comm timeout 200 "$dir/kvspan" check --comm --device cuda ;;
        processes) step processes processes ;;
        sanitize) sanitize ;;
        bench) bench ;;
        *) usage ;;
        esac
    done
    echo
    printf '%s\n' "${summary[@]}"
    # case, variant, kv, dcp, invalid, median, graph, Gbyte/s, share, check
    [ ${#rows[@]} -gt 0 ] && awk -F, '
        BEGIN { printf "%-24s %-10s %-10s %3s %6s %10s %10s %8s %6s %s\n", "case", "variant", "kv", "dcp",
                "holes", "median us", "graph us", "GB/s", "share", "check" }
        FNR > 1 { printf "%-24s %-10s %-10s %3s %6s %10.1f %10.1f %8.0f %5.0f%% %s\n", $1, $3, $12, $10, $11,
                  $13, $16, $20 * 1e-9, 100 * $23, $24 }' "${rows[@]}"
    [ "$fails" = 0 ]
}

case ${1:-} in
pack) [ $# = 3 ] || usage; pack "$2" "$3" ;;
run) [ $# -ge 2 ] || usage; shift; run "$@" ;;
*) usage ;;
esac
