// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "contract.h"
#include "settings.h"
#include "tensorrt_llm/executor/executor.h"
#include "vocabulary.h"

namespace ifab::executor {

// The vendor's configuration, field by field, by its setters: the order of its constructors' arguments changes between
// releases, and a call by position would then set another field. Optional parts that settings call "not_applicable"
// have no setter call; they are adapters, logits processors, speculative decoding, disaggregation and debugging.
//
// `vocabulary` is read where settings.guided_decoding is set. Throws what the vendor's setters throw for values that
// they do not take: std::exception.
tensorrt_llm::executor::ExecutorConfig make_executor_config(const Settings& settings, const ContractValues& contract,
                                                            const Vocabulary& vocabulary);

}  // namespace ifab::executor
