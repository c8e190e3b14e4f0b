#pragma once

// Random collectives whose results are checked against arithmetic done here. Every
// rank draws the same ones from the same generator. No Catch: processes use it too.

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <zero/comm/communicator.h>
#include <zero/comm/host_segment.h>

#include "random_values.h"

namespace zero::test {

using Generator = std::mt19937_64;

inline int64_t below(Generator& generator, int64_t limit) {
  return static_cast<int64_t>(generator() % static_cast<uint64_t>(limit));
}

// One operation, the same on every rank.
struct Drawn {
  comm::Kind kind = comm::Kind::barrier;
  at::ScalarType dtype = at::kByte;
  int64_t shard = 0; // elements
  int64_t offset = 0; // of each buffer in its allocation, in elements
  double divisor = 1.0;
  uint64_t adders = 0; // bit r: rank r has an addend
  bool in_place = false; // shards are slices of the whole; addends are the output
  int64_t root = 0;
  uint64_t seed = 0;

  bool blocks() const {
    return kind == comm::Kind::exchange || kind == comm::Kind::barrier;
  }
  bool adds(int64_t rank) const {
    return ((adders >> rank) & 1) != 0;
  }
  // In exchange() every rank has a length of its own.
  int64_t length(int64_t rank) const {
    return shard * (random_bits(seed, rank, -1) % 3);
  }
  std::string text() const {
    return c10::str(
        comm::name_of(kind),
        " of ",
        shard,
        " ",
        dtype,
        " at ",
        offset,
        ", divisor ",
        divisor,
        ", adders ",
        adders,
        ", in place ",
        in_place,
        ", root ",
        root,
        ", seed ",
        seed);
  }
};

// Bytes of a shard: mostly few, some about what fits into a post, and out of a
// thousand `large` of several pieces or windows.
inline int64_t draw_bytes(Generator& generator, int64_t size, int64_t large) {
  const int64_t chance = below(generator, 1000);
  const int64_t shards = 1 + below(generator, size + 1);
  const int64_t nudge = below(generator, 33) - 16;
  if (chance < large) {
    constexpr int64_t kUnit = comm::kHostWindowBytes / 2;
    return std::max<int64_t>(0, (1 + below(generator, 4)) * kUnit / shards + nudge);
  }
  if (chance < 150) {
    return comm::kHostInlineBytes / shards + nudge;
  }
  return chance < 250 ? below(generator, 40000) : below(generator, 200);
}

inline Drawn draw(Generator& generator, int64_t size, int64_t large) {
  using comm::Kind;
  constexpr std::array kKinds{
      Kind::reduce_scatter,
      Kind::all_gather,
      Kind::all_reduce,
      Kind::broadcast,
      Kind::exchange,
      Kind::barrier};
  constexpr std::array kTypes{
      at::kFloat,
      at::kDouble,
      at::kBFloat16,
      at::kHalf,
      at::kChar,
      at::kByte,
      at::kUInt16,
      at::kShort,
      at::kInt,
      at::kLong};
  Drawn drawn;
  drawn.kind = kKinds[below(generator, kKinds.size())];
  drawn.dtype = drawn.kind == Kind::exchange ? at::kByte : kTypes[below(generator, kTypes.size())];
  drawn.shard = draw_bytes(generator, size, large) / static_cast<int64_t>(elementSize(drawn.dtype));
  drawn.offset = below(generator, 2) * below(generator, 70);
  const bool divides = c10::isFloatingType(drawn.dtype) && below(generator, 2) == 1;
  drawn.divisor = divides ? 0.75 * static_cast<double>(size) : 1.0;
  drawn.adders = below(generator, 2) * generator();
  drawn.in_place = below(generator, 2) == 1;
  drawn.root = below(generator, size);
  drawn.seed = generator();
  return drawn;
}

// A drawn operation on one rank, and whether its result is right.
class Flight {
 public:
  Flight(comm::Communicator& comm, const Drawn& drawn, int64_t step)
      : drawn_(drawn), rank_(comm.rank()), size_(comm.size()) {
    const comm::Tag tag{.what = "random", .id = drawn.root, .step = step};
    fill(comm.buffers().get());
    launch(comm, tag);
  }

