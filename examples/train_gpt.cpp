// Trains a small GPT on the sources of the Python standard library, sharded by
// Zero, from LibTorch alone. A run saves checkpoints below --out and, started again, goes
// on from the newest to the same weights, bit for bit, as one that was never stopped.
// train_gpt.py is the same run in Python.
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
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/torch.h>

#include <zero/zero.h>

#include "flags.h"
#include "gpt.h"
#include "progress.h"
#include "resume.h"
#include "text.h"

namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

const std::string prompt = "class Reader:\n    def read(self";

// Linear warm-up, then half a cosine down to --min-lr, which stays. A function of the
// step, as the batches are: nothing of it has to be saved. Operations in the order of the
// Python program, for equal bits.
double lr_factor(const Flags& flags, int64_t step) {
  if (step < flags.warmup) {
    return static_cast<double>(step + 1) / static_cast<double>(flags.warmup);
  }
  const auto decay = static_cast<double>(std::max<int64_t>(1, flags.decay_steps - flags.warmup));
  const double progress = std::min(1.0, static_cast<double>(step - flags.warmup) / decay);
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

// The mean loss; `report` gets that of the last step, while gradients are held.
double take_step(const Run& run, int64_t step, std::optional<zero::Engine::Report>& report) {
  const auto& flags = run.flags;
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
    report = run.optimizer.engine().report();
  }
  run.optimizer.clip_grad_norm_(flags.clip);
  run.optimizer.set_lr(flags.lr * lr_factor(flags, step));
  run.optimizer.step();
  run.optimizer.zero_grad();
  return mean_over_ranks(run.group, total / static_cast<double>(flags.accumulate));
}

torch::Tensor as_tensor(const zero::memory::Usage& usage) {
  return torch::tensor(
      {usage.parameters, usage.gradients, usage.optimizer_state, usage.buffers}, torch::kInt64);
}

Json usage_json(const torch::Tensor& bytes) {
  return {
      {"parameters", bytes[0].item<int64_t>()},
      {"gradients", bytes[1].item<int64_t>()},
      {"optimizer_state", bytes[2].item<int64_t>()},
      {"buffers", bytes[3].item<int64_t>()}};
}

// [collective] Theory, and what every rank holds.
void gather_memory(const Run& run, const zero::Engine::Report& report, Standing& standing) {
  const auto mine = torch::stack({as_tensor(report.held), as_tensor(report.peak)});
  standing.theory = usage_json(as_tensor(report.theory_held));
  standing.memory = Json::array();
  for (const auto& rank : gather(run.group, mine)) {
    standing.memory.push_back({{"held", usage_json(rank[0])}, {"peak", usage_json(rank[1])}});
  }
}

