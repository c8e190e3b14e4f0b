#include <utility>

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <zero/comm/device_reduce.h>
#include <zero/comm/stream_collectives.h>
#include <zero/memory/flat_buffer.h>

namespace zero::comm {
namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// Queued on the current stream itself.
template <typename BackendOptions>
BackendOptions on_current_stream() {
  BackendOptions options;
  options.asyncOp = false;
  return options;
}

bool has_16_bits(at::ScalarType type) {
  return memory::has_16_bits(c10::scalarTypeToTypeMeta(type));
}

class BackendCollectives final : public StreamCollectives {
 public:
  BackendCollectives(
      c10::Device device,
      const Place& place,
      const Place& shards,
      BackendPtr shard,
      BackendPtr replicate,
      bool registered_buffers)
      : StreamCollectives(device, place, shards, /*own_stream=*/true),
        shard_(std::move(shard)),
        replicate_(std::move(replicate)),
        registered_buffers_(registered_buffers) {}

  ~BackendCollectives() override {
    for (const BackendPtr& backend : {shard_, replicate_}) {
      try {
        if (backend) {
          backend->shutdown();
        }
      } catch (...) { // NOLINT(bugprone-empty-catch): it is of no use any more
      }
    }
  }
  BackendCollectives(const BackendCollectives&) = delete;
  BackendCollectives& operator=(const BackendCollectives&) = delete;

  std::string describe() const override {
    const auto& any = shard_ ? shard_ : replicate_;
    return "group (" + any->getBackendName() + ")";
  }

  c10::Storage allocate(int64_t bytes) override {
    const bool has = registered_buffers_ && shard_ && shard_->supportsTensorAlloc(device_.index());
    return has
        ? shard_->allocateTensor(bytes, at::TensorOptions(at::kByte).device(device_)).storage()
        : c10::Storage();
  }

  void abort() noexcept override {
    for (const BackendPtr& backend : {shard_, replicate_}) {
      try {
        if (backend) {
          backend->abort();
        }
      } catch (...) { // NOLINT(bugprone-empty-catch): the failure is known already
      }
    }
  }

 protected:
  void do_reduce_scatter(const ReduceArguments& arguments) override {
    if (!replicate_) {
      sum_shards(arguments, arguments.output, arguments.addend, arguments.divisor);
      return;
    }
    // As HybridTransport: sums over the replica, over the replicas, and then divided.
    const auto type = has_16_bits(arguments.dtype) ? at::kFloat : arguments.dtype;
    const bool in_place = arguments.out_dtype == type && !arguments.addend.defined();
    at::Tensor sums = in_place
        ? arguments.output
        : at::empty({arguments.count}, arguments.input.options().dtype(type));
    sum_shards(arguments, sums, at::Tensor(), 1.0);
    std::vector<at::Tensor> tensors{sums};
    replicate_->allreduce(tensors, on_current_stream<c10d::AllreduceOptions>());
    finish(sums, arguments.output, arguments.addend, arguments.divisor);
  }

  void do_all_gather(const std::vector<Gather>& gathers) override {
    if (!shard_) {
      for (const Gather& gather : gathers) {
        copy_on_device(gather.output, gather.input);
      }
      return;
    }
    const bool together = gathers.size() > 1 && shard_->supportsCoalescing();
    if (together) {
      shard_->startCoalescing();
    }
    for (const Gather& gather : gathers) {
      at::Tensor output = gather.output;
      at::Tensor input = gather.input;
      shard_->_allgather_base(output, input, on_current_stream<c10d::AllgatherOptions>());
    }
    if (together) {
      if (const auto work = shard_->endCoalescing()) {
        work->wait(); // orders this stream after it, where the backend used another
      }
    }
  }

