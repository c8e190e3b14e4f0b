#include <zero/comm/hybrid_transport.h>

#include <cstring>
#include <exception>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <zero/comm/error_text.h>
#include <zero/comm/reduce_elements.h>
#include <zero/memory/elements.h>

namespace zero::comm {
namespace {

Place place_of(const std::unique_ptr<Transport>& transport) {
  return transport ? transport->place() : Place{};
}

// What sums of a dtype are held in until they are rounded.
at::ScalarType sum_type(at::ScalarType type) {
  return type == at::kBFloat16 || type == at::kHalf ? at::kFloat : type;
}

// The shard of a reduction as a tensor that keeps its memory.
at::Tensor shard_of(const ReduceArguments& arguments) {
  return at::from_blob(
      arguments.shard,
      {arguments.count},
      [owner = arguments.output](void*) {},
      at::TensorOptions(arguments.out_dtype));
}

// The sum over a replica, undivided.
ReduceArguments into(const ReduceArguments& arguments, const at::Tensor& sums) {
  ReduceArguments result = arguments;
  result.output = sums;
  result.shard = static_cast<char*>(sums.mutable_data_ptr());
  result.out_dtype = sums.scalar_type();
  result.out_item_size = static_cast<int64_t>(sums.element_size());
  result.addend = at::Tensor();
  result.addend_data = nullptr;
  result.divisor = 1.0;
  return result;
}

void reduce_alone(const ReduceArguments& arguments) {
  if (arguments.count > 0) {
    reduce_elements(
        arguments, arguments.shard, {arguments.whole}, /*addend=*/nullptr, arguments.count);
  }
}

at::Tensor converted(const char* data, at::ScalarType from, at::ScalarType to, int64_t count) {
  at::Tensor result = at::empty({count}, to);
  const at::Tensor source =
      at::from_blob(const_cast<char*>(data), {count}, at::TensorOptions(from)); // only read
  memory::convert_elements(result, 0, source, 0, count);
  return result;
}

// addend + sums / divisor, rounded once, to where the reduction goes.
void write_shard(const ReduceArguments& arguments, const at::Tensor& sums) {
  ReduceArguments last = into(arguments, sums);
  last.dtype = sums.scalar_type();
  last.item_size = last.out_item_size;
  last.divisor = arguments.divisor;
  if (arguments.count == 0) {
    return;
  }
  const bool rounds = arguments.out_dtype != last.out_dtype;
  const char* addend = arguments.addend_data;
  at::Tensor widened;
  if (rounds && addend != nullptr) {
    widened = converted(addend, arguments.out_dtype, last.out_dtype, arguments.count);
    addend = static_cast<const char*>(widened.const_data_ptr());
  }
  char* out = rounds ? last.shard : arguments.shard;
  reduce_elements(last, out, {last.shard}, addend, arguments.count);
  if (rounds) {
    memory::convert_elements(shard_of(arguments), 0, sums, 0, arguments.count);
  }
}

at::Tensor pack(const std::vector<at::Tensor>& messages) {
  int64_t bytes = static_cast<int64_t>(messages.size() * sizeof(int64_t));
  for (const at::Tensor& message : messages) {
    bytes += message.numel();
  }
  at::Tensor packed = at::empty({bytes}, at::kByte);
  auto* to = packed.mutable_data_ptr<uint8_t>();
  for (const at::Tensor& message : messages) {
    const int64_t length = message.numel();
    std::memcpy(to, &length, sizeof(length));
    to += sizeof(length);
    if (length > 0) {
      std::memcpy(to, message.const_data_ptr(), length);
    }
    to += length;
  }
  return packed;
}

void unpack(const at::Tensor& packed, int64_t count, std::vector<at::Tensor>& messages) {
  const auto* from = packed.const_data_ptr<uint8_t>();
  for (int64_t i = 0; i < count; ++i) {
    int64_t length = 0;
    std::memcpy(&length, from, sizeof(length));
    from += sizeof(length);
    messages.push_back(at::empty({length}, at::kByte));
    if (length > 0) {
      std::memcpy(messages.back().mutable_data_ptr(), from, length);
    }
    from += length;
  }
}

Opening with_bytes(const Opening& opening, const at::Tensor& message) {
  Opening result = opening;
  result.header.bytes = message.numel();
  return result;
}

} // namespace

HybridTransport::HybridTransport(
    std::unique_ptr<Transport> shard,
    std::unique_ptr<Transport> replicate)
    : shard_(std::move(shard)),
      replicate_(std::move(replicate)),
      shards_(place_of(shard_)),
      replicas_(place_of(replicate_)) {}

Place HybridTransport::place() const {
  return {replicas_.rank * shards_.size + shards_.rank, replicas_.size * shards_.size};
}

std::string HybridTransport::describe() const {
  const std::string none = "none (one rank)";
  return "shards: " + (shard_ ? shard_->describe() : none) +
      "; replicas: " + (replicate_ ? replicate_->describe() : none);
}

std::shared_ptr<memory::BufferSource> HybridTransport::buffers() const {
  return shard_ ? shard_->buffers() : nullptr;
}

std::string HybridTransport::where(Axis axis) const {
  const bool in_shard = axis == Axis::shard;
  const int64_t first = in_shard ? replicas_.rank * shards_.size : shards_.rank;
  const int64_t step = in_shard ? 1 : shards_.size;
  const int64_t size = in_shard ? shards_.size : replicas_.size;
  std::string text = in_shard ? "; in the shard group of replica " + std::to_string(replicas_.rank)
                              : "; in the replicate group of shard " + std::to_string(shards_.rank);
  text += ", whose ranks 0 to " + std::to_string(size - 1) + " are ranks ";
  for (int64_t rank = 0; rank < size; ++rank) {
    text += (rank == 0 ? "" : ", ") + std::to_string(first + rank * step);
  }
  return text + " of all " + std::to_string(place().size);
}

template <typename Step>
auto HybridTransport::within(Axis axis, const Step& step) -> decltype(step()) {
  try {
    return step();
  } catch (const c10::DistBackendError&) {
    TORCH_CHECK_WITH(DistBackendError, false, text_of(std::current_exception()), where(axis));
  }
}

int64_t HybridTransport::count(const Opening& opening, Axis axis, Kind kind, int64_t bytes) {
  if (opening.training) {
    const std::lock_guard lock(mutex_);
    Traffic::Count* counted = (axis == Axis::shard ? traffic_.shard : traffic_.replicate).of(kind);
    counted->calls += 1;
    counted->bytes += bytes;
  }
  return bytes;
}

std::optional<GroupTraffic> HybridTransport::group_traffic() const {
  const std::lock_guard lock(mutex_);
  return traffic_;
}

// ---- reductions ----

int64_t HybridTransport::reduce_scatter(const Opening& opening, const ReduceArguments& arguments) {
  return reduce(opening, arguments, Kind::reduce_scatter);
}

// The same bits as a reduce-scatter and an all-gather.
int64_t HybridTransport::all_reduce(const Opening& opening, const ReduceArguments& arguments) {
  int64_t sent = reduce(opening, arguments, Kind::all_reduce);
  if (shard_) {
    sent += within(Axis::shard, [&] {
      return count(
          opening,
          Axis::shard,
          Kind::all_reduce,
          shard_->all_gather(opening, gather_of(arguments)));
    });
  }
  return sent;
}

int64_t
HybridTransport::reduce(const Opening& opening, const ReduceArguments& arguments, Kind kind) {
  const auto type = sum_type(arguments.dtype);
  const int64_t unit = replicas_.size; // replicas share the sum's elements among them
  const bool in_place = arguments.out_dtype == type && arguments.addend_data == nullptr &&
      arguments.count % unit == 0;
  if (in_place) {
    const at::Tensor sums = shard_of(arguments);
    const int64_t sent = sum_shards(opening, into(arguments, sums), kind);
    return sent + add_replicas(opening, sums, arguments.divisor);
  }
  const at::Tensor sums = at::empty({(arguments.count + unit - 1) / unit * unit}, type);
  memory::zero_elements(sums, arguments.count, sums.numel() - arguments.count);
  const int64_t sent =
      sum_shards(opening, into(arguments, sums), kind) + add_replicas(opening, sums, 1.0);
  write_shard(arguments, sums);
  return sent;
}

int64_t
HybridTransport::sum_shards(const Opening& opening, const ReduceArguments& arguments, Kind kind) {
  if (!shard_) {
    reduce_alone(arguments);
    return 0;
  }
  return within(Axis::shard, [&] {
    return count(opening, Axis::shard, kind, shard_->reduce_scatter(opening, arguments));
  });
}

int64_t
HybridTransport::add_replicas(const Opening& opening, const at::Tensor& sums, double divisor) {
  const auto arguments = check_all_reduce(replicas_, sums, {divisor, {}}, {opening.description});
  if (!replicate_) {
    reduce_alone(arguments);
    return 0;
  }
  return within(Axis::replicate, [&] {
    return count(
        opening, Axis::replicate, Kind::all_reduce, replicate_->all_reduce(opening, arguments));
  });
}

// ---- what moves unchanged ----

int64_t HybridTransport::all_gather(const Opening& opening, const GatherArguments& arguments) {
  if (!shard_) {
    if (arguments.shard_bytes > 0 && arguments.whole != arguments.shard) {
      std::memcpy(arguments.whole, arguments.shard, arguments.shard_bytes);
    }
    return 0;
  }
  return within(Axis::shard, [&] {
    return count(opening, Axis::shard, Kind::all_gather, shard_->all_gather(opening, arguments));
  });
}

// From the root to the ranks that hold the same shard, and from each to its replica.
int64_t HybridTransport::broadcast(const Opening& opening, const at::Tensor& tensor, int64_t root) {
  int64_t sent = 0;
  if (replicate_ && root % shards_.size == shards_.rank) {
    sent += within(Axis::replicate, [&] {
      return count(
          opening,
          Axis::replicate,
          Kind::broadcast,
          replicate_->broadcast(opening, tensor, root / shards_.size));
    });
  }
  if (shard_) {
    sent += within(Axis::shard, [&] {
      return count(
          opening,
          Axis::shard,
          Kind::broadcast,
          shard_->broadcast(opening, tensor, root % shards_.size));
    });
  }
  return sent;
}

std::vector<at::Tensor> HybridTransport::exchange_shards(
    const Opening& opening,
    const at::Tensor& bytes) {
  if (!shard_) {
    return {bytes};
  }
  return within(Axis::shard, [&] { return shard_->exchange(opening, bytes); });
}

std::vector<at::Tensor> HybridTransport::exchange(const Opening& opening, const at::Tensor& bytes) {
  std::vector<at::Tensor> own = exchange_shards(opening, bytes);
  if (!replicate_) {
    return own;
  }
  const at::Tensor packed = pack(own);
  std::vector<at::Tensor> messages;
  for (const at::Tensor& replica : within(Axis::replicate, [&] {
         return replicate_->exchange(with_bytes(opening, packed), packed);
       })) {
    unpack(replica, shards_.size, messages);
  }
  return messages;
}

// Who leaves the second knows that every replica has left the first.
void HybridTransport::barrier(const Opening& opening) {
  if (shard_) {
    within(Axis::shard, [&] { shard_->barrier(opening); });
  }
  if (replicate_) {
    within(Axis::replicate, [&] { replicate_->barrier(opening); });
  }
}

// ---- failures ----

std::string HybridTransport::give_up(const std::string& why) noexcept {
  std::string others;
  for (const auto* group : {&shard_, &replicate_}) {
    if (*group) {
      others += (*group)->give_up(why);
    }
  }
  return others;
}

void HybridTransport::interrupt() {
  for (const auto* group : {&shard_, &replicate_}) {
    if (*group) {
      (*group)->interrupt();
    }
  }
}

bool HybridTransport::recovers() const {
  return (!shard_ || shard_->recovers()) && (!replicate_ || replicate_->recovers());
}

void HybridTransport::recover() {
  for (const auto* group : {&shard_, &replicate_}) {
    if (*group) {
      (*group)->recover();
    }
  }
}

bool HybridTransport::behind(int64_t submitted) const {
  return shard_ && shard_->behind(submitted);
}

bool HybridTransport::broken() const {
  return (shard_ && shard_->broken()) || (replicate_ && replicate_->broken());
}

} // namespace zero::comm
