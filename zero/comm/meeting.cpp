#include <zero/comm/meeting.h>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <zero/comm/milliseconds.h>

namespace zero::comm {
namespace {

std::string key_of(const std::string& name, int64_t rank) {
  return name + "/" + std::to_string(rank);
}

std::string missing_ranks(c10d::Store& store, const std::string& name, int64_t size) {
  std::string missing;
  try {
    for (int64_t peer = 0; peer < size; ++peer) {
      if (!store.check({key_of(name, peer)})) {
        missing += (missing.empty() ? "" : ", ") + std::to_string(peer);
      }
    }
  } catch (const std::exception&) {
    return {};
  }
  return missing;
}

} // namespace

// The store's own complaint about a rank that is missing names a key.
std::vector<std::string> tell_all(
    c10d::Store& store,
    const std::string& name,
    int64_t rank,
    int64_t size,
    const std::string& text,
    double timeout_seconds) {
  std::vector<std::string> keys;
  for (int64_t peer = 0; peer < size; ++peer) {
    keys.push_back(key_of(name, peer));
  }
  try {
    store.set(keys[rank], std::vector<uint8_t>(text.begin(), text.end()));
    store.wait(keys, to_milliseconds(timeout_seconds));
    std::vector<std::string> texts;
    for (const std::string& key : keys) {
      const auto bytes = store.get(key);
      texts.emplace_back(bytes.begin(), bytes.end());
    }
    return texts;
  } catch (const std::exception& error) {
    const auto missing = missing_ranks(store, name, size);
    TORCH_CHECK_WITH(
        DistBackendError,
        missing.empty(),
        "[zero.comm] expected ",
        size,
        " ranks to meet within ",
        timeout_seconds,
        " s, got no sign of rank ",
        missing,
        " (rank ",
        rank,
        " of ",
        size,
        " waited); all ranks must make their group or optimizer at the same point: see whether "
        "rank ",
        missing,
        " failed before it, or raise the timeout");
    TORCH_CHECK_WITH(
        DistBackendError,
        false,
        "[zero.comm] expected ",
        size,
        " ranks to meet at their c10d store, got an error from it "
        "(rank ",
        rank,
        " of ",
        size,
        "); see whether the rank that serves the store still runs: ",
        error.what());
  }
}

} // namespace zero::comm
