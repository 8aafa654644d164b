# SPDX-License-Identifier: Apache-2.0
#
# The contract part of the library: the schemas of engines/schema, built in, and the code that reads by them.
#
#   ifab_add_contracts(TARGET)   adds schema, contract and directory sources, and every *.schema.json, to TARGET
#
# A schema that is added, changed or removed is seen by the next build.

set(IFAB_SCHEMA_DIR "${CMAKE_CURRENT_LIST_DIR}/../../engines/schema")
set(IFAB_EMBED_SCRIPT "${CMAKE_CURRENT_LIST_DIR}/embed_schemas.cmake")
set(IFAB_CONTRACT_SOURCE_DIR "${CMAKE_CURRENT_LIST_DIR}/../src")

function(ifab_add_contracts target)
  file(GLOB schemas CONFIGURE_DEPENDS "${IFAB_SCHEMA_DIR}/*.schema.json")
  set(generated "${CMAKE_CURRENT_BINARY_DIR}/embedded_schemas.cpp")
  add_custom_command(
    OUTPUT "${generated}"
    COMMAND "${CMAKE_COMMAND}" "-DOUTPUT=${generated}" "-DSCHEMA_DIR=${IFAB_SCHEMA_DIR}" -P "${IFAB_EMBED_SCRIPT}"
    DEPENDS ${schemas} "${IFAB_EMBED_SCRIPT}"
    COMMENT "Embedding the schemas of engines/schema"
    VERBATIM)
  target_sources(${target} PRIVATE
    "${generated}"
    "${IFAB_CONTRACT_SOURCE_DIR}/contract.cpp"
    "${IFAB_CONTRACT_SOURCE_DIR}/directory.cpp"
    "${IFAB_CONTRACT_SOURCE_DIR}/document.cpp"
    "${IFAB_CONTRACT_SOURCE_DIR}/rules.cpp"
    "${IFAB_CONTRACT_SOURCE_DIR}/schema.cpp"
    "${IFAB_CONTRACT_SOURCE_DIR}/sha256.cpp")
  target_include_directories(${target} PRIVATE "${IFAB_CONTRACT_SOURCE_DIR}")
  target_link_libraries(${target} PRIVATE nlohmann_json::nlohmann_json)
endfunction()
