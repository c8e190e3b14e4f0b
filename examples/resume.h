#pragma once

// Where a run stands: its checkpoints, the losses of its steps, and what makes it the run
// it is. resume.py is the same in Python, with the same files, so that each goes on where
// the other stopped:
//
//   <out>/checkpoints/step-N   model and optimizer after N steps; Standing in its extra
//   <out>/history.jsonl        a line for each loss, in order; cut at the step that a run
//                              resumes at

#include <chrono>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <zero/checkpoint/directory.h>
#include <zero/zero.h>

#include "flags.h"

using Json = nlohmann::json;

// What is known of a run besides the model and the optimizer.
struct Standing {
  int64_t step = 0; // steps taken
  double seconds = 0.0; // of training, without validation and checkpoints
  int64_t tokens = 0;
  Json configuration = Json::object();
  Json memory = Json::array(); // by rank; from the last step on
  Json theory = Json::object();
};

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Standing, step, seconds, tokens, configuration, memory, theory)

inline std::filesystem::path checkpoints_of(const Flags& flags) {
  return std::filesystem::path(flags.out) / "checkpoints";
}

// [collective]
inline void save_standing(
    const Standing& standing,
    const Flags& flags,
    torch::nn::Module& model,
    zero::ZeroOptimizer& optimizer) {
  const auto path = checkpoints_of(flags) / ("step-" + std::to_string(standing.step));
  zero::save(
      path, model, &optimizer, {.extra = Json(standing).dump(), .keep_last = flags.keep_last});
}

inline std::optional<std::string> latest_of(const Flags& flags) {
  if (flags.fresh || !std::filesystem::is_directory(checkpoints_of(flags))) {
    return std::nullopt;
  }
  return zero::checkpoint::latest(checkpoints_of(flags));
}

// Read from the manifest, before there is a model.
inline Standing standing_of(const std::string& checkpoint) {
  std::ifstream file(checkpoint + "/manifest.json");
  try {
    return Json::parse(file).at("extra").get<Standing>();
  } catch (const Json::exception&) {
    throw std::runtime_error(
        checkpoint + " is no checkpoint of this example; choose another --out");
  }
}

inline uint32_t crc32_of(const std::string& text) {
  std::vector<uint32_t> table(256);
  for (uint32_t i = 0; i < 256; ++i) {
    table[i] = i;
    for (int bit = 0; bit < 8; ++bit) {
      table[i] = (table[i] >> 1U) ^ ((table[i] & 1U) != 0 ? 0xEDB88320U : 0U);
    }
  }
  uint32_t sum = ~0U;
  for (const char byte : text) {
    sum = table[(sum ^ static_cast<uint8_t>(byte)) & 255U] ^ (sum >> 8U);
  }
  return ~sum;
}

// What the numbers of a run depend on, and how it is spread.
inline Json describe(const Flags& flags, const std::string& text, int64_t ranks) {
  return {
      {"layers", flags.layers},
      {"dim", flags.dim},
      {"heads", flags.heads},
      {"context", flags.context},
      {"text", flags.text.empty() ? flags.text_dir : flags.text},
      {"text_bytes", text.size()},
      {"text_crc32", crc32_of(text)},
      {"seed", flags.seed},
      {"batch", flags.batch},
      {"accumulate", flags.accumulate},
      {"sync_every_micro", flags.sync_every_micro},
      {"lr", flags.lr},
      {"min_lr", flags.min_lr},
      {"warmup", flags.warmup},
      {"decay_steps", flags.decay_steps},
      {"clip", flags.clip},
      {"ranks", ranks},
      {"stage", flags.stage},
  };
}

inline int64_t effective_batch(const Json& configuration) {
  return configuration.at("batch").get<int64_t>() * configuration.at("ranks").get<int64_t>() *
      configuration.at("accumulate").get<int64_t>();
}

inline std::string flag_of(std::string name) {
  if (name == "text_crc32") {
    return "the text";
  }
  std::replace(name.begin(), name.end(), '_', '-');
  return "--" + name;
}

inline std::string shown(const Json& configuration, const std::string& name) {
  const std::string value = configuration.value(name, Json()).dump();
  return name != "text_crc32" ? value
                              : configuration.value("text_bytes", Json()).dump() + " bytes of " +
          configuration.value("text", "") + " (CRC-32 " + value + ")";
}

// What makes it another run; empty where nothing does. How the same effective batch is
// spread does not.
inline std::string differences(const Json& saved, const Json& now) {
  std::set<std::string> allowed = {"ranks", "stage", "text", "text_bytes"};
  if (effective_batch(saved) == effective_batch(now)) {
    allowed.insert({"batch", "accumulate", "sync_every_micro"});
  }
  std::string text;
  for (const auto& [name, value] : now.items()) {
    if (!allowed.contains(name) && saved.value(name, Json()) != value) {
      text += (text.empty() ? "" : "; ") + flag_of(name) + " was " + shown(saved, name) + ", is " +
          shown(now, name);
    }
  }
  return text;
}

inline std::string refusal(const std::string& checkpoint, const std::string& different) {
  return checkpoint + " is of another run: " + different +
      ".\nStart with the same settings to go on with it, with another --out to keep both, or with "
      "--fresh to delete it and start over.";
}

