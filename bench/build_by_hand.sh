#!/usr/bin/env bash
# Build _fastrl_fast into a folder where pip, scikit-build-core or pybind11 is missing: the compilers alone, with the
# flags of CMakeLists.txt and, if need be, the copy of pybind11 that torch carries.
#
#   bench/build_by_hand.sh FOLDER cuda|cpu [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1 device=$2 python=${3:-python3}
mkdir -p "$folder/objects"
read -r suffix include pybind <<<"$("$python" - <<'PY'
import sysconfig
try:
    import pybind11
    pybind = pybind11.get_include()
except ImportError:
    import pathlib, torch
    pybind = pathlib.Path(torch.__file__).parent / "include"
print(sysconfig.get_config_var("EXT_SUFFIX"), sysconfig.get_path("include"), pybind)
PY
)"
[ -n "${pybind:-}" ] || { echo "$python has neither pybind11 nor torch" >&2; exit 2; }
flags=(-std=c++17 -O3 -fPIC -fopenmp -ffp-contract=off -fvisibility=hidden -Icsrc)
objects=() jobs=()
compile() { # NAME COMMAND...
  local object=$folder/objects/$1.o
  shift
  "$@" -o "$object" &
  jobs+=($!) objects+=("$object")
}
simd=()
if [ "$(uname -m)" = x86_64 ]; then simd=(-DFASTRL_WITH_AVX2=1); fi
flags+=(${simd[@]+"${simd[@]}"})
for source in csrc/kernels/cpu/*.cpp; do
  name=$(basename "$source" .cpp) extra=()
  case $name in
    *_avx2) [ "$(uname -m)" = x86_64 ] || continue; extra=(-mavx2 -mfma) ;;
    *_avx512) [ "$(uname -m)" = x86_64 ] || continue; extra=(-mavx512f) ;;
  esac
  case $name in
    group_advantage | policy_loss*) extra+=(-fno-trapping-math) ;;
  esac
  compile "cpu_$name" g++ "${flags[@]}" ${extra[@]+"${extra[@]}"} -c "$source"
done
includes=("-I$include" "-I$pybind" -Icsrc)
if [ "$device" = cuda ]; then
  for source in csrc/kernels/cuda/*.cu; do
    compile "cuda_$(basename "$source" .cu)" nvcc -std=c++17 -O3 -lineinfo -fmad=false -Xcompiler=-fPIC -Icsrc \
      -gencode=arch=compute_80,code=sm_80 "-gencode=arch=compute_90,code=[sm_90,compute_90]" -c "$source"
  done
  # nvcc knows where its toolkit has nvtx3 and the static cudart
  compile bindings nvcc -std=c++17 -O3 -Xcompiler=-fPIC,-fvisibility=hidden -DFASTRL_WITH_CUDA=1 \
    ${simd[@]+"${simd[@]}"} "${includes[@]}" -c csrc/bindings.cpp
  link=(nvcc -shared -Xcompiler=-fopenmp)
else
  compile bindings g++ "${flags[@]}" "${includes[@]}" -c csrc/bindings.cpp
  link=(g++ -shared -fopenmp)
fi
for job in "${jobs[@]}"; do wait "$job"; done
"${link[@]}" "${objects[@]}" -o "$folder/_fastrl_fast$suffix"
rm -r "$folder/objects"
echo "built $folder/_fastrl_fast$suffix"
