// Engine's comm hooks: the same on all ranks.

#include <zero/optim/engine_impl.h>

#include <utility>

#include <zero/autograd/backward_end.h>
#include <zero/comm/texts.h>

namespace zero {
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
      comm::bytes_of(hook ? c10::str("'", hook->name(), "'") : "none"),
      {"the registration of a comm hook", 0, impl_->gradients.steps(), false});
  const std::string first = comm::text_of(names.front());
  for (size_t rank = 1; rank < names.size(); ++rank) {
    TORCH_CHECK_VALUE(
        comm::text_of(names[rank]) == first,
        "[zero.optim] expected one comm hook on all ranks, got ",
        first,
        " on rank 0 and ",
        comm::text_of(names[rank]),
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
