// Trains a small GPT on the sources of the Python standard library, sharded by
// Zero, from LibTorch alone. train_gpt.py is the same run in Python.
//
//   torchrun --no-python --nproc-per-node 2 build/train_gpt --stage 3
//   build/train_gpt                                          (one rank)

#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <numbers>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/torch.h>

#include <zero/zero.h>

#include "flags.h"
#include "gpt.h"
#include "text.h"

namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

const std::string prompt = "class Reader:\n    def read(self";

// Linear warm-up, then half a cosine down to --min-lr. Operations in the order
// of the Python program, for equal bits.
double lr_factor(const Flags& flags, int64_t step) {
  if (step < flags.warmup) {
    return static_cast<double>(step + 1) / static_cast<double>(flags.warmup);
  }
  const auto decay = static_cast<double>(std::max<int64_t>(1, flags.steps - flags.warmup));
  const double progress = static_cast<double>(step - flags.warmup) / decay;
  const double floor = flags.min_lr / flags.lr;
  return floor + (1.0 - floor) * (1.0 + std::cos(std::numbers::pi * progress)) / 2.0;
}

// [collective] Every rank's tensor, in the order of the ranks.
std::vector<torch::Tensor> gather(const Group& group, const torch::Tensor& mine) {
  if (!group) {
    return {mine};
  }
  std::vector<std::vector<torch::Tensor>> all(1);
  for (int rank = 0; rank < group->getSize(); ++rank) {
    all[0].push_back(torch::empty_like(mine));
  }
  std::vector<torch::Tensor> input = {mine};
  group->allgather(all, input)->wait();
  return all[0];
}

// [collective] Added in the order of the ranks, so that every rank has the same
// bits.
double mean_over_ranks(const Group& group, double value) {
  const auto values = gather(group, torch::tensor({value}, torch::kFloat64));
  double total = 0.0;
  for (const auto& each : values) {
    total += each.item<double>();
  }
  return total / static_cast<double>(values.size());
}

torch::Tensor loss_of(GPT& model, const Batch& batch) {
  const auto logits = model.forward(batch.input);
  return torch::cross_entropy_loss(logits.flatten(0, 1), batch.target.flatten());
}

// A line on rank 0 every twentieth of the run; on a terminal each step rewrites
// it.
class Progress {
 public:
  Progress(int64_t steps, int64_t tokens_per_step, bool shown)
      : steps_(steps),
        tokens_(tokens_per_step),
        shown_(shown),
        terminal_(isatty(STDOUT_FILENO) == 1) {}

  void step(int64_t done, double loss, double seconds) {
    seconds_ += seconds;
    const int64_t every = terminal_ ? 1 : std::max<int64_t>(1, steps_ / 20);
    if (!shown_ || done % every != 0) {
      return;
    }
    const double each = seconds_ / static_cast<double>(done);
    const auto left = std::llround(each * static_cast<double>(steps_ - done));
    std::printf(
        "%sstep %5lld/%lld  loss %.4f  %.0f tokens/s  %02lld:%02lld left%s",
        terminal_ ? "\r\033[K" : "",
        static_cast<long long>(done),
        static_cast<long long>(steps_),
        loss,
        static_cast<double>(tokens_) / each,
        left / 60,
        left % 60,
        terminal_ ? "" : "\n");
    std::fflush(stdout);
  }

  void validation(int64_t done, double loss) const {
    if (shown_) {
      std::printf(
          "%sstep %5lld/%lld  validation loss %.6f\n",
          terminal_ ? "\r\033[K" : "",
          static_cast<long long>(done),
          static_cast<long long>(steps_),
          loss);
      std::fflush(stdout);
    }
  }

  double seconds() const {
    return seconds_;
  }

  double tokens_per_second() const {
    return static_cast<double>(tokens_ * steps_) / seconds_;
  }

 private:
  int64_t steps_, tokens_;
  bool shown_, terminal_;
  double seconds_ = 0.0;
};

struct Metrics {
  std::vector<double> losses;
  std::vector<std::pair<int64_t, double>> validation;
  zero::Engine::Report memory; // of the last step, while gradients are held
  double seconds = 0.0;
  double tokens_per_second = 0.0;
};