// What is different and allowed, to be said.
inline std::vector<std::string> changes(const Json& saved, const Json& now) {
  std::vector<std::string> lines;
  if (saved.at("stage") != now.at("stage")) {
    lines.push_back(
        "stage " + now.at("stage").dump() + " instead of " + saved.at("stage").dump() +
        ": the numbers stay the same");
  }
  const int64_t before = effective_batch(saved);
  const int64_t after = effective_batch(now);
  const std::string sequences = std::to_string(before);
  if (saved.at("ranks") != now.at("ranks")) {
    lines.push_back(
        "ranks " + now.at("ranks").dump() + " instead of " + saved.at("ranks").dump() +
        (before == after
             ? ": a step stays " + sequences + " sequences"
             : ": a step is " + std::to_string(after) + " sequences instead of " + sequences));
  } else if (
      saved.at("batch") != now.at("batch") || saved.at("accumulate") != now.at("accumulate")) {
    lines.push_back("another micro-batch: a step stays " + sequences + " sequences");
  }
  return lines;
}

// The losses of a run; rank 0 keeps them in memory and in the file, others nothing. The
// file is locked: one run at a time writes to an --out. Made before anything there is read.
class History {
 public:
  std::vector<double> losses;
  std::vector<std::pair<int64_t, double>> validation;

  History(const Flags& flags, int64_t rank) {
    if (rank != 0) {
      return;
    }
    std::filesystem::create_directories(flags.out);
    path_ = std::filesystem::path(flags.out) / "history.jsonl";
    file_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (file_ < 0) {
      throw std::runtime_error("cannot write " + path_);
    }
    lock(flags.out);
  }
  // What was before `step` stays.
  void begin(const Flags& flags, int64_t step) {
    if (file_ < 0) {
      return;
    }
    keep(step);
    if (step == 0) { // of a run before this one
      std::filesystem::remove(std::filesystem::path(flags.out) / "metrics.json");
    }
    if (flags.fresh) {
      std::filesystem::remove_all(checkpoints_of(flags));
    }
  }
  ~History() {
    if (file_ >= 0) {
      ::close(file_);
    }
  }
  History(const History&) = delete;
  History& operator=(const History&) = delete;

  void add_loss(int64_t step, double loss) {
    if (file_ >= 0) {
      losses.push_back(loss);
      write("training", step, loss);
    }
  }

  void add_validation(int64_t step, double loss) {
    if (file_ >= 0) {
      validation.emplace_back(step, loss);
      write("validation", step, loss);
    }
  }

  // To the disk: before the checkpoint that relies on it.
  void flush() const {
    if (file_ >= 0 && ::fsync(file_) != 0) {
      throw std::runtime_error("cannot flush " + path_);
    }
  }

 private:
  void lock(const std::string& out) const {
    for (int i = 0; i < 100; ++i) { // a process that was killed may need a moment to end
      if (::flock(file_, LOCK_EX | LOCK_NB) == 0) {
        return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    throw std::runtime_error("another run writes to " + out + "; end it, or choose another --out");
  }

  // Reads what was before `step`, and cuts the rest off: it will be done again.
  void keep(int64_t step) {
    const std::string text = read_file(path_);
    size_t kept = 0;
    while (static_cast<int64_t>(losses.size()) < step) {
      const size_t end = text.find('\n', kept);
      if (end == std::string::npos) {
        throw std::runtime_error(
            "expected the losses of " + std::to_string(step) + " steps in " + path_ + ", got " +
            std::to_string(losses.size()) + "; put the file back, or start over with --fresh");
      }
      const Json entry = Json::parse(text.substr(kept, end - kept));
      const double loss = entry.at("loss").is_null() ? std::numeric_limits<double>::quiet_NaN()
                                                     : entry.at("loss").get<double>();
      if (entry.at("kind") == "validation") {
        validation.emplace_back(entry.at("step").get<int64_t>(), loss);
      } else {
        losses.push_back(loss);
      }
      kept = end + 1;
    }
    std::filesystem::resize_file(path_, kept);
  }

  void write(const char* kind, int64_t step, double loss) const {
    // JSON has no NaN: dump() writes null.
    const std::string line = Json({{"step", step}, {"kind", kind}, {"loss", loss}}).dump() + "\n";
    if (::write(file_, line.data(), line.size()) != static_cast<ssize_t>(line.size())) {
      throw std::runtime_error("cannot write " + path_);
    }
  }

  std::string path_;
  int file_ = -1;
};

// Whether all steps were taken, and everything was written that comes after the last.
inline bool is_finished(const Flags& flags, int64_t step) {
  if (step != flags.steps) {
    return step > flags.steps;
  }
  std::ifstream file(std::filesystem::path(flags.out) / "metrics.json");
  const Json metrics = Json::parse(file, nullptr, /*allow_exceptions=*/false);
  return metrics.is_object() &&
      static_cast<int64_t>(metrics.value("losses", Json()).size()) == step;
}

inline std::string after_the_end(const Flags& flags, int64_t step) {
  const std::string twice = std::to_string(2 * step);
  return std::to_string(step) + " steps were taken, --steps is " + std::to_string(flags.steps) +
      ". To go on, give more: --steps " + twice + " (make train-cpp ARGS='--steps " + twice +
      "'); --fresh starts over.";
}
