// The order of what a step queues on a device: which stream each collective is on, what it
// waits for, and what goes on meanwhile, read from the fake device's record.

#include "catch.h"
#include "device_cases.h"

#include <algorithm>
#include <map>
#include <set>

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

using namespace zero::test;
using zero::fake::Entry;
using zero::fake::Kind;

namespace {

constexpr int64_t kRanks = 2;

// What one steady step queued on each device, in the order of each host's calls.
std::vector<std::vector<Entry>> steady_step(const zero::Options& given) {
  use_fake_devices();
  std::vector<std::vector<Entry>> steps(kRanks);
  MeetingPoint meeting(kRanks);
  run_ranks(kRanks, [&](int64_t rank, const Group& group) {
    const c10::Device device = zero::fake::device(static_cast<c10::DeviceIndex>(rank));
    const auto model = std::make_shared<DeviceModel>(1, device);
    zero::ZeroOptimizer optimizer(*model, given, zero::AdamW{}, group);
    const at::Tensor tokens = tokens_of(0, rank).to(device);
    const auto step = [&] {
      loss_of(*model, tokens).backward();
      optimizer.clip_grad_norm_(1.0);
      optimizer.step();
      optimizer.zero_grad();
    };
    for (int64_t warm_up = 0; warm_up < 3; ++warm_up) {
      step();
    }
    meeting.meet();
    if (rank == 0) {
      zero::fake::reset();
    }
    meeting.meet();
    step();
    step(); // gathers of stages 1 and 2 are waited for in the next
    meeting.meet();
  });
  zero::fake::check();
  for (const Entry& entry : zero::fake::trace()) {
    steps[entry.device].push_back(entry);
  }
  return steps;
}

bool is_collective(const Entry& entry) {
  static const std::set<std::string> names = {
      "_allgather_base", "_reduce_scatter_base", "allreduce", "alltoall_base", "coalesced"};
  return entry.kind == Kind::operation && names.count(entry.name) > 0;
}

bool is_compute(const Entry& entry) {
  return entry.kind == Kind::operation && entry.stream == 0;
}

zero::Options options_of(int64_t stage) {
  return {
      .stage = stage,
      .bucket_bytes = 4096,
      .first_bucket_bytes = 2048,
      .min_unit_numel = 0,
      .timeout = 60.0};
}

} // namespace

TEST_CASE("collectives run beside the model, each stream's in one order", "[device]") {
  for (int64_t stage = 0; stage <= 3; ++stage) {
    INFO("stage " << stage);
    const auto steps = steady_step(options_of(stage));
    std::vector<std::map<c10::StreamId, std::vector<std::string>>> order(kRanks);
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      for (const Entry& entry : steps[rank]) {
        REQUIRE(entry.kind != Kind::synchronize);
        REQUIRE(entry.kind != Kind::record_stream);
        if (is_collective(entry)) {
          REQUIRE(entry.stream != 0);
          order[rank][entry.stream].push_back(entry.name);
        }
      }
      // Gathers of stage 3 have a stream, and a communicator, of their own.
      REQUIRE(order[rank].size() == (stage == 3 ? 2U : 1U));
    }
    std::set<std::vector<std::string>> first;
    std::set<std::vector<std::string>> second;
    for (const auto& [stream, names] : order[0]) {
      first.insert(names);
    }
    for (const auto& [stream, names] : order[1]) {
      second.insert(names);
    }
    REQUIRE(first == second);
  }
}

TEST_CASE("a collective waits for what it reads, and nothing for it but its readers", "[device]") {
  for (int64_t stage = 0; stage <= 3; ++stage) {
    INFO("stage " << stage);
    for (const auto& entries : steady_step(options_of(stage))) {
      int64_t during = 0; // operations of the model queued while collectives were in flight
      std::map<int64_t, c10::StreamId> recorded; // by entry: the stream of an event
      std::map<c10::StreamId, int64_t> in_flight; // by stream: the last collective
      std::map<c10::StreamId, bool> waited; // a stream has waited since its last collective
      for (const Entry& entry : entries) {
        if (entry.kind == Kind::record) {
          recorded[entry.number] = entry.stream;
        } else if (entry.kind == Kind::wait && entry.stream == 0) {
          const c10::StreamId of = recorded[entry.after];
          if (in_flight.count(of) > 0 && in_flight[of] < entry.after) {
            in_flight.erase(of);
          }
        } else if (entry.kind == Kind::wait) {
          waited[entry.stream] = true;
        } else if (is_collective(entry)) {
          REQUIRE(waited[entry.stream]);
          in_flight[entry.stream] = entry.number;
        } else if (is_compute(entry)) {
          during += in_flight.empty() ? 0 : 1;
        }
      }
      REQUIRE(during > 20);
    }
  }
}

