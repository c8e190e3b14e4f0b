#include <zero/checkpoint/together.h>

#include <exception>

#include <c10/util/Exception.h>

#include <zero/comm/error_text.h>
#include <zero/comm/texts.h>

namespace zero::checkpoint {
std::vector<std::string> Together::run(const std::function<std::string()>& step) const {
  std::exception_ptr own;
  std::string told(1, '+');
  try {
    told.append(step());
  } catch (...) {
    own = std::current_exception();
    told.assign(1, '-').append(comm::text_of(own));
  }
  std::vector<std::string> results;
  if (engine_ == nullptr) {
    results.push_back(told);
  } else {
    for (const at::Tensor& bytes : engine_->exchange(comm::bytes_of(told))) {
      results.push_back(comm::text_of(bytes));
    }
  }
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

} // namespace zero::checkpoint
