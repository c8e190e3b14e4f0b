#include <zero/checkpoint/together.h>

#include <cstring>
#include <exception>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <zero/comm/error_text.h>

namespace zero::checkpoint {
namespace {

at::Tensor bytes_of(const std::string& text) {
  at::Tensor bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  if (!text.empty()) {
    std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  }
  return bytes;
}

std::string text_of(const at::Tensor& bytes) {
  return {static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel())};
}

} // namespace

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
    for (const at::Tensor& bytes : engine_->exchange(bytes_of(told))) {
      results.push_back(text_of(bytes));
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
