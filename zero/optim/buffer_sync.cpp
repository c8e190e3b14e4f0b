#include <zero/optim/buffer_sync.h>

#include <cstring>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <zero/comm/texts.h>

namespace zero::optim {
namespace {

// Of what ranks must agree on.
int64_t fingerprint(const std::vector<NamedBuffer>& buffers) {
  std::string text;
  for (const NamedBuffer& buffer : buffers) {
    text += c10::str(buffer.name, " ", buffer.tensor.dtype(), " ", buffer.tensor.sizes(), "\n");
  }
  return static_cast<int64_t>(comm::fingerprint(text) >> 1U);
}

// A buffer's values differ from those at `bytes`.
void take(const NamedBuffer& buffer, const at::Tensor& dense, void* bytes) {
  const at::Tensor source = at::from_blob(bytes, dense.sizes(), dense.options());
  if (buffer.statistics) {
    buffer.tensor.variable_data().copy_(source); // shares the memory, not the version
  } else {
    buffer.tensor.detach().copy_(source);
  }
}

} // namespace

void sync_buffers(
    const std::vector<NamedBuffer>& buffers,
    comm::Communicator& communicator,
    int64_t root,
    int64_t step) {
  if (communicator.size() == 1 || buffers.empty()) {
    return;
  }
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> dense;
  int64_t size = 0;
  for (const NamedBuffer& buffer : buffers) {
    dense.push_back(buffer.tensor.detach().contiguous().cpu());
    size += static_cast<int64_t>(dense.back().nbytes());
  }
  const at::Tensor message = at::empty({size}, at::kByte);
  auto* bytes = message.mutable_data_ptr<uint8_t>();
  if (communicator.rank() == root) {
    for (const at::Tensor& values : dense) {
      std::memcpy(bytes, values.const_data_ptr(), values.nbytes());
      bytes += values.nbytes();
    }
  }
  communicator
      .broadcast(
          message,
          root,
          {std::to_string(buffers.size()) + " buffers (" + buffers.front().name + " ...)",
           fingerprint(buffers),
           step})
      ->wait();
  if (communicator.rank() == root) {
    return;
  }
  for (size_t i = 0; i < buffers.size(); ++i) {
    const size_t bytes_here = dense[i].nbytes();
    if (bytes_here > 0 && std::memcmp(bytes, dense[i].const_data_ptr(), bytes_here) != 0) {
      take(buffers[i], dense[i], bytes);
    }
    bytes += bytes_here;
  }
}

} // namespace zero::optim
