# SPDX-License-Identifier: Apache-2.0
#
# Finds what scripts/libllama built.
#
#   Libllama::llama    imported target: libllama and the libraries it stands on, static
#   Libllama_VERSION   version of the package that its source came from
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
  # In the order in which a linker needs them.
  target_link_libraries(Libllama::llama INTERFACE
    "${_libllama_root}/lib/libllama.a" "${_libllama_root}/lib/libggml.a" "${_libllama_root}/lib/libggml-cpu.a"
    "${_libllama_root}/lib/libggml-base.a" Threads::Threads ${CMAKE_DL_LIBS} m)
  target_include_directories(Libllama::llama SYSTEM INTERFACE "${Libllama_INCLUDE_DIR}")
endif()
