#include <zero/checkpoint/together.h>

#include <exception>
#include <utility>

#include <c10/util/Exception.h>

#include <zero/comm/error_text.h>
#include <zero/comm/texts.h>

namespace zero::checkpoint {

Together::Together(Engine* engine, std::string what) : what_(std::move(what)) {
  if (engine != nullptr) {
    rank_ = engine->rank();
    size_ = engine->world_size();
    exchange_ = [engine](const at::Tensor& bytes) { return engine->exchange(bytes); };
  }
}

Together::Together(std::shared_ptr<comm::Communicator> communicator, std::string what)
    : what_(std::move(what)) {
  if (communicator) {
    rank_ = communicator->rank();
    size_ = communicator->size();
    exchange_ = [communicator = std::move(communicator), what = what_](const at::Tensor& bytes) {
      return communicator->exchange(bytes, {.what = what, .training = false});
    };
  }
}

std::vector<std::string> Together::exchange(const std::string& told) const {
  if (!exchange_) {
    return {told};
  }
  std::vector<std::string> results;
  try {
    for (const at::Tensor& bytes : exchange_(comm::bytes_of(told))) {
      results.push_back(comm::text_of(bytes));
    }
  } catch (const c10::DistBackendError& error) {
    C10_THROW_ERROR(
        DistBackendError,
        c10::str(
            error.what_without_backtrace(), "; ", what_, " is collective: call it on all ranks"));
  }
  return results;
}

std::vector<std::string> Together::run(const std::function<std::string()>& step) const {
  std::exception_ptr own;
  std::string told(1, '+');
  try {
    told.append(step());
  } catch (...) {
    own = std::current_exception();
    told.assign(1, '-').append(comm::text_of(own));
  }
  std::vector<std::string> results = exchange(told);
  if (own) {
    std::rethrow_exception(own);
  }
  for (size_t rank = 0; rank < results.size(); ++rank) {
    TORCH_CHECK(
        results[rank].front() == '+',
        "[zero.checkpoint] ",
        what_,
        " failed on rank ",
        rank,
        " (this is rank ",
        this->rank(),
        " of ",
        size(),
        "): ",
        results[rank].substr(1));
    results[rank].erase(0, 1);
  }
  return results;
}

std::string Together::run_first(const std::function<std::string()>& step) const {
  return run([&] { return rank() == 0 ? step() : std::string(); }).front();
}

void fill_together(
    Engine* engine,
    const Together& ranks,
    const std::function<void(const std::vector<StoredPart>&)>& fill) {
  const std::vector<StoredPart> parts =
      engine != nullptr ? engine->begin_loading() : std::vector<StoredPart>();
  const auto end = [&] {
    if (engine != nullptr) {
      engine->end_loading();
    }
  };
  try {
    ranks.run([&] {
      fill(parts);
      return std::string();
    });
  } catch (...) {
    end();
    throw;
  }
  end();
}

} // namespace zero::checkpoint