TEST_CASE("the next unit is gathered while this one computes", "[device]") {
  int64_t before = -1;
  for (const int64_t prefetch : {0, 1, 2}) {
    int64_t most = 0;
    INFO("prefetch " << prefetch);
    zero::Options options = options_of(3);
    options.prefetch = prefetch;
    for (const auto& entries : steady_step(options)) {
      // How many gathers were queued beside the one whose slab the model reads first.
      std::vector<const Entry*> unread;
      int64_t ahead = 0;
      for (const Entry& entry : entries) {
        if (is_collective(entry) && entry.name == "_allgather_base") {
          unread.push_back(&entry);
          continue;
        }
        const auto reads = [&entry](const Entry* gather) {
          return std::any_of(entry.reads.begin(), entry.reads.end(), [&](const auto& range) {
            return std::any_of(gather->writes.begin(), gather->writes.end(), [&](const auto& slab) {
              return range.begin >= slab.begin && range.begin < slab.begin + slab.bytes;
            });
          });
        };
        const auto found = std::find_if(unread.begin(), unread.end(), reads);
        if (is_compute(entry) && found != unread.end()) {
          unread.erase(found);
          ahead = std::max(ahead, static_cast<int64_t>(unread.size()));
        }
      }
      most = std::max(most, ahead);
    }
    REQUIRE(most > before);
    before = most;
  }
}

TEST_CASE("training on a stream of the user's own", "[device]") {
  for (int64_t stage = 0; stage <= 3; ++stage) {
    INFO("stage " << stage);
    use_fake_devices();
    std::vector<State> weights(2);
    for (const bool own : {false, true}) {
      run_ranks(kRanks, [&](int64_t rank, const Group& group) {
        const c10::Device device = zero::fake::device(static_cast<c10::DeviceIndex>(rank));
        const auto model = std::make_shared<DeviceModel>(1, device);
        zero::ZeroOptimizer optimizer(*model, options_of(stage), zero::AdamW{}, group);
        const at::Tensor tokens = tokens_of(0, rank).to(device);
        const c10::Stream before = zero::fake::current_stream(device.index());
        const c10::Stream stream = own ? zero::fake::new_stream(device.index()) : before;
        c10::Event made(device.type());
        made.record(before);
        made.block(stream);
        {
          const c10::StreamGuard guard(stream);
          for (int64_t step = 0; step < 4; ++step) {
            loss_of(*model, tokens).backward();
            optimizer.clip_grad_norm_(1.0);
            optimizer.step();
            optimizer.zero_grad();
          }
          optimizer.synchronize();
          if (rank == 0) {
            optimizer.gathered([&] { weights[own ? 1 : 0] = on_cpu(weights_of(*model)); });
          } else {
            optimizer.gathered([] {});
          }
        }
        made.record(stream);
        made.block(before);
      });
      zero::fake::check();
    }
    REQUIRE(equal(weights[0], weights[1]));
  }
}

TEST_CASE("a step allocates what the step before did", "[device]") {
  use_fake_devices();
  for (int64_t stage = 0; stage <= 3; ++stage) {
    DeviceTraining training{.options = options_of(stage), .steps = 8, .clips = false};
    for (const DeviceRun& run : train_all(training)) {
      for (size_t step = 3; step < run.peaks.size(); ++step) {
        REQUIRE(run.peaks[step] == run.peaks[2]);
      }
    }
  }
}

TEST_CASE("ranks that part say so with ZERO_DEBUG", "[device]") {
  use_fake_devices();
  zero::fake::set_timeout(10.0);
  setenv("ZERO_DEBUG", "1", 1);
  std::vector<std::string> errors(kRanks);
  run_ranks(kRanks, [&](int64_t rank, const Group& group) {
    const c10::Device device = zero::fake::device(static_cast<c10::DeviceIndex>(rank));
    const auto model = std::make_shared<DeviceModel>(1, device);
    zero::Options options = options_of(3);
    options.timeout = 5.0;
    zero::ZeroOptimizer optimizer(*model, options, zero::AdamW{}, group);
    errors[rank] = error_of([&] {
      // One rank skips a block.
      at::Tensor x = at::embedding(model->tokens, tokens_of(0, 0).to(device));
      for (int64_t layer = rank; layer < 3; ++layer) {
        x = model->blocks[layer]->as<DeviceBlock>()->forward(x);
      }
      x.sum().backward();
    });
  });
  unsetenv("ZERO_DEBUG");
  zero::fake::set_timeout(30.0);
  zero::fake::take_errors();
  zero::fake::reset();
  for (const std::string& error : errors) {
    check_contains(error, {"all_gather of unit 'blocks."});
  }
}