  void do_all_reduce(const ReduceArguments& arguments) override {
    const bool plain =
        shard_ && !replicate_ && !sums_here(arguments.dtype) && !arguments.addend.defined();
    if (plain) {
      const bool mean = divides(arguments);
      auto options = on_current_stream<c10d::AllreduceOptions>();
      options.reduceOp = mean ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
      std::vector<at::Tensor> tensors{arguments.output};
      shard_->allreduce(tensors, options);
      finish(arguments.output, arguments.output, at::Tensor(), mean ? 1.0 : arguments.divisor);
      return;
    }
    ReduceArguments own = arguments;
    own.output =
        memory::flat_view(arguments.output, shards_.rank * arguments.count, arguments.count);
    do_reduce_scatter(own);
    do_all_gather({{arguments.output, own.output, {}}});
  }

  // From the root to the ranks that hold the same shard, and from each to its replica.
  void do_broadcast(const at::Tensor& tensor, int64_t root) override {
    std::vector<at::Tensor> tensors{tensor};
    auto options = on_current_stream<c10d::BroadcastOptions>();
    if (replicate_ && root % shards_.size == shards_.rank) {
      options.rootRank = root / shards_.size;
      replicate_->broadcast(tensors, options);
    }
    if (shard_) {
      options.rootRank = root % shards_.size;
      shard_->broadcast(tensors, options);
    }
  }

  int64_t bytes_between_replicas(const ReduceArguments& arguments) const override {
    const int64_t replicas = place_.size / shards_.size;
    const int64_t item = has_16_bits(arguments.dtype) ? 4 : arguments.item_size;
    return 2 * (replicas - 1) * ((arguments.count + replicas - 1) / replicas) * item;
  }

 private:
  // Whether this rank adds the ranks' inputs itself.
  static bool sums_here(at::ScalarType type) {
    return has_16_bits(type) ||
        (at::globalContext().deterministicAlgorithms() && c10::isFloatingType(type));
  }

  bool divides(const ReduceArguments& arguments) const {
    return arguments.divisor == static_cast<double>(shards_.size) && shards_.size > 1 &&
        c10::isFloatingType(arguments.dtype);
  }

  // output = addend + sum / divisor over the replica.
  void sum_shards(
      const ReduceArguments& arguments,
      at::Tensor output,
      const at::Tensor& addend,
      double divisor) {
    at::Tensor input = arguments.input;
    if (!shard_) {
      reduce_on_device(input, 1, output, addend, divisor);
    } else if (sums_here(arguments.dtype)) {
      at::Tensor parts = at::empty({input.numel()}, input.options());
      std::vector<int64_t> even;
      shard_->alltoall_base(parts, input, even, even, on_current_stream<c10d::AllToAllOptions>());
      reduce_on_device(parts, shards_.size, output, addend, divisor);
    } else {
      const bool mean = divides(arguments) && divisor != 1.0 && !addend.defined();
      auto options = on_current_stream<c10d::ReduceScatterOptions>();
      options.reduceOp = mean ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
      shard_->_reduce_scatter_base(output, input, options);
      finish(output, output, addend, mean ? 1.0 : divisor);
    }
  }

  // output = addend + sums / divisor.
  void finish(
      const at::Tensor& sums,
      const at::Tensor& output,
      const at::Tensor& addend,
      double divisor) {
    if (divisor != 1.0 || addend.defined() || !sums.is_same(output)) {
      reduce_on_device(sums, 1, output, addend, divisor);
    }
  }

  const BackendPtr shard_; // null: one rank
  const BackendPtr replicate_;
  const bool registered_buffers_;
};

} // namespace

std::unique_ptr<DeviceCollectives> make_backend_collectives(
    c10::Device device,
    const Place& place,
    const Place& shards,
    c10::intrusive_ptr<c10d::Backend> shard,
    c10::intrusive_ptr<c10d::Backend> replicate,
    bool registered_buffers) {
  return std::make_unique<BackendCollectives>(
      device, place, shards, std::move(shard), std::move(replicate), registered_buffers);
}

} // namespace zero::comm
