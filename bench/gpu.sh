#!/usr/bin/env bash
# One command for a machine with a GPU: build, tests, limits, benches, compute-sanitizer; a report at the end. It needs
# no network and installs nothing into the environment. Under 8 minutes; a step that fails or is missing is named in the
# report, and the others still run.
#
#   bench/gpu.sh [--out DIR] [--commit NAME] [--device cuda|cpu] [--quick] [--no-build] [--dry-run]
#
# --out       where DATE_DEVICE_COMMIT.json and .md go; profiles/results unless said otherwise
# --commit    what to call the sources where there is no git repository
# --device    cpu runs the same steps without a GPU, to see that they run
# --quick     tiny sizes
# --no-build  take the _fastrl_fast that Python finds
# --dry-run   print the steps and stop
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
root=$PWD all=470 out=profiles/results commit='' device=cuda quick='' build=1 dry=''
usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' bench/gpu.sh; }
while [ $# -gt 0 ]; do
  case $1 in
    --out | --commit | --device)
      [ $# -ge 2 ] || { echo "$1 needs a value" >&2; exit 2; }
      case $1 in --out) out=$2 ;; --commit) commit=$2 ;; --device) device=$2 ;; esac
      shift
      ;;
    --quick) quick=--quick ;;
    --no-build) build='' ;;
    --dry-run) dry=1 ;;
    -h | --help) usage; exit 0 ;;
    *) echo "unknown option $1" >&2; usage >&2; exit 2 ;;
  esac
  shift
done
case $device in cuda | cpu) ;; *) echo "--device must be cuda or cpu, not $device" >&2; exit 2 ;; esac
python=${PYTHON:-python3}
commit=${commit:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export OMP_WAIT_POLICY=passive HF_HUB_OFFLINE=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# behind what is on PATH already: many images install the toolkit and do not name it there
export PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin

# step NAME SECONDS COMMAND...: run it, and leave NAME, exit status and seconds in a table for the report. 124: too long.
step() {
  local name=$1 limit=$2 started=$SECONDS status
  shift 2
  if [ $((all - started)) -lt 5 ]; then
    skip "$name" "no time was left"
    return 0
  fi
  limit=$((limit < all - started ? limit : all - started))
  if [ -n "$dry" ]; then
    printf '%-15s at most %3s s: %s\n' "$name" "$limit" "$*"
    return 0
  fi
  printf '\n== %s (at %s s)\n' "$name" "$started"
  timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$work/$name.log"
  status=${PIPESTATUS[0]}
  printf '%s\t%s\t%s\n' "$name" "$status" "$((SECONDS - started))" >>"$work/steps.tsv"
  return "$status"
}
# skip NAME REASON
skip() {
  printf '%-15s not run: %s\n' "$1" "$2"
  printf '%s\tnot run: %s\t0\n' "$1" "$2" >>"$work/steps.tsv"
}
has() { "$python" -c "import $1" 2>/dev/null; }

if [ -n "$build" ]; then
  with_cuda=$([ "$device" = cuda ] && echo ON || echo OFF)
  if ! { has scikit_build_core && has pybind11 && has pip && command -v cmake >/dev/null &&
    FASTRL_CUDA=$with_cuda CUDAARCHS=native CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) step build 240 \
      "$python" -m pip install --quiet --no-build-isolation --no-deps --no-index --target "$work/site" .; }; then
    step build_by_hand 240 bash bench/build_by_hand.sh "$work/site" "$device" "$python"
  fi
  export PYTHONPATH=$root:$work/site${PYTHONPATH:+:$PYTHONPATH}
else
  export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
fi

bench() { step "$1" "$2" "$python" "bench/$1.py" --device "$device" $quick --json "$work/$1.json"; }
bench limits 60
if [ "$device" = cpu ]; then
  skip tests "they need a GPU"
elif has pytest; then
  # without tests/conftest.py, which needs transformers
  step tests 120 "$python" -m pytest -q --noconftest -p no:cacheprovider -m gpu tests/test_gpu.py
else
  skip tests "pytest is not installed"
fi
bench packed_logprobs 180
bench group_advantage 60
bench selection 60
bench policy_loss 60
step small_cases 60 "$python" bench/small_cases.py --device "$device"
for tool in memcheck racecheck synccheck; do
  if [ "$device" = cpu ]; then
    skip "$tool" "it needs a GPU"
  elif command -v compute-sanitizer >/dev/null; then
    # every tensor an allocation of its own: memcheck sees no step from one to the next inside torch's blocks
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 step "$tool" 90 compute-sanitizer --tool "$tool" --error-exitcode 9 --kernel-name kernel_substring=fastrl \
      "$python" bench/small_cases.py --device cuda
  else
    skip "$tool" "compute-sanitizer is not on PATH"
  fi
done
[ -z "$dry" ] || exit 0
"$python" bench/report.py "$work" --out "$out" --commit "$commit" --command "bench/gpu.sh --device $device $quick"
