// SPDX-License-Identifier: Apache-2.0
//
// Stand-in: see executor/types.h.
#pragma once

extern "C" bool initTrtLlmPlugins(void* logger = nullptr, char const* libNamespace = "tensorrt_llm");
