// Engine's comm hooks: the same on all ranks.

#include <zero/optim/engine_impl.h>

#include <cstring>
#include <utility>

#include <ATen/ops/empty.h>

#include <zero/autograd/backward_end.h>

namespace zero {
namespace {

at::Tensor bytes_of(const std::string& text) {
  at::Tensor bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  return bytes;
}

std::string text_of(const at::Tensor& bytes) {
  return {static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel())};
}

} // namespace

void Engine::register_comm_hook(std::shared_ptr<CommHook> hook) {
  comm::Communicator& communicator = *impl_->communicator;
  TORCH_CHECK(
      !autograd::inside_backward() && impl_->gradients.idle(),
      "[zero.optim] a comm hook can't be registered inside backward (rank ",
      communicator.rank(),
      " of ",
      communicator.size(),
      "); register it before or after");
  impl_->announce("register_comm_hook");
  impl_->recover_if_failed();
  const auto names = communicator.exchange(
      bytes_of(hook ? c10::str("'", hook->name(), "'") : "none"),
      {"the registration of a comm hook", 0, impl_->gradients.steps(), false});
  const std::string first = text_of(names.front());
  for (size_t rank = 1; rank < names.size(); ++rank) {
    TORCH_CHECK_VALUE(
        text_of(names[rank]) == first,
        "[zero.optim] expected one comm hook on all ranks, got ",
        first,
        " on rank 0 and ",
        text_of(names[rank]),
        " on rank ",
        rank,
        " (seen on rank ",
        communicator.rank(),
        " of ",
        communicator.size(),
        "); nothing was changed: register the same hook everywhere");
  }
  impl_->gradients.reducer().set_hook(std::move(hook));
}

} // namespace zero