struct Run {
  const Flags& flags;
  const Group& group;
  const Batches& batches;
  GPT& model;
  zero::ZeroOptimizer& optimizer;

  int64_t rank() const {
    return group ? group->getRank() : 0;
  }
  int64_t ranks() const {
    return group ? group->getSize() : 1;
  }
};

double validate(const Run& run) {
  torch::NoGradGuard no_grad;
  const int64_t each = (run.flags.eval_batches + run.ranks() - 1) / run.ranks();
  double total = 0.0;
  for (int64_t number = 0; number < each; ++number) {
    total += loss_of(run.model, run.batches.validation(number)).item<double>();
  }
  return mean_over_ranks(run.group, total / static_cast<double>(each));
}

// Forward and backward of one micro-batch.
double accumulate(const Run& run, int64_t step, int64_t micro) {
  const auto loss = loss_of(run.model, run.batches.train(step, micro));
  (loss / run.flags.accumulate).backward();
  return loss.item<double>();
}

Metrics train(const Run& run) {
  const auto& flags = run.flags;
  const int64_t tokens = flags.batch * run.ranks() * flags.accumulate * flags.context;
  Progress progress(flags.steps, tokens, run.rank() == 0);
  Metrics metrics;
  for (int64_t step = 0; step < flags.steps; ++step) {
    if (step % flags.eval_every == 0) {
      metrics.validation.emplace_back(step, validate(run));
      progress.validation(step, metrics.validation.back().second);
    }
    const auto start = std::chrono::steady_clock::now();
    double total = 0.0;
    for (int64_t micro = 0; micro < flags.accumulate; ++micro) {
      if (flags.sync_every_micro || micro == flags.accumulate - 1) {
        total += accumulate(run, step, micro);
      } else {
        const auto quiet = run.optimizer.no_sync();
        total += accumulate(run, step, micro);
      }
    }
    if (step == flags.steps - 1) {
      metrics.memory = run.optimizer.engine().report();
    }
    run.optimizer.clip_grad_norm_(flags.clip);
    run.optimizer.set_lr(flags.lr * lr_factor(flags, step));
    run.optimizer.step();
    run.optimizer.zero_grad();
    metrics.losses.push_back(
        mean_over_ranks(run.group, total / static_cast<double>(flags.accumulate)));
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
    progress.step(step + 1, metrics.losses.back(), spent.count());
  }
  metrics.validation.emplace_back(flags.steps, validate(run));
  progress.validation(flags.steps, metrics.validation.back().second);
  metrics.seconds = progress.seconds();
  metrics.tokens_per_second = progress.tokens_per_second();
  return metrics;
}

torch::Tensor as_tensor(const zero::memory::Usage& usage) {
  return torch::tensor(
      {usage.parameters, usage.gradients, usage.optimizer_state, usage.buffers}, torch::kInt64);
}

std::string usage_json(const torch::Tensor& bytes) {
  std::ostringstream json;
  const char* separator = "{";
  for (int i = 0; const char* kind : {"parameters", "gradients", "optimizer_state", "buffers"}) {
    json << separator << '"' << kind << "\": " << bytes[i++].item<int64_t>();
    separator = ", ";
  }
  return json.str() + "}";
}

// [collective] The file that plot.py draws.
std::string metrics_json(const Run& run, const Metrics& metrics, int64_t parameters) {
  const auto mine = torch::stack({as_tensor(metrics.memory.held), as_tensor(metrics.memory.peak)});
  const auto everyone = gather(run.group, mine);
  std::ostringstream json;
  json.precision(17);
  json << "{\n \"stage\": " << run.flags.stage << ",\n \"ranks\": " << run.ranks()
       << ",\n \"parameters\": " << parameters
       << ",\n \"effective_batch\": " << run.flags.batch * run.ranks() * run.flags.accumulate
       << ",\n \"losses\": [";
  for (size_t i = 0; i < metrics.losses.size(); ++i) {
    json << (i == 0 ? "" : ", ") << metrics.losses[i];
  }
  json << "],\n \"validation\": [";
  for (size_t i = 0; i < metrics.validation.size(); ++i) {
    const auto& [step, loss] = metrics.validation[i];
    json << (i == 0 ? "[" : ", [") << step << ", " << loss << "]";
  }
  json << "],\n \"seconds\": " << metrics.seconds
       << ",\n \"tokens_per_second\": " << metrics.tokens_per_second
       << ",\n \"theory\": " << usage_json(as_tensor(metrics.memory.theory_held))
       << ",\n \"memory\": [";
  for (size_t i = 0; i < everyone.size(); ++i) {
    json << (i == 0 ? "" : ", ") << "{\"held\": " << usage_json(everyone[i][0])
         << ", \"peak\": " << usage_json(everyone[i][1]) << "}";
  }
  json << "]\n}\n";
  return json.str();
}

