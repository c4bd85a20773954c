#!/bin/sh
# Checks and benchmarks of kvbm on this machine's GPU. It needs NVIDIA's driver and nothing else;
# PyTorch and compute-sanitizer are used where they are installed. Leaves check.json, bench.json,
# report.html and a replay.json of each kind of model.
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
for old in check.json bench.json report.html replay.json replay_windows.json replay_states.json replay_latent.json \
  replay_scales.json
do rm -f "${results:?}/$old"; done
failed=0
note() { "$here/gpu" note --json "$results/check.json" "$@"; }

echo "== what there is"
"$here/kvbm" doctor --dir "$work"

echo "== checks"
"$here/gpu" check $quick --device "$device" --seconds "$seconds" --json "$results/check.json" || failed=1
[ -f "$results/check.json" ] || { echo "no usable device: nothing was run" >&2; exit 1; }
note doctor ok "$("$here/kvbm" doctor --dir "$work" --json - 2>/dev/null)"

echo "== replays of the manager, every block compared"
replay() {
  name=$1; shift
  if "$here/kvbm" replay --device "cuda:$device" --synthetic $requests --concurrency 2 --dir "$work/$name" "$@" \
      --json "$results/$name.json"
  then note "$name" ok "see $name.json"
  else note "$name" failed "see the output above"; failed=1
  fi
  rm -rf "${work:?}/$name"
}
if [ -n "$quick" ]; then requests=40 one=40,120,600 several=300,400,4000 block=16KiB small=16KiB
else requests=600 one=600,1500,20000 several=2000,4000,40000 block=1MiB small=256KiB; fi
replay replay --capacity $one --block-bytes $block
# Several cache groups: windows beside full attention, each token with scales; then states.
replay replay_windows --model gemma-3 --checkpoint-every 4 --dtype fp8_e4m3 --scales token:f16 \
  --capacity $several --block-bytes $small
replay replay_states --model jamba --checkpoint-every 4 --capacity $several --block-bytes $small
# One latent in place of keys and values, the same on both ranks. Then heads of one byte, with
# scales.
replay replay_latent --model deepseek-v3 --dtype fp8_e4m3 --tp 2 --capacity $one --block-bytes $block
replay replay_scales --dtype fp8_e4m3 --scales head --capacity $one --block-bytes $block

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
