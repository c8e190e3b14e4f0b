#pragma once

// Native rules as the manifest's optimizer section holds them, in torch.optim's words.
// Internal.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <zero/options.h>

namespace zero::checkpoint {

struct OptimizerSection {
  struct Group {
    Rule rule;
    std::vector<std::string> parameters;
  };
  std::vector<Group> groups;
  std::map<std::string, int64_t> steps; // by parameter
};

std::string to_json(const OptimizerSection& section);
// Hyper-parameters that a group lacks stay as they are in `rules`. Throws c10::ValueError
// where the text is no such section, or has other groups or parameters than `expected`.
OptimizerSection optimizer_from_json(
    const std::string& text,
    const OptimizerSection& expected,
    const std::string& where);

struct EMASettings {
  double decay = 0.0;
  int64_t updates = 0;
};

// {"rng": [{"torch": hex}, ...], "ema": {"decay": 0.999, "updates": 3}}, random states by
// rank. And a rank's bytes of such a text, and its settings; empty and nothing without.
std::string scalars_to_json(
    const std::vector<std::string>& states,
    const std::optional<EMASettings>& ema);
std::string rng_from_json(const std::string& text, int64_t rank);
std::optional<EMASettings> ema_from_json(const std::string& text);

} // namespace zero::checkpoint