void write_losses(const std::string& path, const std::vector<double>& losses) {
  std::ofstream file(path);
  char line[64];
  for (size_t step = 0; step < losses.size(); ++step) {
    std::snprintf(line, sizeof line, "%zu %.13a\n", step, losses[step]);
    file << line;
  }
}

std::string printable(std::string text) {
  for (char& c : text) {
    const bool plain = (c >= 32 && c < 127) || c == '\n' || c == '\t';
    c = plain ? c : '?';
  }
  return text;
}

// [collective]
void finish(const Run& run, const Metrics& metrics, int64_t parameters) {
  const auto& flags = run.flags;
  const auto json = metrics_json(run, metrics, parameters);
  std::string sample;
  run.optimizer.gathered([&] { // once for all tokens, instead of for each
    sample = generate(run.model, prompt, flags.sample_bytes, flags.seed);
  });
  if (run.rank() != 0) {
    return;
  }
  std::cout << "\n"
            << zero::report(run.optimizer) << "\nsample   (" << flags.sample_bytes << " bytes)\n"
            << printable(sample) << "\n\n";
  std::printf(
      "speed    %.0f tokens/s; %.1f s of training\n", metrics.tokens_per_second, metrics.seconds);
  std::filesystem::create_directories(flags.out);
  const auto path = std::filesystem::path(flags.out) / "metrics.json";
  std::ofstream(path) << json;
  std::printf("metrics  %s (python examples/plot.py draws it)\n", path.c_str());
  if (!flags.log_losses.empty()) {
    write_losses(flags.log_losses, metrics.losses);
    std::printf("losses   %s\n", flags.log_losses.c_str());
  }
}

void run_all(const Flags& flags) {
  const Group group = zero::init();
  const int64_t rank = group ? group->getRank() : 0;
  const int64_t ranks = group ? group->getSize() : 1;

  const bool one_file = !flags.text.empty();
  const auto text = one_file ? read_file(flags.text).substr(0, flags.max_bytes)
                             : read_directory(flags.text_dir, flags.max_bytes);
  const Batches batches(text, {flags.batch, flags.context, flags.seed, rank, ranks});
  auto model = std::make_shared<GPT>(flags.layers, flags.dim, flags.heads, flags.context);
  initialise(*model, flags.seed);
  zero::ZeroOptimizer optimizer(
      *model,
      {.stage = flags.stage, .bucket_bytes = static_cast<int64_t>(flags.bucket_mb * 1024 * 1024)},
      zero::AdamW{.lr = flags.lr, .betas = {0.9, 0.95}, .weight_decay = 0.1});

  int64_t parameters = 0;
  for (const auto& parameter : model->parameters()) {
    parameters += parameter.numel();
  }
  if (rank == 0) {
    std::cout << "text     " << text.size() << " bytes of "
              << (one_file ? flags.text : flags.text_dir) << "\nmodel    " << flags.layers << " x "
              << flags.dim << ", " << parameters << " parameters\nbatch    "
              << flags.batch * ranks * flags.accumulate << " sequences of " << flags.context
              << " bytes = " << flags.batch << " per rank x " << ranks << " ranks x "
              << flags.accumulate << " accumulated; ZeRO stage " << flags.stage << std::endl;
  }
  const Run run{flags, group, batches, *model, optimizer};
  finish(run, train(run), parameters);
}

} // namespace

int main(int argc, char** argv) {
  try {
    run_all(parse_flags(argc, argv));
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << std::endl;
    return 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
