# SPDX-License-Identifier: Apache-2.0
# Tests of the llama backend, stepped directly. Included where that backend is built.
#
# IFAB_TEST_LLAMA_ENGINE is the directory of a real engine; some tests skip, and say so, where there is none.
get_filename_component(default_engine "${CMAKE_CURRENT_SOURCE_DIR}/../../build/engines/smollm2-135m" ABSOLUTE)
set(IFAB_TEST_LLAMA_ENGINE "${default_engine}" CACHE PATH "Directory of a llama engine that the tests may use")

add_library(ifab_llama_test_support STATIC llama_support/driver.cpp llama_support/tiny_engine.cpp)
target_link_libraries(ifab_llama_test_support
  PUBLIC ifab_core ifab_backend_llama ifab_test_support
  PRIVATE ifab_options nlohmann_json::nlohmann_json)
target_include_directories(ifab_llama_test_support PUBLIC "${CMAKE_CURRENT_SOURCE_DIR}")

# Writes an engine directory, for tests of programs that are not ours to link into.
add_executable(ifab_tiny_llama_directory llama_support/tiny_engine_main.cpp)
target_link_libraries(ifab_tiny_llama_directory PRIVATE ifab_llama_test_support ifab_options)
set_target_properties(ifab_tiny_llama_directory PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/tools")

function(ifab_llama_test name)
  add_executable(${name} ${name}.cpp)
  target_link_libraries(${name} PRIVATE ${ARGN} ifab_llama_test_support ifab_options GTest::gtest_main)
  # They take turns: each steps with two threads.
  gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60
    PROPERTIES TIMEOUT 280 RESOURCE_LOCK llama ENVIRONMENT "IFAB_TEST_LLAMA_ENGINE=${IFAB_TEST_LLAMA_ENGINE}")
endfunction()

ifab_llama_test(llama_reproducible_test)
ifab_llama_test(llama_batcher_test)
ifab_llama_test(llama_cache_test)
ifab_llama_test(llama_config_test ifab_engine nlohmann_json::nlohmann_json)
ifab_llama_test(llama_sampler_test)
ifab_llama_test(llama_chooser_test)
ifab_llama_test(llama_guide_test)
target_sources(llama_guide_test PRIVATE llama_schema_test.cpp)
ifab_llama_test(llama_calls_test nlohmann_json::nlohmann_json)
target_link_options(llama_calls_test PRIVATE -Wl,--wrap=ggml_backend_sched_graph_compute_async)
ifab_llama_test(llama_allocation_test)
target_link_options(llama_allocation_test PRIVATE
  -Wl,--wrap=llama_decode,--wrap=llama_memory_seq_cp,--wrap=llama_memory_seq_rm)

# Not tests: they print figures, for benchmarks/admission.py and benchmarks/calls.py.
if(NOT IFAB_SANITIZE)
  foreach(program llama_admission llama_calls)
    add_executable(${program} ${program}.cpp)
    target_link_libraries(${program} PRIVATE ifab_llama_test_support ifab_options)
  endforeach()
endif()
