// SPDX-License-Identifier: Apache-2.0
//
//   bench_llama_loop ENGINE_DIR TOKENS < prompts
//
// Steps llama.cpp directly with an engine's weights, layout and threads: prompts from standard input, one a line, token
// ids between blanks, in token order; each generates TOKENS tokens, greedy, end tokens ignored. Writes one JSON object:
// requests, generated_tokens, prompt_tokens_computed, steps, wall_s, tokens_per_s.
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "bare_loop.h"
#include "engine_files.h"

int main(int argc, char** argv) {
  const long tokens = argc == 3 ? std::strtol(argv[2], nullptr, 10) : 0;
  if (tokens < 1 || tokens > 100'000) {
    std::fprintf(stderr, "usage: %s ENGINE_DIR TOKENS < prompts\n", argv[0]);
    return 2;
  }
  const auto engine = ifab::bench::EngineFiles::read(argv[1]);
  std::vector<std::vector<int32_t>> prompts;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::vector<int32_t> prompt;
    for (int32_t token; words >> token;) {
      if (token < 0 || token >= static_cast<int32_t>(engine.vocab_size)) {
        std::fprintf(stderr, "prompt %zu: %d is no token of the engine\n", prompts.size(), token);
        return 1;
      }
      prompt.push_back(token);
    }
    if (prompt.empty() || prompt.size() + static_cast<size_t>(tokens) > engine.config.sequence_tokens) {
      std::fprintf(stderr, "prompt %zu: %zu tokens and %ld to generate, at least 1 and together at most %u\n",
                   prompts.size(), prompt.size(), tokens, engine.config.sequence_tokens);
      return 1;
    }
    prompts.push_back(std::move(prompt));
  }
  ifab::bench::BareLoop loop(engine.config, engine.gguf_path);
  const auto result = loop.run(prompts, static_cast<uint32_t>(tokens));
  const auto generated = prompts.size() * static_cast<size_t>(tokens);
  std::printf(
      "{\"requests\": %zu, \"generated_tokens\": %zu, \"prompt_tokens_computed\": %llu, \"steps\": %llu, "
      "\"wall_s\": %.4f, \"tokens_per_s\": %.2f}\n",
      prompts.size(), generated, static_cast<unsigned long long>(result.prompt_tokens_computed),
      static_cast<unsigned long long>(result.steps), result.wall_s, static_cast<double>(generated) / result.wall_s);
  return 0;
}