// From where the run stands to its last step, which is saved.
void train(const Run& run, Standing& standing, History& history) {
  const auto& flags = run.flags;
  const int64_t tokens = flags.batch * run.ranks() * flags.accumulate * flags.context;
  Progress progress(standing.step, flags.steps, tokens, run.rank() == 0);
  const auto check = [&](int64_t step) {
    const double loss = validate(run);
    history.add_validation(step, loss);
    progress.validation(step, loss);
  };
  for (int64_t step = standing.step; step < flags.steps; ++step) {
    if (step % flags.eval_every == 0) {
      check(step);
    }
    std::optional<zero::Engine::Report> report;
    const auto start = std::chrono::steady_clock::now();
    const double loss = take_step(run, step, report);
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
    history.add_loss(step, loss);
    standing.step = step + 1;
    standing.seconds += spent.count();
    standing.tokens += tokens;
    progress.step(step + 1, loss, spent.count());
    if (report) {
      gather_memory(run, *report, standing);
    }
    if (step + 1 == flags.steps || (flags.save_every > 0 && (step + 1) % flags.save_every == 0)) {
      history.flush();
      save_standing(standing, flags, run.model, run.optimizer);
    }
  }
  check(flags.steps);
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

// The file that plot.py draws.
Json metrics_of(
    const Run& run,
    const Standing& standing,
    const History& history,
    int64_t parameters) {
  return {
      {"stage", run.flags.stage},
      {"ranks", run.ranks()},
      {"parameters", parameters},
      {"effective_batch", effective_batch(standing.configuration)},
      {"losses", history.losses},
      {"validation", history.validation},
      {"seconds", standing.seconds},
      {"tokens_per_second", static_cast<double>(standing.tokens) / standing.seconds},
      {"theory", standing.theory},
      {"memory", standing.memory}};
}

// [collective]
void finish(const Run& run, const Standing& standing, const History& history, int64_t parameters) {
  const auto& flags = run.flags;
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
  const Json metrics = metrics_of(run, standing, history, parameters);
  std::printf(
      "speed    %.0f tokens/s; %.1f s of training\n",
      metrics.at("tokens_per_second").get<double>(),
      standing.seconds);
  const auto path = std::filesystem::path(flags.out) / "metrics.json";
  std::ofstream(path) << metrics.dump(1) << "\n";
  std::printf("metrics  %s (python examples/plot.py draws it)\n", path.c_str());
  if (!flags.log_losses.empty()) {
    write_losses(flags.log_losses, history.losses);
    std::printf("losses   %s\n", flags.log_losses.c_str());
  }
}

// [collective] Says why on rank 0 and gives the exit status: a launcher ends all ranks when
// one ends, not before it is said.
int stop(const Group& group, const std::string& line, int code) {
  if (!group || group->getRank() == 0) {
    (code == 0 ? std::cout : std::cerr) << line << std::endl;
  }
  if (group) {
    group->barrier()->wait();
  }
  return code;
}

struct Start {
  std::optional<std::string> checkpoint; // to load
  Standing standing;
};

// Or the exit status, where nothing is left to do or it is another run.
std::variant<Start, int> go_on(Flags& flags, const std::string& text, const Group& group) {
  const auto checkpoint = latest_of(flags);
  Standing standing = checkpoint ? standing_of(*checkpoint) : Standing();
  const Json saved = std::exchange(standing.configuration, Json::object());
  if (flags.decay_steps == 0) {
    flags.decay_steps = saved.value("decay_steps", flags.steps);
  }
  const Json& now = standing.configuration = describe(flags, text, group ? group->getSize() : 1);
  if (!checkpoint) {
    return Start{checkpoint, standing};
  }
  if (const auto different = differences(saved, now); !different.empty()) {
    return stop(group, refusal(*checkpoint, different), 1);
  }
  if (is_finished(flags, standing.step)) {
    return stop(group, "finished " + *checkpoint + ": " + after_the_end(flags, standing.step), 0);
  }
  if (!group || group->getRank() == 0) {
    std::cout << "resumed  " << *checkpoint << "\n";
    for (const std::string& line : changes(saved, now)) {
      std::cout << "note     " << line << "\n";
    }
    if (flags.steps > standing.step && standing.step >= flags.decay_steps) {
      std::cout << "note     the decay is over: the learning rate stays at " << flags.min_lr
                << "\n";
    }
  }
  return Start{checkpoint, standing};
}

// What --device says. zero::init() has chosen this rank's GPU.
torch::Device device_of(const Flags& flags) {
  const bool available = torch::cuda::is_available();
  if (flags.device == "auto") {
    return available ? torch::kCUDA : torch::kCPU;
  }
  if (flags.device == "cuda" && !available) {
    throw std::invalid_argument("--device cuda: torch sees no GPU; --device cpu runs without");
  }
  if (flags.device != "cpu" && flags.device != "cuda") {
    throw std::invalid_argument("--device: expected auto, cpu or cuda, got '" + flags.device + "'");
  }
  return flags.device == "cuda" ? torch::kCUDA : torch::kCPU;
}

int run_all(Flags flags) {
  const Group group = zero::init();
  const int64_t rank = group ? group->getRank() : 0;
  const int64_t ranks = group ? group->getSize() : 1;
  const torch::Device device = device_of(flags);

  const bool one_file = !flags.text.empty();
  const auto text = one_file ? read_file(flags.text).substr(0, flags.max_bytes)
                             : read_directory(flags.text_dir, flags.max_bytes);
  History history(flags, rank);
  if (group) {
    group->barrier()->wait();
  }
  auto found = go_on(flags, text, group);
  if (const int* code = std::get_if<int>(&found)) {
    return *code;
  }
  auto& [checkpoint, standing] = std::get<Start>(found);
  history.begin(flags, standing.step);
  const Batches batches(text, {flags.batch, flags.context, flags.seed, rank, ranks, device});
  auto model = std::make_shared<GPT>(flags.layers, flags.dim, flags.heads, flags.context);
  initialise(*model, flags.seed);
  model->to(device);
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
              << flags.accumulate << " accumulated; ZeRO stage " << flags.stage << " on " << device
              << std::endl;
  }
  if (checkpoint) {
    zero::load(*checkpoint, *model, &optimizer);
  }
  const Run run{flags, group, batches, *model, optimizer};
  train(run, standing, history);
  finish(run, standing, history, parameters);
  return 0;
}

} // namespace

int main(int argc, char** argv) {
  try {
    return run_all(parse_flags(argc, argv));
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << std::endl;
    return 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
