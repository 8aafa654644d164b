#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds libllama with CUDA, and llama-batched-bench beside it, from the runtime's source on a machine with CUDA, CMake
# and ninja and no network. OUT becomes a root for -DIFAB_LIBLLAMA_ROOT.
#   benchmarks/gpu/build_llama.sh SOURCE OUT VERSION [ARCHITECTURES]
# SOURCE is the folder vendor/llama.cpp of the package that requirements/sources.lock pins. About four minutes on 16 cores.
set -euo pipefail
[ $# -ge 3 ] || { sed -n '3,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }
source=$1 out=$2 version=$3 architectures=${4:-90a-real}
# GIT_DIR keeps the build from describing another repository as its own.
GIT_DIR=/nonexistent cmake -G Ninja -S "$source" -B "$out/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
  -DCMAKE_POSITION_INDEPENDENT_CODE=ON -DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES="$architectures" -DGGML_CUDA_NCCL=OFF \
  -DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_OPENMP=OFF -DGGML_CCACHE=OFF \
  -DLLAMA_OPENSSL=OFF -DLLAMA_CURL=OFF -DLLAMA_BUILD_{TESTS,EXAMPLES,SERVER,APP}=OFF -DLLAMA_BUILD_{COMMON,TOOLS}=ON
cmake --build "$out/build" --target llama-batched-bench
mkdir -p "$out"/{lib,include,bin}
cp "$out"/build/src/libllama.a "$out"/build/ggml/src/lib{ggml,ggml-cpu,ggml-base}.a "$out"/build/ggml/src/ggml-cuda/libggml-cuda.a "$out/lib/"
cp "$source/include/llama.h" "$source"/ggml/include/{ggml,ggml-cpu,ggml-backend,ggml-alloc,ggml-opt,gguf}.h "$out/include/"
cp "$out/build/bin/llama-batched-bench" "$out/bin/"
printf '%s\n' "$version" > "$out/version"
