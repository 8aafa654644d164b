# SPDX-License-Identifier: Apache-2.0
#
# TensorRT-LLM with its Executor: headers, and the library with its plugins, which pulls in the rest.
#
#   TensorRTLLM::executor   imported target
#
#   IFAB_TENSORRT_LLM_ROOT   folder with include/tensorrt_llm and lib, as the vendor's release image has it
set(IFAB_TENSORRT_LLM_ROOT "" CACHE PATH "Where TensorRT-LLM's headers and libraries are")
find_path(TensorRTLLM_INCLUDE_DIR tensorrt_llm/executor/executor.h HINTS "${IFAB_TENSORRT_LLM_ROOT}" PATH_SUFFIXES include)
find_library(TensorRTLLM_PLUGINS nvinfer_plugin_tensorrt_llm HINTS "${IFAB_TENSORRT_LLM_ROOT}" PATH_SUFFIXES lib libs)
find_library(TensorRTLLM_LIBRARY tensorrt_llm HINTS "${IFAB_TENSORRT_LLM_ROOT}" PATH_SUFFIXES lib libs)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(TensorRTLLM
  REQUIRED_VARS TensorRTLLM_INCLUDE_DIR TensorRTLLM_PLUGINS TensorRTLLM_LIBRARY
  REASON_FAILURE_MESSAGE "set IFAB_TENSORRT_LLM_ROOT to the folder with include and lib")
if(TensorRTLLM_FOUND AND NOT TARGET TensorRTLLM::executor)
  find_package(TensorRT REQUIRED)
  add_library(TensorRTLLM::executor INTERFACE IMPORTED)
  target_include_directories(TensorRTLLM::executor SYSTEM INTERFACE
    "${TensorRTLLM_INCLUDE_DIR}" ${TensorRT_INCLUDE_DIRS})
  target_compile_definitions(TensorRTLLM::executor INTERFACE ENABLE_BF16 ENABLE_FP8)
  target_link_libraries(TensorRTLLM::executor INTERFACE "${TensorRTLLM_PLUGINS}" "${TensorRTLLM_LIBRARY}")
endif()
