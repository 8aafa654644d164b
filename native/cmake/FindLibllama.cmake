# SPDX-License-Identifier: Apache-2.0
#
# Finds what scripts/libllama built.
#
#   Libllama::llama    imported target: libllama and the libraries it stands on, static
#   Libllama_VERSION   version of the package that its source came from
#
# Where the build has CUDA's part beside it, that and CUDA's own libraries are linked too.
#
# IFAB_LIBLLAMA_ROOT names another place than build/libllama.

set(IFAB_LIBLLAMA_ROOT "${CMAKE_CURRENT_LIST_DIR}/../../build/libllama" CACHE PATH "Where scripts/libllama put libllama")
get_filename_component(_libllama_root "${IFAB_LIBLLAMA_ROOT}" ABSOLUTE)

find_path(Libllama_INCLUDE_DIR llama.h PATHS "${_libllama_root}/include" NO_DEFAULT_PATH)
if(EXISTS "${_libllama_root}/version")
  file(STRINGS "${_libllama_root}/version" Libllama_VERSION LIMIT_COUNT 1)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${_libllama_root}/version")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Libllama
  REQUIRED_VARS Libllama_INCLUDE_DIR Libllama_VERSION
  VERSION_VAR Libllama_VERSION
  REASON_FAILURE_MESSAGE "run scripts/libllama, which builds it once")

if(Libllama_FOUND AND NOT TARGET Libllama::llama)
  find_package(Threads REQUIRED)
  add_library(Libllama::llama INTERFACE IMPORTED)
  set(_libllama_cuda)
  if(EXISTS "${_libllama_root}/lib/libggml-cuda.a")
    find_package(CUDAToolkit REQUIRED)
    set(_libllama_cuda "${_libllama_root}/lib/libggml-cuda.a")
  endif()
  # In the order in which a linker needs them.
  target_link_libraries(Libllama::llama INTERFACE
    "${_libllama_root}/lib/libllama.a" "${_libllama_root}/lib/libggml.a" "${_libllama_root}/lib/libggml-cpu.a"
    ${_libllama_cuda} "${_libllama_root}/lib/libggml-base.a" Threads::Threads ${CMAKE_DL_LIBS} m)
  if(_libllama_cuda)
    target_link_libraries(Libllama::llama INTERFACE CUDA::cudart CUDA::cublas CUDA::cublasLt CUDA::cuda_driver)
  endif()
  target_include_directories(Libllama::llama SYSTEM INTERFACE "${Libllama_INCLUDE_DIR}")
endif()
