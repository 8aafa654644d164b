# SPDX-License-Identifier: Apache-2.0
#
# Headers of TensorRT and of the CUDA run time that it includes. Sets TensorRT_FOUND, TensorRT_INCLUDE_DIRS and
# TensorRT_VERSION. Libraries are not looked for: they are opened when an engine is loaded.
#
#   IFAB_TENSORRT_ROOT   folder with NvInferRuntime.h, or with include/NvInferRuntime.h
#   IFAB_CUDA_ROOT       folder with cuda_runtime_api.h, or with include/cuda_runtime_api.h; a toolkit is found by itself
set(IFAB_TENSORRT_ROOT "" CACHE PATH "Where TensorRT's headers are")
set(IFAB_CUDA_ROOT "" CACHE PATH "Where the CUDA run time's headers are")
find_path(TensorRT_HEADERS NvInferRuntime.h HINTS "${IFAB_TENSORRT_ROOT}" PATH_SUFFIXES include)
find_path(TensorRT_CUDA_HEADERS cuda_runtime_api.h
  HINTS "${IFAB_CUDA_ROOT}" PATHS /usr/local/cuda PATH_SUFFIXES include targets/x86_64-linux/include)
if(TensorRT_HEADERS AND EXISTS "${TensorRT_HEADERS}/NvInferVersion.h")
  file(STRINGS "${TensorRT_HEADERS}/NvInferVersion.h" lines REGEX "^#define (NV_TENSORRT|TRT)_(MAJOR|MINOR)[_A-Z]* [0-9]+")
  string(REGEX MATCHALL "[0-9]+" numbers "${lines}")
  list(JOIN numbers "." TensorRT_VERSION)
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(TensorRT
  REQUIRED_VARS TensorRT_HEADERS TensorRT_CUDA_HEADERS
  REASON_FAILURE_MESSAGE "set IFAB_TENSORRT_ROOT and IFAB_CUDA_ROOT to folders with the headers")
set(TensorRT_INCLUDE_DIRS "${TensorRT_HEADERS}" "${TensorRT_CUDA_HEADERS}")
mark_as_advanced(TensorRT_HEADERS TensorRT_CUDA_HEADERS)
