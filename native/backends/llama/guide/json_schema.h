// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string_view>

#include "grammar.h"

namespace ifab::guide {

// The grammar of JSON documents that are valid under a JSON schema (2020-12).
//
// Every text of the grammar is valid; not every valid text is in it. Members come in the schema's order; members that
// the schema does not name are not written, unless it names none; numbers and space are as json_text.h says.
//
// Enforced: type, enum, const, properties, required, additionalProperties, items, prefixItems, minItems, maxItems,
// minLength, maxLength, pattern, format (date, time, date-time, uuid, ipv4), minimum, maximum, exclusiveMinimum,
// exclusiveMaximum, anyOf, oneOf (of schemas that can be told apart), allOf (of one), $ref within the document. Any
// other keyword that constrains is refused with IFAB_UNIMPLEMENTED and its name, never read over; so are $id below the
// root and a $schema other than 2020-12. A keyword's value of the wrong kind is refused whether or not it would count.
// Bounds are read as exact decimals, and refused where a reader of doubles would take them for others. Throws
// GuideError.
std::shared_ptr<const Grammar> read_json_schema(std::string_view text);

}  // namespace ifab::guide
