#pragma once

// The flags of train_gpt.cpp: the same names and defaults as train_gpt.py's.

#include <cstdio>
#include <cstdlib>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <variant>

#include "text.h"

struct Flags {
  int64_t stage = 3;
  std::string device = "auto"; // "cpu", "cuda"
  int64_t steps = 500;
  int64_t batch = 4;
  int64_t accumulate = 1;
  bool sync_every_micro = false;
  int64_t context = 128;
  int64_t layers = 6;
  int64_t dim = 256;
  int64_t heads = 4;
  double lr = 2e-3;
  double min_lr = 2e-4;
  int64_t decay_steps = 0; // 0: steps, where the run began
  int64_t warmup = 40;
  double clip = 1.0;
  double bucket_mb = 2.0;
  int64_t seed = 1;
  std::string text;
  std::string text_dir = default_directory();
  int64_t max_bytes = 10'000'000;
  int64_t eval_every = 50;
  int64_t eval_batches = 16;
  int64_t sample_bytes = 400;
  std::string out = "runs/train_gpt_cpp";
  bool fresh = false;
  int64_t save_every = 100;
  int64_t keep_last = 2;
  std::string log_losses;
};

using FlagTarget = std::variant<int64_t*, double*, bool*, std::string*>;

inline std::map<std::string, FlagTarget> flag_table(Flags& flags) {
  return {
      {"--stage", &flags.stage},
      {"--device", &flags.device},
      {"--steps", &flags.steps},
      {"--batch", &flags.batch},
      {"--accumulate", &flags.accumulate},
      {"--sync-every-micro", &flags.sync_every_micro},
      {"--context", &flags.context},
      {"--layers", &flags.layers},
      {"--dim", &flags.dim},
      {"--heads", &flags.heads},
      {"--lr", &flags.lr},
      {"--min-lr", &flags.min_lr},
      {"--decay-steps", &flags.decay_steps},
      {"--warmup", &flags.warmup},
      {"--clip", &flags.clip},
      {"--bucket-mb", &flags.bucket_mb},
      {"--seed", &flags.seed},
      {"--text", &flags.text},
      {"--text-dir", &flags.text_dir},
      {"--max-bytes", &flags.max_bytes},
      {"--eval-every", &flags.eval_every},
      {"--eval-batches", &flags.eval_batches},
      {"--sample-bytes", &flags.sample_bytes},
      {"--out", &flags.out},
      {"--fresh", &flags.fresh},
      {"--save-every", &flags.save_every},
      {"--keep-last", &flags.keep_last},
      {"--log-losses", &flags.log_losses},
  };
}

template <typename T>
void parse_value(const std::string& name, const std::string& value, T& target) {
  std::istringstream stream(value);
  if (!(stream >> target) || !stream.eof()) {
    throw std::invalid_argument(name + ": expected a number, got '" + value + "'");
  }
}

// Every flag but --sync-every-micro and --fresh takes a value: `--name value`.
inline Flags parse_flags(int argc, char** argv) {
  Flags flags;
  const auto table = flag_table(flags);
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--help" || name == "-h") {
      std::printf("Flags (train_gpt.py --help explains them):\n");
      for (const auto& [flag, target] : table) {
        std::printf("  %s\n", flag.c_str());
      }
      std::exit(0);
    }
    const auto found = table.find(name);
    if (found == table.end()) {
      throw std::invalid_argument("unknown flag " + name + "; --help lists them");
    }
    if (auto* const* on = std::get_if<bool*>(&found->second)) {
      **on = true;
      continue;
    }
    if (++i == argc) {
      throw std::invalid_argument(name + " needs a value");
    }
    const std::string value = argv[i];
    if (auto* const* text = std::get_if<std::string*>(&found->second)) {
      **text = value;
    } else if (auto* const* real = std::get_if<double*>(&found->second)) {
      parse_value(name, value, **real);
    } else {
      parse_value(name, value, *std::get<int64_t*>(found->second));
    }
  }
  return flags;
}
