# SPDX-License-Identifier: Apache-2.0
# Holds what the library shows, exports.txt and the functions that the header declares to one another.
function(check_same what left right)
  if(NOT left STREQUAL right)
    message(FATAL_ERROR "${what}:\n  ${left}\nexports.txt:\n  ${right}")
  endif()
endfunction()

file(STRINGS "${EXPORTS}" listed)

execute_process(COMMAND "${NM}" -D --defined-only "${LIBRARY}" OUTPUT_VARIABLE output COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "[^\n ]+\n" lines "${output}")
set(shown "")
foreach(line IN LISTS lines)
  string(STRIP "${line}" symbol)
  list(APPEND shown "${symbol}")
endforeach()
list(SORT shown)
check_same("the library shows" "${shown}" "${listed}")

file(READ "${HEADER}" header)
string(REGEX MATCHALL "IFAB_API [^;(]*ifab_[a-z_]+\\(" declarations "${header}")
set(declared "")
foreach(declaration IN LISTS declarations)
  string(REGEX MATCH "(ifab_[a-z_]+)\\($" unused "${declaration}")
  list(APPEND declared "${CMAKE_MATCH_1}")
endforeach()
list(SORT declared)
check_same("the header declares" "${declared}" "${listed}")
