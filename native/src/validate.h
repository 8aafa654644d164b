// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backend.h"
#include "contract.h"
#include "ifab/engine.h"
#include "request.h"
#include "status.h"

namespace ifab {

// Turns what a caller handed in into a request that nothing below checks again, or says what is wrong with it: field,
// value and limit. Trusts nothing but that pointers point to as many elements as their counts say. Limits are those of
// the contract; what can never fit is judged by the facts of the loaded engine. Threads: any.
Status validate(const ifab_request_t& raw, const ContractValues& contract, const EngineFacts& facts, Request& out);

}  // namespace ifab
