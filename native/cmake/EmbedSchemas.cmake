# SPDX-License-Identifier: Apache-2.0
#
# The contract part of the library: the schemas of engines/schema, built in, and the code that reads by them.
#
#   ifab_add_contracts(TARGET)   gives TARGET the code of schema.h, contract.h and directory.h
#   ifab_add_check_tool()        adds the command-line tool ifab_check
#
# A schema that is added, changed or removed is seen by the next build.

set(IFAB_SCHEMA_DIR "${CMAKE_CURRENT_LIST_DIR}/../../engines/schema")
set(IFAB_EMBED_SCRIPT "${CMAKE_CURRENT_LIST_DIR}/embed_schemas.cmake")
set(IFAB_NATIVE_DIR "${CMAKE_CURRENT_LIST_DIR}/..")

function(ifab_add_contracts target)
  if(NOT TARGET ifab_contracts)
    ifab_make_contracts_library()
  endif()
  target_link_libraries(${target} PRIVATE ifab_contracts)
endfunction()

# Static, so that the library, its tests, the tool and the fuzz targets run the same object code.
function(ifab_make_contracts_library)
  find_package(nlohmann_json 3.11 REQUIRED)
  file(GLOB schemas CONFIGURE_DEPENDS "${IFAB_SCHEMA_DIR}/*.schema.json")
  set(generated "${CMAKE_CURRENT_BINARY_DIR}/embedded_schemas.cpp")
  add_custom_command(
    OUTPUT "${generated}"
    COMMAND "${CMAKE_COMMAND}" "-DOUTPUT=${generated}" "-DSCHEMA_DIR=${IFAB_SCHEMA_DIR}" -P "${IFAB_EMBED_SCRIPT}"
    DEPENDS ${schemas} "${IFAB_EMBED_SCRIPT}"
    COMMENT "Embedding the schemas of engines/schema"
    VERBATIM)
  add_library(ifab_contracts STATIC
    "${generated}"
    "${IFAB_NATIVE_DIR}/src/contract.cpp"
    "${IFAB_NATIVE_DIR}/src/directory.cpp"
    "${IFAB_NATIVE_DIR}/src/document.cpp"
    "${IFAB_NATIVE_DIR}/src/rules.cpp"
    "${IFAB_NATIVE_DIR}/src/schema.cpp"
    "${IFAB_NATIVE_DIR}/src/schema_node.cpp"
    "${IFAB_NATIVE_DIR}/src/sha256.cpp")
  target_compile_features(ifab_contracts PUBLIC cxx_std_20)
  target_compile_options(ifab_contracts PRIVATE -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror)
  target_include_directories(ifab_contracts PUBLIC "${IFAB_NATIVE_DIR}/src" "${IFAB_NATIVE_DIR}/include")
  target_link_libraries(ifab_contracts PRIVATE nlohmann_json::nlohmann_json)
  set_target_properties(ifab_contracts PROPERTIES
    POSITION_INDEPENDENT_CODE ON
    CXX_VISIBILITY_PRESET hidden
    VISIBILITY_INLINES_HIDDEN ON)
endfunction()

function(ifab_add_check_tool)
  find_package(nlohmann_json 3.11 REQUIRED)
  add_executable(ifab_check "${IFAB_NATIVE_DIR}/tools/ifab_check.cpp")
  target_compile_options(ifab_check PRIVATE -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror)
  target_link_libraries(ifab_check PRIVATE nlohmann_json::nlohmann_json)
  ifab_add_contracts(ifab_check)
endfunction()