  // Waits, and throws when the operation did or its result is wrong.
  void finish() {
    if (work_) {
      work_->wait();
      TORCH_CHECK(work_->done(), "done() after wait(): ", drawn_.text());
    }
    with_type(drawn_.dtype, [&](auto type) {
      using T = decltype(type);
      check_part<T>();
      check_whole<T>();
      check_messages();
    });
    for (const auto* buffer : {&whole_, &part_, &addend_}) {
      TORCH_CHECK(!buffer->view.defined() || buffer->intact(), "written beside: ", drawn_.text());
    }
  }

 private:
  using Kind = comm::Kind;

  bool reduces() const {
    return drawn_.kind == Kind::reduce_scatter || drawn_.kind == Kind::all_reduce;
  }
  bool has_part() const {
    return drawn_.kind == Kind::reduce_scatter || drawn_.kind == Kind::all_gather;
  }
  at::Tensor own_slice() const {
    return whole_.view.narrow(0, rank_ * drawn_.shard, drawn_.shard);
  }
  at::Tensor part() const {
    return drawn_.in_place ? own_slice() : part_.view;
  }
  int64_t whole_count() const {
    switch (drawn_.kind) {
    case Kind::barrier:
      return 0;
    case Kind::broadcast:
      return drawn_.shard;
    case Kind::exchange:
      return drawn_.length(rank_);
    default:
      return size_ * drawn_.shard;
    }
  }
  // Addends are values of ranks that there are not.
  int64_t addend_rank(int64_t rank) const {
    return size_ + rank;
  }

  template <typename T>
  void put(const at::Tensor& tensor, int64_t rank) const {
    auto* data = static_cast<T*>(tensor.mutable_data_ptr());
    for (int64_t i = 0; i < tensor.numel(); ++i) {
      data[i] = random_value<T>(drawn_.seed, rank, i);
    }
  }

  // About half of the buffers in memory that peers read in place, on each rank others.
  void fill(memory::BufferSource* shared_memory) {
    const auto buffer = [&](int64_t count) {
      const bool shared = (random_bits(drawn_.seed, rank_, -2 - count) & 1) != 0;
      return GuardedBuffer(drawn_.dtype, count, drawn_.offset, shared ? shared_memory : nullptr);
    };
    whole_ = buffer(whole_count());
    if (has_part() && !drawn_.in_place) {
      part_ = buffer(drawn_.shard);
    }
    with_type(drawn_.dtype, [&](auto type) {
      using T = decltype(type);
      put<T>(whole_.view, rank_);
      if (drawn_.kind == Kind::all_gather) {
        put<T>(part(), rank_);
      }
      if (reduces() && drawn_.adds(rank_)) {
        // The output may be the addend too, unless it is part of the input.
        const bool shared = part_.view.defined() && drawn_.root == 0;
        addend_ = shared ? part_ : buffer(drawn_.shard);
        put<T>(addend_.view, addend_rank(rank_));
      }
    });
  }

  void launch(comm::Communicator& comm, const comm::Tag& tag) {
    const comm::Reduction reduction{drawn_.divisor, addend_.view};
    switch (drawn_.kind) {
    case Kind::reduce_scatter:
      work_ = comm.reduce_scatter(part(), whole_.view, reduction, tag);
      break;
    case Kind::all_gather:
      work_ = comm.all_gather(whole_.view, part(), tag);
      break;
    case Kind::all_reduce:
      work_ = comm.all_reduce(whole_.view, reduction, tag);
      break;
    case Kind::broadcast:
      work_ = comm.broadcast(whole_.view, drawn_.root, tag);
      break;
    case Kind::exchange:
      messages_ = comm.exchange(whole_.view, tag);
      break;
    case Kind::barrier:
      comm.barrier(tag);
    }
  }

  template <typename T>
  T sum(int64_t shard, int64_t index) const {
    std::optional<T> addend;
    if (drawn_.adds(shard)) {
      addend = random_value<T>(drawn_.seed, addend_rank(shard), index);
    }
    return reduced_value<T>(
        drawn_.seed, size_, shard * drawn_.shard + index, drawn_.divisor, addend);
  }

