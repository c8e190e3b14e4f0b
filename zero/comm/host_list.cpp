// See host_list.h.

#include <zero/comm/host_list.h>

namespace zero::comm {

std::string first_host(std::string_view list) {
  std::string host;
  while (!list.empty() && list.front() != ',') {
    if (list.front() != '[') {
      host += list.front();
      list.remove_prefix(1);
      continue;
    }
    const auto end = list.find(']');
    if (end == std::string_view::npos) {
      return {};
    }
    const auto ranges = list.substr(1, end - 1);
    const auto first = ranges.substr(0, ranges.find_first_of("-,"));
    if (first.empty()) {
      return {};
    }
    host += first;
    list.remove_prefix(end + 1);
  }
  return host;
}

} // namespace zero::comm
