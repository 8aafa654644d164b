# SPDX-License-Identifier: Apache-2.0
# Writes OUTPUT, a C++ source with the text of every *.schema.json of SCHEMA_DIR. Run by EmbedSchemas.cmake.
file(GLOB schemas "${SCHEMA_DIR}/*.schema.json")
list(SORT schemas)
set(entries "")
foreach(schema IN LISTS schemas)
  get_filename_component(name "${schema}" NAME)
  string(REPLACE ".schema.json" "" name "${name}")
  file(READ "${schema}" text)
  string(APPEND entries "    {\"${name}\", R\"schema(${text})schema\"},\n")
endforeach()
file(WRITE "${OUTPUT}" "// Generated from engines/schema by embed_schemas.cmake.
#include \"embedded_schemas.h\"

namespace ifab {
namespace {
constexpr EmbeddedSchema kSchemas[] = {
${entries}};
}  // namespace

std::span<const EmbeddedSchema> embedded_schemas() { return kSchemas; }

}  // namespace ifab
")