  // expected(i) is what element i is to be.
  template <typename T, typename Expected>
  void check(const at::Tensor& tensor, const char* name, const Expected& expected) const {
    const auto* data = static_cast<const T*>(tensor.const_data_ptr());
    for (int64_t i = 0; i < tensor.numel(); ++i) {
      const T right = expected(i);
      TORCH_CHECK(
          std::memcmp(data + i, &right, sizeof(T)) == 0,
          "wrong element ",
          i,
          " of the ",
          name,
          " on rank ",
          rank_,
          " of ",
          size_,
          ": ",
          drawn_.text());
    }
  }

  template <typename T>
  void check_part() const {
    if (drawn_.kind == Kind::reduce_scatter) {
      check<T>(part(), "shard", [&](int64_t i) { return sum<T>(rank_, i); });
    } else if (drawn_.kind == Kind::all_gather) {
      check<T>(part(), "shard", [&](int64_t i) { return random_value<T>(drawn_.seed, rank_, i); });
    }
    if (addend_.view.defined() && !addend_.view.is_same(part_.view)) {
      check<T>(addend_.view, "addend", [&](int64_t i) {
        return random_value<T>(drawn_.seed, addend_rank(rank_), i);
      });
    }
  }

  template <typename T>
  void check_whole() const {
    check<T>(whole_.view, "whole", [&](int64_t i) {
      const int64_t shard = drawn_.shard == 0 ? 0 : i / drawn_.shard;
      switch (drawn_.kind) {
      case Kind::all_reduce:
        return sum<T>(shard, i % drawn_.shard);
      case Kind::all_gather:
        return random_value<T>(drawn_.seed, shard, i % drawn_.shard);
      case Kind::broadcast:
        return random_value<T>(drawn_.seed, drawn_.root, i);
      case Kind::reduce_scatter:
        if (drawn_.in_place && shard == rank_) {
          return sum<T>(shard, i % drawn_.shard);
        }
        [[fallthrough]];
      default:
        return random_value<T>(drawn_.seed, rank_, i);
      }
    });
  }

  void check_messages() const {
    for (int64_t rank = 0; rank < static_cast<int64_t>(messages_.size()); ++rank) {
      TORCH_CHECK(messages_[rank].numel() == drawn_.length(rank), "a length: ", drawn_.text());
      check<uint8_t>(messages_[rank], "message", [&](int64_t i) {
        return random_value<uint8_t>(drawn_.seed, rank, i);
      });
    }
  }

  Drawn drawn_;
  int64_t rank_;
  int64_t size_;
  GuardedBuffer whole_;
  GuardedBuffer part_;
  GuardedBuffer addend_;
  comm::WorkPtr work_;
  std::vector<at::Tensor> messages_;
};

// A few operations over two channels, which each rank interleaves and waits for as
// `own` says. Calls that block stay in one channel, or ranks could wait in a circle.
inline void run_sequence(
    const std::vector<std::shared_ptr<comm::Communicator>>& channels,
    Generator& common,
    Generator& own,
    int64_t large) {
  std::array<std::vector<Drawn>, 2> plans;
  const int64_t blocking = below(common, 2);
  const auto count = 1 + below(common, 6);
  for (int64_t i = 0; i < count; ++i) {
    const auto drawn = draw(common, channels[0]->size(), large);
    const int64_t channel = below(common, 2);
    plans[drawn.blocks() ? blocking : channel].push_back(drawn);
  }
  std::vector<Flight> flights;
  std::array<std::size_t, 2> next{};
  while (next[0] < plans[0].size() || next[1] < plans[1].size()) {
    const int64_t wanted = below(own, 2);
    const int64_t channel = next[wanted] < plans[wanted].size() ? wanted : 1 - wanted;
    const auto at = next[channel]++;
    flights.emplace_back(*channels[channel], plans[channel][at], static_cast<int64_t>(at));
  }
  std::shuffle(flights.begin(), flights.end(), own);
  for (auto& flight : flights) {
    flight.finish();
  }
}

} // namespace zero::test
