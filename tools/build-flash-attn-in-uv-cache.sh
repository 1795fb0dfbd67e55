#!/usr/bin/env bash
# Compile flash-attn once, for this machine's CUDA, into uv's cache.
#
#   tools/build-flash-attn-in-uv-cache.sh [--dry-run]
#
# Afterwards `uv sync --extra flash-attn`, alone or with other extras, installs it from the cache in seconds. So does
# every worker environment with that extra, as long as the versions of torch and flash-attn do not change.
#
# MAX_JOBS           number of compilers at the same time; default: one per 8 GiB of free memory, at most one per core
# CUDA_HOME          CUDA toolkit; by default that of the nvcc on PATH
# UV_CACHE_DIR       uv's cache, as usual
# FLASH_ATTN_CUDA_ARCHS   such as "90;100", for the build; run `uv cache clean flash-attn` before another value
# --dry-run          print the commands; check nothing that only a GPU machine has
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
  echo "build-flash-attn: $1" >&2
  exit 1
}

dry_run=false
case "${1:-}" in
  --dry-run) dry_run=true ;;
  "") ;;
  *) fail "unknown argument $1; there is --dry-run." ;;
esac
[[ $# -le 1 ]] || fail "too many arguments; there is --dry-run."

run() {
  if $dry_run; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}

free_gib() {
  awk '/^MemAvailable:/ { print int($2 / 1024 / 1024) }' /proc/meminfo
}

default_jobs() {
  local by_memory cores
  by_memory=$(($(free_gib) / 8))
  cores=$(nproc)
  echo $((by_memory < 1 ? 1 : by_memory < cores ? by_memory : cores))
}

# The major version of the CUDA that the locked torch was built for: nvcc must have the same.
torch_cuda_major() {
  grep -om1 'name = "cuda-bindings"' uv.lock > /dev/null || return 1
  awk '/^name = "cuda-bindings"$/ { getline; split($3, v, /["."]/); print v[2]; exit }' uv.lock
}

check_toolkit() {
  local nvcc release wanted
  nvcc="${CUDA_HOME:+$CUDA_HOME/bin/}nvcc"
  command -v "$nvcc" > /dev/null || fail "there is no $nvcc. Install the CUDA toolkit, or set CUDA_HOME to it."
  release=$("$nvcc" --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p')
  wanted=$(torch_cuda_major) || fail "uv.lock does not say which CUDA torch is built for. Run: uv lock"
  [[ "$release" == "$wanted" ]] ||
    fail "$nvcc is of CUDA $release, but torch is built for CUDA $wanted. Set CUDA_HOME to a toolkit of CUDA $wanted."
}

command -v uv > /dev/null || fail "there is no uv. Install it: pip install uv"
MAX_JOBS="${MAX_JOBS:-$(default_jobs)}"
[[ "$MAX_JOBS" =~ ^[1-9][0-9]*$ ]] || fail "MAX_JOBS=$MAX_JOBS is not a number of compilers."
export MAX_JOBS

run uv lock
$dry_run || check_toolkit

throwaway="${TMPDIR:-/tmp}/flash-attn-build-$$"
trap 'rm -rf "$throwaway"' EXIT
echo "Compiling flash-attn with $MAX_JOBS compilers at a time; this takes from ten minutes to hours." >&2
run env UV_PROJECT_ENVIRONMENT="$throwaway" uv sync --frozen --no-install-project --extra flash-attn
run "$throwaway/bin/python" -c "import flash_attn; print('flash-attn', flash_attn.__version__, 'is in the cache')"
