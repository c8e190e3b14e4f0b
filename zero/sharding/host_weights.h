#pragma once

// HostWeights (Options::offload="optimizer"): the way between parameters on a device and
// the masters that the CPU steps. New weights are copied from pinned memory, on a stream
// of copies, while the host steps the next bucket; what users wrote to parameters is found
// by the tensors' version counters. See [Note: offload] in docs/design.md.

#include <array>
#include <memory>
#include <vector>

#include <zero/memory/copy_stream.h>
#include <zero/sharding/parameter_table.h>

namespace zero::sharding {

class HostWeights {
 public:
  HostWeights(ParameterTable& table, std::shared_ptr<memory::Account> account);
  ~HostWeights();
  HostWeights(const HostWeights&) = delete;
  HostWeights& operator=(const HostWeights&) = delete;

  // Pinned memory for `numel` weights of a bucket, to be written and sent; valid until the
  // next but one. The host waits until what it held before was copied.
  at::Tensor staging(int64_t bucket, int64_t numel);
  // Starts the copy of weights, from staging() or pinned masters, to the elements of the
  // bucket. What the current stream does next comes after it.
  void send(int64_t bucket, layout::Range elements, const at::Tensor& source, int64_t begin);
  // The host waits until nothing is read that send() was given for the bucket.
  void settle(int64_t bucket);

  // Whether somebody has written to the parameter since saw(); one that is about to come
  // back from other storage (ParameterTable::reattach) counts as written by note_moved().
  bool written(int64_t parameter) const;
  void note_moved();
  void saw(int64_t parameter);

 private:
  struct Staging {
    memory::FlatBuffer bytes;
    int64_t bucket = -1; // that it was taken for last
  };

  ParameterTable& table_;
  const std::shared_ptr<memory::Account> account_;
  memory::CopyStream stream_;
  std::array<Staging, 2> staging_;
  size_t next_ = 0;
  std::vector<memory::Moment> sent_; // by bucket
  std::vector<int64_t> versions_; // by parameter: seen; -1 never, or moved
};

} // namespace zero::sharding
