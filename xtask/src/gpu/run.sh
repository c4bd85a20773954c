#!/bin/sh
# Checks and benchmarks of kvbm on this machine's GPU. It needs NVIDIA's driver and nothing else;
# PyTorch and compute-sanitizer are used where they are installed. Leaves check.json, bench.json,
# replay.json and report.html.
#
#   ./run.sh [--quick] [--device N] [--seconds S] [RESULTS]      [RESULTS: results]
#
# Exit status: 0 if everything passed. KVBM_CUDA_DRIVER names another driver library than
# libcuda.so.1.
set -u
here=$(cd "$(dirname "$0")" && pwd)
quick="" device=0 seconds=60 results=results
while [ $# -gt 0 ]; do
  case "$1" in
    --quick) quick=--quick ;;
    --device) device=$2; shift ;;
    --seconds) seconds=$2; shift ;;
    -*) echo "run.sh: unknown option $1" >&2; exit 2 ;;
    *) results=$1 ;;
  esac
  shift
done
mkdir -p "$results" || exit 1
results=$(cd "$results" && pwd)
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
rm -f "$results/check.json" "$results/bench.json" "$results/replay.json" "$results/report.html"
failed=0
note() { "$here/gpu" note --json "$results/check.json" "$@"; }

echo "== what there is"
"$here/kvbm" doctor --dir "$work"

echo "== checks"
"$here/gpu" check $quick --device "$device" --seconds "$seconds" --json "$results/check.json" || failed=1
[ -f "$results/check.json" ] || { echo "no usable device: nothing was run" >&2; exit 1; }
note doctor ok "$("$here/kvbm" doctor --dir "$work" --json - 2>/dev/null)"

echo "== replay of the manager, every block compared"
if [ -n "$quick" ]; then requests=40; capacity=40,120,600; block=16KiB
else requests=600; capacity=2000,6000,20000; block=1MiB; fi
if "$here/kvbm" replay --device "cuda:$device" --synthetic $requests --capacity $capacity --block-bytes $block \
    --concurrency 2 --dir "$work/g3" --json "$results/replay.json"
then note replay ok "see replay.json"
else note replay failed "see the output above"; failed=1
fi

if command -v compute-sanitizer >/dev/null 2>&1 && [ -z "${KVBM_CUDA_DRIVER:-}" ]; then
  for tool in memcheck racecheck synccheck; do
    echo "== compute-sanitizer $tool"
    if compute-sanitizer --tool $tool --error-exitcode 9 "$here/gpu" check --quick --device "$device" \
        --json "$work/sanitized.json" >"$work/sanitizer.log" 2>&1
    then note "compute_sanitizer_$tool" ok "$(tail -1 "$work/sanitizer.log")"
    else note "compute_sanitizer_$tool" failed "$(tail -5 "$work/sanitizer.log")"; failed=1
    fi
  done
else
  note compute_sanitizer ok "skipped: it is not installed, or there is no real device"
fi

echo "== benchmarks"
"$here/gpu" bench $quick --device "$device" --json "$results/bench.json" || { note bench failed "see the output above"; failed=1; }
if python3 -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' >/dev/null 2>&1; then
  echo "== PyTorch"
  python3 "$here/torch_permute.py" "$results/bench.json" "$device" || { note torch failed "see the output above"; failed=1; }
else
  note torch ok "skipped: PyTorch with CUDA is not installed"
fi
"$here/gpu" report --json "$results/check.json" --json "$results/bench.json" --html "$results/report.html" || failed=1
if [ $failed = 0 ]; then echo "all passed: $results"; else echo "something FAILED: $results" >&2; fi
exit $failed
