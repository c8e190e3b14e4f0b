#include <zero/sharding/bucket_reducer.h>

#include <utility>

#include <ATen/core/grad_mode.h>

#include <zero/sharding/by_bucket.h>

namespace zero::sharding {

BucketReducer::BucketReducer(
    ParameterTable& table,
    std::shared_ptr<comm::Communicator> communicator,
    const std::shared_ptr<memory::Account>& account,
    double divisor)
    : table_(table),
      communicator_(std::move(communicator)),
      divisor_(divisor),
      pool_(account, communicator_->buffers()) {}

GradientBucket BucketReducer::describe(int64_t bucket, const at::Tensor& input) {
  const BucketEntry& entry = table_.bucket(bucket);
  GradientBucket described;
  described.index = bucket;
  described.what = entry.what;
  for (const int64_t index : entry.layout.parameters) {
    described.names.push_back(table_.entry(index).parameter.name);
  }
  described.gradients = input;
  described.rank = table_.rank();
  described.world_size = table_.world_size();
  described.shard_range = table_.shard(bucket);
  described.scratch =
      [this, bucket, options = input.options(), numel = input.numel()](c10::ScalarType dtype) {
        memory::Slab& slab = at_bucket(scratch_, bucket);
        slab = pool_.take(numel, options.dtype(dtype));
        return slab.tensor;
      };
  return described;
}

comm::WorkPtr BucketReducer::reduce_scatter(
    int64_t bucket,
    const at::Tensor& output,
    const at::Tensor& input,
    const at::Tensor& addend,
    const comm::Tag& tag) {
  at_bucket(outputs_, bucket) = output;
  if (!hook_) {
    return communicator_->reduce_scatter(output, input, {divisor_, addend}, tag);
  }
  const at::NoGradGuard no_grad; // backward with create_graph records
  return hook_->reduce(describe(bucket, input), *communicator_, output, {divisor_, addend}, tag);
}

comm::WorkPtr BucketReducer::all_reduce(
    int64_t bucket,
    const at::Tensor& whole,
    const at::Tensor& input,
    const at::Tensor& addend,
    const comm::Tag& tag) {
  if (!hook_ && whole.is_same(input)) {
    return communicator_->all_reduce(whole, {divisor_, addend}, tag);
  }
  const layout::Range shard = table_.shard(bucket);
  const at::Tensor own = memory::flat_view(whole, shard.begin, shard.size());
  const comm::WorkPtr work = reduce_scatter(bucket, own, input, addend, tag);
  if (hook_ && !hook_->in_order()) {
    work->wait();
  }
  return communicator_->all_gather(whole, own, tag);
}

void BucketReducer::finish(int64_t bucket) {
  at_bucket(outputs_, bucket).reset();
  if (has_bucket(scratch_, bucket)) {
    pool_.give(std::exchange(scratch_[bucket], {}));
  }
}

void BucketReducer::end_backward() {
  scratch_.clear();
  pool_.clear();
}

} // namespace zero::sharding
